package devices

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Variable names other directories of CDI specifications, separated by colons.
const Variable = "SBXRUN_CDI_DIRS"

// Limits on specifications. NVIDIA's for eight partitioned GPUs has about 100 KiB.
const (
	maxSize  = 1 << 20 // of a file
	maxFiles = 200     // in all directories
)

// spec is a CDI specification. Decoding rejects members that are not listed here, because a sandbox without them could
// be weaker or incomplete.
type spec struct {
	Version     string            `json:"cdiVersion"`
	Kind        string            `json:"kind"`
	Annotations map[string]string `json:"annotations"`
	Devices     []device          `json:"devices"`
	Edits       edits             `json:"containerEdits"`

	path string
	dir  int // number of the directory; later ones take precedence
}

type device struct {
	Name        string            `json:"name"`
	Annotations map[string]string `json:"annotations"`
	Edits       edits             `json:"containerEdits"`
}

type edits struct {
	Env         []string        `json:"env"`
	DeviceNodes []node          `json:"deviceNodes"`
	NetDevices  []any           `json:"netDevices"`
	Hooks       []hook          `json:"hooks"`
	Mounts      []mount         `json:"mounts"`
	IntelRdt    json.RawMessage `json:"intelRdt"`
	GIDs        []uint32        `json:"additionalGids"`
}

type node struct {
	Path        string  `json:"path"`
	HostPath    string  `json:"hostPath"`
	Type        string  `json:"type"`
	Major       uint32  `json:"major"`
	Minor       uint32  `json:"minor"`
	FileMode    *uint32 `json:"fileMode"` // FileMode, UID and GID have no effect: the node is the host's
	Permissions string  `json:"permissions"`
	UID         *uint32 `json:"uid"`
	GID         *uint32 `json:"gid"`
}

type mount struct {
	HostPath      string   `json:"hostPath"`
	ContainerPath string   `json:"containerPath"`
	Type          string   `json:"type"`
	Options       []string `json:"options"`
}

type hook struct {
	HookName string   `json:"hookName"`
	Path     string   `json:"path"`
	Args     []string `json:"args"`
	Env      []string `json:"env"`
	Timeout  *int     `json:"timeout"`
}

// specs are the specifications of this machine.
type specs struct {
	list   []*spec
	broken []error
}

// Dirs returns the directories of CDI specifications, those with precedence last.
func Dirs() []string {
	if dirs := os.Getenv(Variable); dirs != "" {
		return strings.Split(dirs, ":")
	}
	return []string{"/etc/cdi", "/var/run/cdi"}
}

// Known returns the names of all devices with a CDI specification, in order, and an error if a specification cannot be
// used.
func Known() (names []string, err error) {
	s := read()
	return s.names(), result.All(s.broken...)
}

// read reads all specifications.
func read() *specs {
	s := new(specs)
	files := 0
	for i, dir := range Dirs() {
		if !path.IsAbs(dir) {
			s.broken = append(s.broken, fmt.Errorf("%s: the directory %q is not an absolute path", Variable, dir))
			continue
		}
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.broken = append(s.broken, err)
		}
		for _, e := range entries {
			name := path.Join(dir, e.Name())
			if ext := path.Ext(name); e.IsDir() || ext != ".json" && ext != ".yaml" {
				continue
			}
			if files++; files > maxFiles {
				s.broken = append(s.broken, fmt.Errorf("%s: more than %d CDI specifications", dir, maxFiles))
				return s
			}
			one, err := readSpec(name)
			if err != nil {
				s.broken = append(s.broken, err)
				continue
			}
			one.path, one.dir = name, i
			s.list = append(s.list, one)
		}
	}
	return s
}

// readSpec reads a specification that only root or the caller can change, because it decides what a sandbox sees.
func readSpec(name string) (*spec, error) {
	real, err := safeopen.File(name, true)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(real)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err == nil && len(text) > maxSize {
		err = fmt.Errorf("larger than %d MiB", maxSize>>20)
	}
	var s *spec
	if err == nil {
		s, err = parse(text, path.Ext(name) == ".yaml")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// YAML translates a specification from YAML to JSON. Programs set it, to the function of package cdiyaml or to one that
// lets sbxrund do that.
var YAML = func([]byte) ([]byte, error) { return nil, errors.New("this program cannot read YAML") }

// YAMLWord is the first argument with which sbxrund translates its stdin as [YAML] does.
const YAMLWord = "cdi-yaml"

// parse decodes and checks a specification.
func parse(text []byte, isYAML bool) (*spec, error) {
	if isYAML {
		var err error
		if text, err = YAML(text); err != nil {
			return nil, errors.New(strings.Join(strings.Fields(err.Error()), " ")) // errors of package yaml have several lines
		}
	}
	s := new(spec)
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return nil, err
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("text after the specification")
	}
	major, _, _ := strings.Cut(s.Version, ".")
	switch {
	case major != "0" && major != "1":
		return nil, fmt.Errorf("unknown cdiVersion %.20q", s.Version)
	case !validKind(s.Kind):
		return nil, fmt.Errorf("invalid kind %.80q", s.Kind)
	}
	for i, d := range s.Devices {
		if !validWord(d.Name, "_-.:") {
			return nil, fmt.Errorf("invalid device name %.80q", d.Name)
		}
		if slices.ContainsFunc(s.Devices[:i], func(other device) bool { return other.Name == d.Name }) {
			return nil, fmt.Errorf("device %q is defined twice", d.Name)
		}
	}
	return s, nil
}

// names returns the names of all devices, in order.
func (s *specs) names() (names []string) {
	for _, spec := range s.list {
		for _, d := range spec.Devices {
			names = append(names, spec.Kind+"="+d.Name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// find returns the device with a CDI name, and its specification.
func (s *specs) find(name string) (spec *spec, d *device, err error) {
	kind, short, _ := cut(name)
	for _, one := range s.list {
		i := slices.IndexFunc(one.Devices, func(d device) bool { return d.Name == short })
		switch {
		case one.Kind != kind || i < 0:
		case spec != nil && spec.dir == one.dir:
			return nil, nil, &result.Error{Code: "device", Message: fmt.Sprintf("device %q: both %s and %s define it", name, spec.path, one.path), Hint: "remove one of them"}
		default: // the directories are in the order of precedence
			spec, d = one, &one.Devices[i]
		}
	}
	if spec != nil {
		return spec, d, nil
	}
	e := &result.Error{Code: "device", Message: fmt.Sprintf("device %q: no CDI specification defines it", name)}
	if err := result.All(s.broken...); err != nil {
		e.Message += "; " + err.Error()
		e.Err = err
	}
	if names := s.names(); len(names) > 0 {
		e.Hint = "known devices: " + Listed(names)
	} else if len(s.broken) == 0 {
		e.Hint = "there are none in " + strings.Join(Dirs(), " and ") + "; for NVIDIA GPUs, nvidia-ctk cdi generate writes one"
	}
	return nil, nil, e
}

// Listed formats names for people, on one line.
func Listed(names []string) string {
	const most = 8
	if n := len(names); n > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), n-most)
	}
	return strings.Join(names, ", ")
}

// source returns the path of a node on the host.
func (n *node) source() string { return cmp.Or(n.HostPath, n.Path) }
