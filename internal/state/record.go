package state

import (
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// recordVersion changes only when old readers would misread a record: they ignore unknown members.
const recordVersion = 1

// Phase is the phase of a sandbox's life.
type Phase string

const (
	Starting Phase = "starting" // the command may not have been executed yet
	Running  Phase = "running"
	Ended    Phase = "ended" // has a report
)

// Record is the supervisor's record of its sandbox or detached exec.
type Record struct {
	Version    int               `json:"version"`
	ID         string            `json:"id"`
	Sandbox    string            `json:"sandbox,omitempty"` // ID of an exec's sandbox
	Name       string            `json:"name,omitempty"`
	Tags       map[string]string `json:"tags,omitempty"`
	Argv       []string          `json:"argv"`
	CreatedAt  string            `json:"created_at"` // in the report's format
	Phase      Phase             `json:"phase"`
	Supervisor proc.Identity     `json:"supervisor"`
	Init       *proc.Identity    `json:"init,omitempty"` // once it exists

	UID      *uint32 `json:"sandbox_uid,omitempty"` // uid of the command, if not sbxrun's
	GID      *uint32 `json:"sandbox_gid,omitempty"`
	Workdir  string  `json:"workdir,omitempty"`
	Net      string  `json:"net,omitempty"`
	Hostname string  `json:"hostname,omitempty"`

	Published []result.ReportPublished `json:"published,omitempty"` // host ports

	Refused []Refused `json:"refused,omitempty"` // the first refused hosts while it runs; later the report has them

	TimeoutMS     float64 `json:"timeout_ms,omitempty"`
	IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty"`

	Limits []result.Limit `json:"limits,omitempty"` // without hits, which the report has

	Image    *result.ReportImage `json:"image,omitempty"`
	Devices  []string            `json:"devices,omitempty"`
	Overlays []Overlay           `json:"overlays,omitempty"` // while it runs, or if the layers are on disk

	Ready  *Ready         `json:"ready,omitempty"`
	Logs   *Logs          `json:"logs,omitempty"`
	Report *result.Report `json:"report,omitempty"`
}

// Refused is a host that the sandbox asked for and its network list does not contain.
type Refused struct {
	Host   string `json:"host"` // with port
	Reason string `json:"reason"`
}

// Overlay is a directory of the host that the sandbox sees as writable, and its layer.
type Overlay struct {
	Source string   `json:"source"`
	Dest   string   `json:"dest"`
	Image  string   `json:"image,omitempty"`      // digest of the image whose tree the source is
	Since  string   `json:"since"`                // in the format of package room
	Base   string   `json:"base,omitempty"`       // the source's identity
	Index  string   `json:"index,omitempty"`      // digest of the source's git index ([hostfiles.GitIndex])
	Upper  string   `json:"upper,omitempty"`      // layer on disk
	Lower  []string `json:"lower,omitempty"`      // host directories between source and layer, the uppermost first
	Layer  int      `json:"descriptor,omitempty"` // the supervisor's descriptor of the layer's directory
	Layers []Layer  `json:"layers,omitempty"`     // layers of the snapshot it was started from, the lowest first
}

// Layer is a packed layer of a snapshot: the changes to the layers below it.
type Layer struct {
	SHA256  string `json:"sha256"`  // of the tar
	Size    int64  `json:"size"`    // stored size
	Bytes   int64  `json:"bytes"`   // of the tar
	Entries int    `json:"entries"` // files, directories, links and deletions
}

// Ready is the state of a sandbox's readiness probe.
type Ready struct {
	Probe   string `json:"probe"`
	ReadyAt string `json:"ready_at,omitempty"`
	Error   string `json:"error,omitempty"`
}

// Logs counts the command's output, including dropped output.
type Logs struct {
	StdoutBytes     int64 `json:"stdout_bytes"`
	StderrBytes     int64 `json:"stderr_bytes"`
	StdoutTruncated bool  `json:"stdout_truncated"`
	StderrTruncated bool  `json:"stderr_truncated"`
}

func (r *Record) check() error {
	switch {
	case r.Version != recordVersion:
		return safeopen.Damaged("version %d, not %d", r.Version, recordVersion)
	case !ValidID(r.ID):
		return safeopen.Damaged("id %.80q", r.ID)
	case r.Sandbox != "" && !ValidID(r.Sandbox):
		return safeopen.Damaged("sandbox %.80q", r.Sandbox)
	case r.Name != "" && !validName(r.Name):
		return safeopen.Damaged("name %.80q", r.Name)
	case r.Phase != Starting && r.Phase != Running && r.Phase != Ended:
		return safeopen.Damaged("phase %.80q", string(r.Phase))
	case (r.Phase == Ended) != (r.Report != nil):
		return safeopen.Damaged("phase %q contradicts the report", string(r.Phase))
	}
	for _, id := range []*proc.Identity{&r.Supervisor, r.Init} {
		if id != nil && !validPID(id.PID) {
			return safeopen.Damaged("pid %d", id.PID)
		}
	}
	if r.Report != nil {
		switch r.Report.Status {
		case result.StatusCompleted, result.StatusFailed, result.StatusKilled, result.StatusError:
		default:
			return safeopen.Damaged("status %.80q", string(r.Report.Status))
		}
	}
	return nil
}

// validPID reports whether a PID may belong to a sandbox. PID_MAX_LIMIT is 1<<22 (proc_sys_kernel(5)).
func validPID(pid int) bool { return pid > 1 && pid <= 1<<22 }

// Kill asks the supervisor to end its sandbox. After writing it, the writer sends the supervisor a signal.
type Kill struct {
	Signal  string  `json:"signal,omitempty"` // as in [result.SignalName], or empty
	GraceMS float64 `json:"grace_ms"`
}

// LongestGrace is in milliseconds: about thirty years, which fits a time.Duration.
const LongestGrace = 1e12

func (k *Kill) check() error {
	number, err := strconv.ParseUint(k.Signal, 10, 8)
	if k.Signal != "" && unix.SignalNum("SIG"+k.Signal) == 0 && (err != nil || number < 1 || number > 64) {
		return safeopen.Damaged("signal %.80q", k.Signal)
	}
	if !(k.GraceMS >= 0 && k.GraceMS <= LongestGrace) {
		return safeopen.Damaged("grace period of %g ms", k.GraceMS)
	}
	return nil
}

// Access describes how to enter a sandbox. It exists while the command runs, because only then the sandbox is
// complete, and never changes. It has its own file because the variables may be secrets, which no command may print.
type Access struct {
	Version int           `json:"version"`
	Init    proc.Identity `json:"init"`
	Room    Room          `json:"room"` // without its Init
}

// heldAccessName is the file's name before the command runs.
const heldAccessName = "." + accessName

// accessVersion changes with the fields: a process must not enter a sandbox started by
// another version whose format it does not understand.
const accessVersion = 6

func (a *Access) check() error {
	r := &a.Room
	switch {
	case a.Version != accessVersion:
		return safeopen.Damaged("version %d, not %d", a.Version, accessVersion)
	case !validPID(a.Init.PID):
		return safeopen.Damaged("pid %d", a.Init.PID)
	case r.Limits.FSize < 0 || r.Limits.NoFile < 0 || r.Limits.Stack < 0:
		return safeopen.Damaged("negative limits")
	case slices.ContainsFunc(slices.Concat(r.Cgroups, r.Env, []string{r.Dir}), func(s string) bool { return strings.Contains(s, "\x00") }):
		return safeopen.Damaged("NUL bytes")
	}
	return nil
}
