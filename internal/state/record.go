package state

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// recordVersion changes only when a reader would go wrong: readers ignore members
// that they do not know.
const recordVersion = 1

// Phase is how far a sandbox has come.
type Phase string

const (
	Starting Phase = "starting" // the command may not have been executed yet
	Running  Phase = "running"
	Ended    Phase = "ended" // there is a report
)

// Record is what the supervisor tells about its sandbox, or about a detached exec.
type Record struct {
	Version    int               `json:"version"`
	ID         string            `json:"id"`
	Sandbox    string            `json:"sandbox,omitempty"` // of an exec: the id of the one that it is in
	Name       string            `json:"name,omitempty"`
	Tags       map[string]string `json:"tags,omitempty"`
	Argv       []string          `json:"argv"`
	CreatedAt  string            `json:"created_at"` // in a form that sorts: the report's
	Phase      Phase             `json:"phase"`
	Supervisor proc.Identity     `json:"supervisor"`
	Init       *proc.Identity    `json:"init,omitempty"` // once it is there

	UID      *uint32 `json:"sandbox_uid,omitempty"` // who the command runs as, if not as sbxrun
	GID      *uint32 `json:"sandbox_gid,omitempty"`
	Workdir  string  `json:"workdir,omitempty"`
	Net      string  `json:"net,omitempty"`
	Hostname string  `json:"hostname,omitempty"`

	Published []result.ReportPublished `json:"published,omitempty"` // ports of the host

	Refused []Refused `json:"refused,omitempty"` // the first hosts, while it runs; then the report has them

	TimeoutMS     float64 `json:"timeout_ms,omitempty"`
	IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty"`

	Limits []result.Limit `json:"limits,omitempty"` // none was hit yet; the report tells

	Overlays []Overlay `json:"overlays,omitempty"` // of a sandbox that runs, or whose layers are on disk

	Ready  *Ready         `json:"ready,omitempty"`
	Logs   *Logs          `json:"logs,omitempty"`
	Report *result.Report `json:"report,omitempty"`
}

// Refused is a host that the list of a sandbox's network does not have, and that was asked for.
type Refused struct {
	Host   string `json:"host"` // with its port
	Reason string `json:"reason"`
}

// Overlay is a directory of the host that the sandbox shows as writable, and where its layer is.
type Overlay struct {
	Source string   `json:"source"`
	Dest   string   `json:"dest"`
	Since  string   `json:"since"`                // as package room says it
	Base   string   `json:"base,omitempty"`       // the source's identity
	Upper  string   `json:"upper,omitempty"`      // on disk
	Lower  []string `json:"lower,omitempty"`      // directories of the host between source and layer, the uppermost first
	Layer  int      `json:"descriptor,omitempty"` // the supervisor's, of the layer's directory
	Layers []Layer  `json:"layers,omitempty"`     // of the snapshot that it was started from, the lowest first
}

// Layer is a packed layer of a snapshot: what was written above what is below it.
type Layer struct {
	SHA256  string `json:"sha256"`  // of the tar
	Size    int64  `json:"size"`    // in the store
	Bytes   int64  `json:"bytes"`   // of the tar
	Entries int    `json:"entries"` // files, directories, links and deletions
}

// Ready is what is known of a sandbox that says when it is ready.
type Ready struct {
	Probe   string `json:"probe"`
	ReadyAt string `json:"ready_at,omitempty"`
	Error   string `json:"error,omitempty"`
}

// Logs is how much the command has written, kept or not.
type Logs struct {
	StdoutBytes     int64 `json:"stdout_bytes"`
	StderrBytes     int64 `json:"stderr_bytes"`
	StdoutTruncated bool  `json:"stdout_truncated"`
	StderrTruncated bool  `json:"stderr_truncated"`
}

func (r *Record) check() error {
	switch {
	case r.Version != recordVersion:
		return damaged("version %d, not %d", r.Version, recordVersion)
	case !ValidID(r.ID):
		return damaged("id %.80q", r.ID)
	case r.Sandbox != "" && !ValidID(r.Sandbox):
		return damaged("sandbox %.80q", r.Sandbox)
	case r.Name != "" && !validName(r.Name):
		return damaged("name %.80q", r.Name)
	case r.Phase != Starting && r.Phase != Running && r.Phase != Ended:
		return damaged("phase %.80q", string(r.Phase))
	case (r.Phase == Ended) != (r.Report != nil):
		return damaged("phase %q, which does not go with the report", string(r.Phase))
	}
	for _, id := range []*proc.Identity{&r.Supervisor, r.Init} {
		// PID_MAX_LIMIT is 1<<22 (proc_sys_kernel(5)). 1 and below are processes
		// or groups that are never a sandbox's.
		if id != nil && (id.PID <= 1 || id.PID > 1<<22) {
			return damaged("pid %d", id.PID)
		}
	}
	if r.Report != nil {
		switch r.Report.Status {
		case result.StatusCompleted, result.StatusFailed, result.StatusKilled, result.StatusError:
		default:
			return damaged("status %.80q", string(r.Report.Status))
		}
	}
	return nil
}

// Kill asks the supervisor to end its sandbox. Whoever has written it sends the
// supervisor a signal, for it to look.
type Kill struct {
	Signal  string  `json:"signal,omitempty"` // as [result.SignalName] says it; empty is none of its own
	GraceMS float64 `json:"grace_ms"`
}

// LongestGrace is in milliseconds: some thirty years, and still a time.Duration.
const LongestGrace = 1e12

func (k *Kill) check() error {
	number, err := strconv.ParseUint(k.Signal, 10, 8)
	if k.Signal != "" && unix.SignalNum("SIG"+k.Signal) == 0 && (err != nil || number < 1 || number > 64) {
		return damaged("signal %.80q", k.Signal)
	}
	if !(k.GraceMS >= 0 && k.GraceMS <= LongestGrace) {
		return damaged("grace period of %g ms", k.GraceMS)
	}
	return nil
}

// Access is what one needs to enter a sandbox. It is there from when the payload
// runs, for only then the sandbox is complete, and never changes. It has a file of its own because of the variables,
// which may be secrets and are for nobody to be shown, and because an exec is
// quicker without JSON.
type Access struct {
	Init    proc.Identity
	Cred    *proc.Cred // who the sandbox runs as, if not as sbxrun
	Net     string
	Workdir string
	Filter  string         // for system calls, by its name
	Cgroups []string       // the sandbox's own, by their directories
	Limits  limits.Request // of each process
	Env     []string       // NAME=VALUE
}

// heldAccessName is the file while the payload is held.
const heldAccessName = ".access"

// accessVersion changes with the fields: nobody may enter by what he does not
// understand, a sandbox that an other version has started.
const accessVersion = "3"

// accessFields are the words before the cgroups, the last being their number. The
// variables follow.
const accessFields = 17

func (a *Access) text() string {
	uid, gid := "", ""
	if a.Cred != nil {
		uid, gid = strconv.FormatUint(uint64(a.Cred.UID), 10), strconv.FormatUint(uint64(a.Cred.GID), 10)
	}
	adjustment := func(n *int) string {
		if n == nil {
			return ""
		}
		return strconv.Itoa(*n)
	}
	size := func(n int64) string { return strconv.FormatInt(n, 10) }
	words := []string{accessVersion, strconv.Itoa(a.Init.PID), strconv.FormatUint(a.Init.Start, 10), a.Init.BootID, strconv.FormatUint(a.Init.PIDNS, 10),
		uid, gid, a.Net, a.Workdir, a.Filter,
		size(a.Limits.FSize), size(a.Limits.NoFile), size(a.Limits.Stack), adjustment(a.Limits.Nice), adjustment(a.Limits.OOMScoreAdj),
		strconv.FormatFloat(a.Limits.CPUs, 'g', -1, 64), strconv.Itoa(len(a.Cgroups))}
	words = append(words, a.Cgroups...)
	// Each word ends with a NUL, which none can hold; so a file that was cut is known.
	return strings.Join(append(words, a.Env...), "\x00") + "\x00\n"
}

func parseAccess(text string) (a Access, err error) {
	text, whole := strings.CutSuffix(text, "\x00\n")
	words := strings.Split(text, "\x00")
	if !whole || len(words) < accessFields || words[0] != accessVersion {
		return Access{}, damaged("no access")
	}
	number := func(word string, bits int) uint64 {
		n, numberErr := strconv.ParseUint(word, 10, bits)
		if numberErr != nil {
			err = damaged("number %.80q", word)
		}
		return n
	}
	a.Init = proc.Identity{PID: int(number(words[1], 22)), Start: number(words[2], 64), BootID: words[3], PIDNS: number(words[4], 64)}
	if words[5] != "" {
		a.Cred = &proc.Cred{UID: uint32(number(words[5], 32)), GID: uint32(number(words[6], 32))}
	}
	a.Net, a.Workdir, a.Filter = words[7], words[8], words[9]
	adjustment := func(word string) *int {
		n, numberErr := strconv.Atoi(word)
		if word == "" {
			return nil
		}
		if numberErr != nil {
			err = damaged("number %.80q", word)
		}
		return &n
	}
	a.Limits = limits.Request{FSize: int64(number(words[10], 63)), NoFile: int64(number(words[11], 63)), Stack: int64(number(words[12], 63)),
		Nice: adjustment(words[13]), OOMScoreAdj: adjustment(words[14])}
	var cpusErr error
	if a.Limits.CPUs, cpusErr = strconv.ParseFloat(words[15], 64); cpusErr != nil {
		err = damaged("number %.80q", words[15])
	}
	rest := words[accessFields:]
	cgroups := int(number(words[accessFields-1], 8))
	if cgroups > len(rest) {
		return Access{}, damaged("%d cgroups", cgroups)
	}
	if cgroups > 0 {
		a.Cgroups = rest[:cgroups]
	}
	a.Env = rest[cgroups:]
	if err == nil && a.Init.PID <= 1 {
		err = damaged("pid %d", a.Init.PID)
	}
	if err != nil {
		return Access{}, err
	}
	return a, nil
}
