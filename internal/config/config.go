// Package config reads the server's configuration: the TOML file, the tokens, and the defaults. Unknown keys are
// errors.
package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/tools"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Config is the whole file. docs/reference/configuration.md describes every key. Numbers tagged zero:"no" must be
// positive.
type Config struct {
	Listen       []string        `toml:"listen"`
	TokenFile    string          `toml:"token_file"`
	TLSCert      string          `toml:"tls_cert"`
	TLSKey       string          `toml:"tls_key"`
	StateDir     string          `toml:"state_dir"`
	DataDir      string          `toml:"data_dir"`
	DrainTimeout values.Duration `toml:"drain_timeout"`
	ProofTimeout values.Duration `toml:"proof_timeout" zero:"no"`
	Places       int             `toml:"places" zero:"no"`
	Processes    int             `toml:"processes"`
	MaxBody      values.Size     `toml:"max_body" zero:"no"`
	Buffers      values.Size     `toml:"buffers" zero:"no"`
	Connections  int             `toml:"connections" zero:"no"`

	MetricsTenants []string `toml:"metrics_tenants"`
	Hosts          []string `toml:"hosts"`
	ShowCode       bool     `toml:"show_code"`

	NATS      NATS                      `toml:"nats"`
	Call      Call                      `toml:"call"`
	Calls     Calls                     `toml:"calls"`
	Rooms     Rooms                     `toml:"rooms"`
	Sandbox   Sandbox                   `toml:"sandbox"`
	Sessions  Sessions                  `toml:"sessions"`
	Files     Files                     `toml:"files"`
	MCP       MCP                       `toml:"mcp"`
	Overlays  map[string]string         `toml:"overlays"`
	Images    map[string]Image          `toml:"images"`
	Tenant    Tenant                    `toml:"tenant"`
	Tenants   map[string]Tenant         `toml:"tenants"`
	Languages map[string]cells.Language `toml:"languages"`
}

// NATS is the cluster configuration of a node or gateway.
type NATS struct {
	URL      string `toml:"url"`
	Creds    string `toml:"creds"`
	CA       string `toml:"ca"`
	Cert     string `toml:"cert"`
	Key      string `toml:"key"`
	Cluster  string `toml:"cluster"`
	Replicas int    `toml:"replicas"`
	Node     string `toml:"node"`
}

// Name returns the name of this node or gateway.
func (n *NATS) Name() string {
	if n.Node != "" {
		return n.Node
	}
	host, _ := os.Hostname() // if this fails, the name must be configured
	host, _, _ = strings.Cut(host, ".")
	return host
}

// ValidName reports whether a node, gateway or cluster name is valid. Names are part of NATS subjects and of
// IDs.
func ValidName(name string) bool {
	const most = 32
	return name != "" && len(name) <= most && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == ""
}

func (n *NATS) check() error {
	if n.URL == "" {
		return nil
	}
	for _, name := range []string{n.Name(), n.Cluster} {
		if !ValidName(name) {
			return fmt.Errorf("nats: invalid node or cluster name %q: want 1 to 32 letters, digits, dashes and underscores", name)
		}
	}
	switch {
	case n.Replicas < 1 || n.Replicas > 5:
		return errors.New("nats.replicas: want 1 to 5")
	case (n.Cert == "") != (n.Key == ""):
		return errors.New("nats.cert and nats.key require each other")
	}
	for one := range strings.SplitSeq(n.URL, ",") {
		if one = strings.TrimSpace(one); !strings.Contains(one, "://") {
			one = "nats://" + one
		}
		if u, err := url.Parse(one); err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			// The URL may contain a password.
			return errors.New("nats.url or --nats: want a comma-separated list of nats://, tls://, ws:// or wss://HOST:PORT")
		}
	}
	for _, file := range [][2]string{{"creds", n.Creds}, {"ca", n.CA}, {"cert", n.Cert}, {"key", n.Key}} {
		if f, err := os.Open(file[1]); err == nil {
			f.Close()
		} else if file[1] != "" {
			return fmt.Errorf("nats.%s: %w", file[0], err)
		}
	}
	return nil
}

// Call has the defaults and limits of each call.
type Call struct {
	Timeout    values.Duration `toml:"timeout" zero:"no"`
	MaxTimeout values.Duration `toml:"max_timeout" zero:"no"`
	MaxGrace   values.Duration `toml:"max_grace"`
	MaxOutput  values.Size     `toml:"max_output" zero:"no"`
	MaxAnswer  values.Size     `toml:"max_answer" zero:"no"`
	Memory     values.Size     `toml:"memory"`
	Pids       int64           `toml:"pids"`
	CPUs       float64         `toml:"cpus"`
	NoFile     int64           `toml:"nofile"`
}

// Calls limits background calls.
type Calls struct {
	Keep   values.Duration `toml:"keep" zero:"no"`
	Most   int             `toml:"most" zero:"no"`
	Output values.Size     `toml:"output" zero:"no"`
}

// Rooms configures the prestarted sandboxes.
type Rooms struct {
	Min   int `toml:"min"`
	Max   int `toml:"max"`
	Calls int `toml:"calls"`
}

// Image is an image of the server's user, which requests name by its key.
type Image struct {
	Image   string   `toml:"image"`
	Rooms   Rooms    `toml:"rooms"` // warm ones, in addition to those without an image
	Devices []string `toml:"devices"`
}

// Sandbox configures what calls can see.
type Sandbox struct {
	Network     string      `toml:"network"`
	TmpSize     values.Size `toml:"tmp_size" zero:"no"`
	Mounts      []string    `toml:"mounts"`
	AllSyscalls bool        `toml:"all_syscalls"`
	Tools       bool        `toml:"tools"`
}

// Sessions has the defaults and limits of sessions.
type Sessions struct {
	IdleTimeout values.Duration `toml:"idle_timeout" zero:"no"`
	Lifetime    values.Duration `toml:"lifetime" zero:"no"`
	MaxEntries  int             `toml:"max_entries" zero:"no"`
}

// Files configures the content store.
type Files struct {
	TTL   values.Duration `toml:"ttl" zero:"no"`
	Quota values.Size     `toml:"quota"`
}

// MCP configures the tools for agents.
type MCP struct {
	Structured bool `toml:"structured"` // output schemas and structuredContent
}

// Tenant has the ceilings of one tenant. Zero means no limit, except for Queue, Sessions and Files.
type Tenant struct {
	Concurrency int             `toml:"concurrency"`
	Queue       int             `toml:"queue"`
	Rate        float64         `toml:"rate"`
	Sessions    int             `toml:"sessions"`
	Processes   int             `toml:"processes"`
	Requests    int             `toml:"requests"`
	MaxTimeout  values.Duration `toml:"max_timeout"`
	Memory      values.Size     `toml:"memory"`
	Pids        int64           `toml:"pids"`
	CPUs        float64         `toml:"cpus"`
	MaxOutput   values.Size     `toml:"max_output"`
	Buffers     values.Size     `toml:"buffers"`
	Output      values.Size     `toml:"output"`
	Files       values.Size     `toml:"files"`
	// Mounts and network access in addition to the workspace. Zero means none, and an empty list overrides
	// [tenant].
	Overlays  []string    `toml:"overlays"`
	Images    []string    `toml:"images"`
	Network   []string    `toml:"network"`
	Volumes   int         `toml:"volumes"`
	Snapshots values.Size `toml:"snapshots"`
}

// Ceilings returns the ceilings of the scheduler.
func (t Tenant) Ceilings() tenants.Ceilings {
	return tenants.Ceilings{Concurrency: t.Concurrency, Queue: t.Queue, Rate: t.Rate}
}

// Default returns the default configuration.
func Default() Config {
	return Config{
		DrainTimeout: values.Duration(30 * time.Second),
		ProofTimeout: values.Duration(5 * time.Second),
		Places:       64,
		Processes:    256,
		MaxBody:      16 << 20,
		Buffers:      512 << 20,
		Connections:  4096,
		NATS:         NATS{Cluster: "sbxrun", Replicas: 1},
		StateDir:     state.ServerDir(),
		Call: Call{
			Timeout: values.Duration(30 * time.Second), MaxTimeout: values.Duration(5 * time.Minute), MaxGrace: values.Duration(30 * time.Second), MaxOutput: 1 << 20, MaxAnswer: 8 << 20, NoFile: 1024,
		},
		Calls:     Calls{Keep: values.Duration(10 * time.Minute), Most: 1024, Output: 2 << 30},
		Rooms:     Rooms{Min: 4, Max: 32, Calls: 1000},
		Sandbox:   Sandbox{Network: "none", TmpSize: 256 << 20},
		Sessions:  Sessions{IdleTimeout: values.Duration(15 * time.Minute), Lifetime: values.Duration(24 * time.Hour), MaxEntries: 10_000},
		Files:     Files{TTL: values.Duration(24 * time.Hour), Quota: 1 << 30},
		Tenant:    Tenant{Concurrency: 32, Queue: 128, Sessions: 64, Processes: 32, Requests: 1024, MaxOutput: 64 << 20, Buffers: 256 << 20, Output: 512 << 20, Files: 256 << 20},
		Languages: cells.Languages(),
	}
}

// Load reads a file, or returns the defaults for "".
func Load(name string) (Config, error) {
	c := Default()
	if name == "" {
		return c, nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return c, fmt.Errorf("--config: %w", err)
	}
	if err := decode(name, text, reflect.New(withQuoted(reflect.TypeOf(c))).Interface()); err != nil {
		return c, err
	}
	if err := decode(name, text, &c); err != nil {
		return c, err
	}
	// A tenant inherits absent ceilings from [tenant], but an explicit 0 counts. Therefore tenants are
	// decoded again, over the inherited values.
	for name := range c.Tenants {
		c.Tenants[name] = c.Tenant
	}
	return c, toml.Unmarshal(text, &struct {
		Tenants map[string]Tenant `toml:"tenants"`
	}{c.Tenants})
}

// decode decodes a file into a struct and describes errors in terms of TOML.
func decode(name string, text []byte, to any) error {
	dec := toml.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(to)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		e := unknown.Errors[0]
		row, _ := e.Position()
		return fmt.Errorf("%s:%d: unknown key %s", name, row, strings.Join(e.Key(), "."))
	case errors.As(err, &wrong):
		row, column := wrong.Position()
		message := strings.TrimPrefix(wrong.Error(), "toml: ")
		if is, field, ok := strings.Cut(strings.TrimPrefix(message, "cannot decode TOML "), " into struct field "); ok { // these are Go names
			want := field[strings.LastIndex(field, " of type ")+len(" of type "):]
			message = fmt.Sprintf("%s: want %s, not a TOML %s", strings.Join(wrong.Key(), "."), cmp.Or(tomlTypes[want], want), is)
		}
		return fmt.Errorf("%s:%d:%d: %s", name, row, column, message)
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// quoted replaces [values.Duration] in a check of the TOML types: go-toml decodes an integer into it as
// nanoseconds, without calling UnmarshalText.
type quoted string

// withQuoted returns t with quoted strings for durations.
func withQuoted(t reflect.Type) reflect.Type {
	switch {
	case t == reflect.TypeFor[values.Duration]():
		return reflect.TypeFor[quoted]()
	case t.Kind() == reflect.Map:
		return reflect.MapOf(t.Key(), withQuoted(t.Elem()))
	case t.Kind() == reflect.Struct:
		fields := reflect.VisibleFields(t)
		for i := range fields {
			fields[i].Type = withQuoted(fields[i].Type)
		}
		return reflect.StructOf(fields)
	}
	return t
}

// tomlTypes describes Go types in terms of TOML.
var tomlTypes = map[string]string{
	"config.quoted": `a string: "5", "0.5", "1500ms" or "5m"`,

	"int": "an integer", "int64": "an integer", "float64": "a float", "string": `a string, in "quotes"`, "bool": "true or false", "[]string": `a list of strings: ["a", "b"]`,
}

// Check validates the configuration.
func (c *Config) Check() error {
	for _, l := range c.Listen {
		network, address, _ := strings.Cut(l, ":")
		switch {
		case network == "unix" && path.IsAbs(address) && len(address) < 108: // sun_path of unix(7)
		case network == "tcp" && strings.Contains(address, ":"):
			if c.TokenFile == "" {
				return fmt.Errorf("listen %q: TCP requires token_file, because anyone who can connect could run commands", l)
			}
		default:
			return fmt.Errorf("listen %q: want unix:PATH, absolute and shorter than 108 bytes, or tcp:HOST:PORT", l)
		}
	}
	if !path.IsAbs(c.StateDir) {
		return fmt.Errorf("state_dir %q: want an absolute path", c.StateDir)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return errors.New("tls_cert and tls_key require each other")
	}
	if err := c.NATS.check(); err != nil {
		return err
	}
	if err := checkNumbers("", reflect.ValueOf(*c)); err != nil {
		return err
	}
	if err := checkLimits("call", c.Call.Memory, c.Call.Pids, c.Call.CPUs); err != nil {
		return err
	}
	if err := c.Rooms.check("rooms"); err != nil {
		return err
	}
	if c.Call.Timeout > c.Call.MaxTimeout {
		return errors.New("call.timeout is above call.max_timeout")
	}
	if _, err := c.Policy(); err != nil {
		return err
	}
	if err := c.checkParts(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Languages)) {
		l := c.Languages[name]
		if err := l.Check(); err != nil {
			return fmt.Errorf("languages.%s: %w", name, err)
		}
		if _, ok := c.Images[l.Image]; l.Image != "" && !ok {
			return fmt.Errorf("languages.%s.image: no %q in [images]", name, l.Image)
		}
	}
	return nil
}

func (r Rooms) check(name string) error {
	if r.Max != 0 && r.Max < r.Min {
		return fmt.Errorf("%s: want min from 0 to max", name)
	}
	return nil
}

// checkLimits rejects limits under which no call could run.
func checkLimits(name string, memory values.Size, pids int64, cpus float64) error {
	if e := (limits.Request{Memory: int64(memory), Pids: pids, CPUs: cpus}).Check(); e != nil {
		return fmt.Errorf("%s: %w", name, e)
	}
	return nil
}

// checkNumbers rejects negative numbers, and 0 where zero:"no" is set. Package values does not see TOML's own
// numbers.
func checkNumbers(name string, v reflect.Value) error {
	negative := false
	switch {
	case v.CanInt():
		negative = v.Int() < 0
	case v.CanFloat():
		negative = !(v.Float() >= 0) // NaN
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			key := strings.TrimPrefix(name+"."+tag.Get("toml"), ".")
			if err := checkNumbers(key, v.Field(i)); err != nil {
				return err
			}
			if tag.Get("zero") == "no" && v.Field(i).IsZero() {
				return fmt.Errorf("%s: want more than 0", key)
			}
		}
	case v.Kind() == reflect.Map:
		for _, key := range slices.SortedFunc(slices.Values(v.MapKeys()), func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) }) {
			if err := checkNumbers(name+"."+key.String(), v.MapIndex(key)); err != nil {
				return err
			}
		}
	}
	if negative {
		return fmt.Errorf("%s: want 0 or more", name)
	}
	return nil
}

// CheckPaths returns an error if a directory to mount is missing on this machine.
func (c *Config) CheckPaths() error {
	missing := func(key, name string) error {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: %q does not exist", key, name)
		}
		return nil // other errors appear when it is used
	}
	p, err := c.Policy()
	for _, m := range p.Mounts[:min(len(p.Mounts), len(c.Sandbox.Mounts))] { // the others come from tools
		err = cmp.Or(err, missing("sandbox.mounts", m.Source))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Overlays)) {
		err = cmp.Or(err, missing("overlays."+name, c.Overlays[name]))
	}
	for _, key := range slices.Sorted(maps.Keys(c.Images)) {
		if _, e := c.FindImage(key); e != nil {
			err = cmp.Or(err, fmt.Errorf("images.%s: %w", key, e))
		} else if _, e := devices.Find(c.Images[key].Devices); e != nil {
			err = cmp.Or(err, fmt.Errorf("images.%s.devices: %w", key, e))
		}
	}
	return err
}

// FindImage looks up the image with a key in the store of this process's user.
func (c *Config) FindImage(key string) (*snapshots.Image, error) {
	store, err := snapshots.Mine(snapshots.Look)
	if err != nil {
		return nil, err
	}
	defer store.Close()
	return store.FindImage(c.Images[key].Image)
}

// Policy returns the policy of a call's sandbox.
func (c *Config) Policy() (p room.Policy, err error) { return c.PolicyFor("") }

// PolicyFor returns the policy of a call's sandbox with the image of this key, without the image itself.
func (c *Config) PolicyFor(image string) (p room.Policy, err error) {
	p = room.Policy{Cwd: room.CwdNone, Captured: true, TmpSize: int64(c.Sandbox.TmpSize), NoFilter: c.Sandbox.AllSyscalls}
	switch c.Sandbox.Network {
	case "", "none":
	case "host":
		p.Network = room.NetHost
	default:
		return p, fmt.Errorf("sandbox.network %q: want none or host", c.Sandbox.Network)
	}
	for _, m := range c.Sandbox.Mounts {
		if !path.IsAbs(m) {
			return p, fmt.Errorf("sandbox.mounts: %q: want SRC or SRC:DST, absolute paths", m)
		}
		source, dest, err := room.ParseBind(m, "")
		if err != nil {
			return p, fmt.Errorf("sandbox.mounts: %w", err)
		}
		p.Mounts = append(p.Mounts, room.Mount{Source: source, Dest: dest})
	}
	if c.Sandbox.Tools && image == "" { // the host's programs need the host's libraries
		set := tools.Find(room.ThisCaller(), os.LookupEnv, p.Shows)
		for _, m := range set.Mounts {
			if !slices.ContainsFunc(p.Mounts, func(own room.Mount) bool { return own.Dest == m.Dest }) {
				p.Mounts = append(p.Mounts, m)
			}
		}
		p.Tools = set.Path
		for _, v := range set.Vars {
			p.Env.Put(v)
		}
	}
	p.Devices = c.Images[image].Devices
	p.Mounts = slices.Clip(p.Mounts) // a session appends its own mounts
	return p, nil
}

// Of returns the ceilings of a tenant.
func (c *Config) Of(tenant string) Tenant {
	if t, ok := c.Tenants[tenant]; ok {
		return t
	}
	return c.Tenant
}
