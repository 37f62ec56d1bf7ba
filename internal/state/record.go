package state

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// recordVersion changes only when old readers would misread a record: they ignore unknown
// members.
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
	CreatedAt  string            `json:"created_at"` // the report's format, which sorts
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
		// PID_MAX_LIMIT is 1<<22 (proc_sys_kernel(5)). PIDs up to 1 never belong to a sandbox.
		if id != nil && (id.PID <= 1 || id.PID > 1<<22) {
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

// Kill asks the supervisor to end its sandbox. After writing it, the writer sends the
// supervisor a signal.
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

// Access describes how to enter a sandbox. It exists while the command runs, because only
// then the sandbox is complete, and never changes. It has its own file because the
// variables may be secrets, which no command may print, and because an exec is faster
// without JSON.
type Access struct {
	Init    proc.Identity
	Cred    *proc.Cred // credentials of the sandbox, if not sbxrun's
	Net     string
	Workdir string
	Filter  string         // name of the system call filter
	Cgroups []string       // directories of the sandbox's cgroups
	Limits  limits.Request // limits for each process
	Env     []string       // NAME=VALUE
}

// heldAccessName is the file's name before the command runs.
const heldAccessName = ".access"

// accessVersion changes with the fields: a process must not enter a sandbox started by
// another version whose format it does not understand.
const accessVersion = "4"

// accessFields is the number of words before the cgroups; the last of them is the number of
// cgroups. The variables follow.
const accessFields = 17

func (a *Access) text() string {
	uid, gid := "", ""
	if a.Cred != nil {
		uid, gid = strconv.FormatUint(uint64(a.Cred.UID), 10), strconv.FormatUint(uint64(a.Cred.GID), 10)
		for _, group := range a.Cred.Groups[:a.Cred.Groups.Len()] {
			gid += "," + strconv.FormatUint(uint64(group), 10)
		}
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
	// Each word ends with NUL, which no word can contain, so that truncation is detected.
	return strings.Join(append(words, a.Env...), "\x00") + "\x00\n"
}

func parseAccess(text string) (a Access, err error) {
	text, whole := strings.CutSuffix(text, "\x00\n")
	words := strings.Split(text, "\x00")
	if !whole || len(words) < accessFields || words[0] != accessVersion {
		return Access{}, safeopen.Damaged("access is incomplete or of another version")
	}
	number := func(word string, bits int) uint64 {
		n, numberErr := strconv.ParseUint(word, 10, bits)
		if numberErr != nil {
			err = safeopen.Damaged("number %.80q", word)
		}
		return n
	}
	a.Init = proc.Identity{PID: int(number(words[1], 22)), Start: number(words[2], 64), BootID: words[3], PIDNS: number(words[4], 64)}
	if words[5] != "" {
		gid, groups, more := strings.Cut(words[6], ",")
		a.Cred = &proc.Cred{UID: uint32(number(words[5], 32)), GID: uint32(number(gid, 32))}
		for i := 0; more; i++ {
			if i == len(a.Cred.Groups) {
				return Access{}, safeopen.Damaged("too many groups")
			}
			gid, groups, more = strings.Cut(groups, ",")
			a.Cred.Groups[i] = uint32(number(gid, 32))
		}
	}
	a.Net, a.Workdir, a.Filter = words[7], words[8], words[9]
	adjustment := func(word string) *int {
		n, numberErr := strconv.Atoi(word)
		if word == "" {
			return nil
		}
		if numberErr != nil {
			err = safeopen.Damaged("number %.80q", word)
		}
		return &n
	}
	a.Limits = limits.Request{FSize: int64(number(words[10], 63)), NoFile: int64(number(words[11], 63)), Stack: int64(number(words[12], 63)),
		Nice: adjustment(words[13]), OOMScoreAdj: adjustment(words[14])}
	var cpusErr error
	if a.Limits.CPUs, cpusErr = strconv.ParseFloat(words[15], 64); cpusErr != nil {
		err = safeopen.Damaged("number %.80q", words[15])
	}
	rest := words[accessFields:]
	cgroups := int(number(words[accessFields-1], 8))
	if cgroups > len(rest) {
		return Access{}, safeopen.Damaged("%d cgroups", cgroups)
	}
	if cgroups > 0 {
		a.Cgroups = rest[:cgroups]
	}
	a.Env = rest[cgroups:]
	if err == nil && a.Init.PID <= 1 {
		err = safeopen.Damaged("pid %d", a.Init.PID)
	}
	if err != nil {
		return Access{}, err
	}
	return a, nil
}
