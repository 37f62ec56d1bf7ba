package state

import (
	"encoding/json"
	"errors"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
)

// RecordVersion changes only when a reader would go wrong: readers ignore members
// that they do not know.
const RecordVersion = 1

// Phase is how far a sandbox has come.
type Phase string

const (
	Starting Phase = "starting" // the command may not have been executed yet
	Running  Phase = "running"
	Ended    Phase = "ended" // there is a report
)

// Record is what the supervisor tells about its sandbox.
type Record struct {
	Version    int               `json:"version"`
	ID         string            `json:"id"`
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

	TimeoutMS     float64 `json:"timeout_ms,omitempty"`
	IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty"`

	Limits []result.Limit `json:"limits,omitempty"` // none was hit yet; the report tells

	Ready  *Ready         `json:"ready,omitempty"`
	Logs   *Logs          `json:"logs,omitempty"`
	Report *result.Report `json:"report,omitempty"`
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

// notOurs words an error of package json without its words for Go's types.
func notOurs(err error) error {
	var kind *json.UnmarshalTypeError
	if !errors.As(err, &kind) {
		return damage(err.Error())
	}
	if kind.Field == "" {
		return damaged("a %s, not an object", kind.Value)
	}
	return damaged("%q is a %s", kind.Field, kind.Value)
}

// ParseRecord parses and checks a record. What is dangerous is checked strictly;
// texts are whatever they are, and to be quoted where they are shown.
func ParseRecord(data []byte) (Record, error) {
	var r Record
	if err := json.Unmarshal(data, &r); err != nil {
		return Record{}, notOurs(err)
	}
	if err := r.check(); err != nil {
		return Record{}, err
	}
	return r, nil
}

func (r *Record) check() error {
	switch {
	case r.Version != RecordVersion:
		return damaged("version %d, not %d", r.Version, RecordVersion)
	case !validID(r.ID):
		return damaged("id %.80q", r.ID)
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

func parseKill(data []byte) (Kill, error) {
	var k Kill
	if err := json.Unmarshal(data, &k); err != nil {
		return Kill{}, notOurs(err)
	}
	if err := k.check(); err != nil {
		return Kill{}, err
	}
	return k, nil
}

func (k *Kill) check() error {
	number, err := strconv.ParseUint(k.Signal, 10, 8)
	if k.Signal != "" && unix.SignalNum("SIG"+k.Signal) == 0 && (err != nil || number < 1 || number > 64) {
		return damaged("signal %.80q", k.Signal)
	}
	const longest = 1e12 // some thirty years, and still a time.Duration
	if !(k.GraceMS >= 0 && k.GraceMS <= longest) {
		return damaged("grace period of %g ms", k.GraceMS)
	}
	return nil
}

// marshal is v as one line.
func marshal(v any) ([]byte, error) {
	data, err := json.Marshal(v)
	return append(data, '\n'), err
}
