package sbxrun

import (
	"encoding/json"
	"time"
	"unicode/utf8"
)

// Call is a command (Argv) or a program (Code) to run.
type Call struct {
	Argv     []string          `json:"argv,omitempty"`
	Language string            `json:"language,omitempty"` // of Code; default: python
	Code     string            `json:"code,omitempty"`
	Stdin    string            `json:"stdin,omitempty"` // UTF-8, like all strings here
	Env      map[string]string `json:"env,omitempty"`
	Workdir  string            `json:"workdir,omitempty"`
	Timeout  time.Duration     `json:"-"` // default: 30 seconds; for [Session.Start] the session's lifetime
	Grace    time.Duration     `json:"-"` // from SIGTERM to SIGKILL at the deadline
	Limits   Limits            `json:"limits,omitzero"`
	Files    []File            `json:"files,omitempty"`   // for the workspace
	Collect  []string          `json:"collect,omitempty"` // patterns of workspace files to store; see Report.Files
	Parts                      // for a new sandbox; a session has its own
	// KeepStdin keeps stdin open after Stdin, for [Process.Send]. Only for [Session.Start].
	KeepStdin bool `json:"keep_stdin,omitempty"`

	// Key is an optional idempotency key: a second request with the same key and body runs nothing and gets the first
	// one's answer, while that one runs and for ten minutes after its end (for Start: after it was accepted). Not for
	// streams.
	Key string `json:"-"`
}

// Cell is code for an interpreter that a session keeps.
type Cell struct {
	Language string        `json:"language"` // default: python
	Code     string        `json:"code"`
	Timeout  time.Duration `json:"-"` // default: 30 seconds
	Limits   CellLimits    `json:"limits,omitzero"`
	Files    []File        `json:"files,omitempty"`
	Collect  []string      `json:"collect,omitempty"`
	Key      string        `json:"-"` // as for a call
}

// Limits are the limits of a call. Zero is the server's default.
type Limits struct {
	Memory    int64   `json:"memory,omitempty"`
	Pids      int64   `json:"pids,omitempty"`
	CPUs      float64 `json:"cpus,omitempty"`
	CPUTimeMS float64 `json:"cpu_time_ms,omitempty"`
	FSize     int64   `json:"fsize,omitempty"`
	MaxOutput int64   `json:"max_output,omitempty"`
	Output    string  `json:"output,omitempty"` // truncate or kill
}

// CellLimits are the limits of a cell.
type CellLimits struct {
	MaxOutput int64 `json:"max_output,omitempty"`
}

// File is a file for a workspace: its bytes, or the ID of a file in the content store.
type File struct {
	Path       string `json:"path,omitempty"`        // may be any bytes
	PathBase64 []byte `json:"path_base64,omitempty"` // set from a Path that is not UTF-8
	Data       []byte `json:"base64,omitzero"`
	ID         string `json:"id,omitempty"`
	Mode       string `json:"mode,omitempty"` // permissions in octal
}

// Collected is a file that was collected from a workspace. Client.Fetch reads it by its ID.
type Collected struct {
	Path       string `json:"path"`        // the exact bytes
	PathBase64 []byte `json:"path_base64"` // set if Path is not UTF-8
	ID         string `json:"id"`
	Size       int64  `json:"size"`
	MediaType  string `json:"media_type"`
	Error      string `json:"error"` // why it was not stored
}

// Stored is a file in the content store.
type Stored struct {
	ID        string    `json:"id"`
	Size      int64     `json:"size"`
	ExpiresAt time.Time `json:"expires_at"` // unless it is used before
}

// Outcome is the common part of a report and a cell's answer.
type Outcome struct {
	ID              string      `json:"id"`
	Cause           string      `json:"cause"`
	TimedOut        bool        `json:"timed_out"`
	StartedAt       string      `json:"started_at"`
	DurationMS      float64     `json:"duration_ms"`
	Stdout          string      `json:"stdout"` // as it was written, UTF-8 or not
	StdoutBytes     int64       `json:"stdout_bytes"`
	StdoutTruncated bool        `json:"stdout_truncated"`
	Stderr          string      `json:"stderr"`
	StderrBytes     int64       `json:"stderr_bytes"`
	StderrTruncated bool        `json:"stderr_truncated"`
	Files           []Collected `json:"files"`
	Unmatched       []string    `json:"unmatched"` // patterns of Collect that matched no file
	QueueMS         float64     `json:"queue_ms"`
	TimeoutMS       float64     `json:"timeout_ms"` // the effective timeout
	Clamped         []string    `json:"clamped"`
	RequestID       string      `json:"request_id"`
}

// Report describes how a call ended; docs/reference/report.md explains each member.
type Report struct {
	Outcome
	Version    int             `json:"version"`
	Argv       []string        `json:"argv"`
	Started    bool            `json:"started"`
	Status     string          `json:"status"`
	ExitCode   int             `json:"exit_code"`
	SetupMS    float64         `json:"setup_ms"`
	TeardownMS float64         `json:"teardown_ms"`
	Teardown   Teardown        `json:"teardown"`
	Payload    json.RawMessage `json:"payload"`
	Usage      json.RawMessage `json:"usage"`
	Limits     json.RawMessage `json:"limits"`
	Error      *Failure        `json:"error"` // why the command was not started
	Bwrap      json.RawMessage `json:"bwrap"`
	Network    json.RawMessage `json:"network"`
	Image      json.RawMessage `json:"image"`
	Devices    []string        `json:"devices"`
	Room       string          `json:"room"`
}

// Parts are an image, mounts and network access in addition to the workspace, if the server's configuration
// permits them.
type Parts struct {
	Image    string   `json:"image,omitempty"` // name of one of Images
	Overlay  *Overlay `json:"overlay,omitempty"`
	Snapshot string   `json:"snapshot,omitempty"` // ID or name of the snapshot to begin from
	Volumes  []Volume `json:"volumes,omitempty"`
	Network  *Network `json:"network,omitempty"`
}

// Overlay is a writable view of a directory on the server, which does not change.
type Overlay struct {
	Name string `json:"name"`           // in the server's configuration
	Path string `json:"path,omitempty"` // mount point; default: /work
}

// Volume is a directory that outlives sandboxes. It has either one writer or several readers.
type Volume struct {
	Name     string `json:"name"`
	Path     string `json:"path"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// Network lists the hosts that a sandbox reaches, as HOST or HOST:PORT.
type Network struct {
	Allow []string `json:"allow"`
}

// Diff describes how a session's overlay differs from the server's directory.
type Diff struct {
	Path     string   `json:"path"`
	Changes  []Change `json:"changes"`
	Count    int      `json:"count"`
	Bytes    int64    `json:"bytes"`
	Warnings []string `json:"warnings"`
}

// Change is one path at which the two differ.
type Change struct {
	Path     string `json:"path"`   // relative to the overlay
	Change   string `json:"change"` // added, changed, deleted, or mode: only the permissions differ
	Type     string `json:"type"`   // file, directory, link or other
	Was      string `json:"was"`    // previous type, if it was different
	Size     int64  `json:"size"`
	Mode     string `json:"mode"`
	WasMode  string `json:"was_mode"`
	Target   string `json:"target"`   // of a link
	Same     string `json:"same"`     // the first path of the same file
	Conflict bool   `json:"conflict"` // the server's directory has changed there as well
	// HeldBack is true if programs on the host execute or trust such a file: review it before you copy it there.
	HeldBack   bool `json:"held_back"`
	Executable bool `json:"executable"` // has become executable
	Outside    bool `json:"outside"`    // a link that may lead out of the overlay
}

// Snapshot is a snapshot of an overlay.
type Snapshot struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	CreatedAt string `json:"created_at"`
	ExpiresAt string `json:"expires_at"`
	Session   string `json:"session"`
	Path      string `json:"path"`
	Layers    int    `json:"layers"`
	Size      int64  `json:"size"`
	Frozen    bool   `json:"frozen"` // the session was frozen while it was taken
	LeftOut   int    `json:"left_out"`
}

// Teardown is the proof that all processes have exited, or the surviving processes.
type Teardown struct {
	Verdict   string     `json:"verdict"`
	Strays    int        `json:"strays"`
	Survivors []Survivor `json:"survivors"`
}

// Survivor is a process that may still be running.
type Survivor struct {
	PID   int    `json:"pid"`
	Comm  string `json:"comm"`
	State string `json:"state"`
}

// CellAnswer describes how a cell ended; docs/concepts/cells.md explains each member.
type CellAnswer struct {
	Outcome
	State            string       `json:"state"` // lost: the next cell begins with nothing defined
	Number           int          `json:"number"`
	Results          []CellResult `json:"results"`
	ResultsTruncated bool         `json:"results_truncated"`
	Exception        *Exception   `json:"exception"`
	DroppedBytes     int64        `json:"dropped_bytes"`
	Interpreter      *Report      `json:"interpreter"`
	Earlier          *Report      `json:"earlier"`
}

// CellResult is a value in all available media types, plain text first.
type CellResult struct {
	Kind      string   `json:"kind"`
	Media     []Medium `json:"media"`
	Truncated bool     `json:"truncated"`
}

// Medium is text, or a file of the content store.
type Medium struct {
	MediaType string `json:"media_type"`
	Text      string `json:"text"`
	ID        string `json:"id"`
	Size      int64  `json:"size"`
	Error     string `json:"error"`
}

// Exception is the error of a cell, in the words of its language.
type Exception struct {
	Name      string `json:"name"`
	Message   string `json:"message"`
	Traceback string `json:"traceback"`
}

// Event is a piece of a stream: stdout or stderr with Data, or at the end report with Report.
type Event struct {
	Name   string
	Data   []byte
	Report *Report
}

// Status is the state of a command in the background: queued, running or ended.
type Status struct {
	ID          string   `json:"id"`
	State       string   `json:"state"`
	CameAt      string   `json:"came_at"`
	Started     bool     `json:"started"` // whether it has begun to run; if it ended without running, a retry is safe
	StdoutBytes int64    `json:"stdout_bytes"`
	StderrBytes int64    `json:"stderr_bytes"`
	Report      *Report  `json:"report"`
	Error       *Failure `json:"error"`
}

// Failure is an error in the server's words: what happened, and what to do about it.
type Failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint"`
}

// SessionOptions are the options of a session. Zero is the server's default.
type SessionOptions struct {
	Limits      Limits        `json:"limits,omitzero"`
	IdleTimeout time.Duration `json:"-"`
	Lifetime    time.Duration `json:"-"`
	Files       []File        `json:"files,omitempty"`
	Parts
}

// SessionStatus describes a session.
type SessionStatus struct {
	ID            string   `json:"id"`
	CreatedAt     string   `json:"created_at"`
	ExpiresAt     string   `json:"expires_at"`
	IdleTimeoutMS float64  `json:"idle_timeout_ms"`
	Limits        Limits   `json:"limits"`
	Room          string   `json:"room"`
	Processes     int      `json:"processes"`
	Clamped       []string `json:"clamped"`
	Parts
}

// Entry is a file, directory or link in a session's workspace.
type Entry struct {
	Path       string    `json:"path"`        // the exact bytes
	PathBase64 []byte    `json:"path_base64"` // set if Path is not UTF-8
	Type       string    `json:"type"`        // file, directory, link or other
	Size       int64     `json:"size"`
	Mode       string    `json:"mode"` // octal permissions
	ModTime    time.Time `json:"mtime"`
}

// Language is a language for code and, if Cells is set, for cells.
type Language struct {
	Name    string   `json:"name"`
	Command []string `json:"command"`
	File    string   `json:"file"`
	Cells   bool     `json:"cells"`
	Image   string   `json:"image"` // image in which it runs; "" for the server's programs
}

// Image is an image that calls and sessions can use.
type Image struct {
	Name     string   `json:"name"`
	Digest   string   `json:"digest"`
	Platform string   `json:"platform"`
	Devices  []string `json:"devices"`
}

// UnmarshalJSON decodes output that is not UTF-8 from its base64 member.
func (r *Report) UnmarshalJSON(b []byte) error {
	type plain Report
	return unmarshalOutput(b, (*plain)(r), &r.Outcome)
}

// UnmarshalJSON is like [Report.UnmarshalJSON].
func (a *CellAnswer) UnmarshalJSON(b []byte) error {
	type plain CellAnswer
	return unmarshalOutput(b, (*plain)(a), &a.Outcome)
}

func unmarshalOutput(b []byte, into any, o *Outcome) error {
	var encoded struct {
		Stdout []byte `json:"stdout_base64"`
		Stderr []byte `json:"stderr_base64"`
	}
	if err := json.Unmarshal(b, into); err != nil {
		return err
	}
	if err := json.Unmarshal(b, &encoded); err != nil {
		return err
	}
	if encoded.Stdout != nil {
		o.Stdout = string(encoded.Stdout)
	}
	if encoded.Stderr != nil {
		o.Stderr = string(encoded.Stderr)
	}
	return nil
}

// UnmarshalJSON sets Path to the exact bytes.
func (c *Collected) UnmarshalJSON(b []byte) error {
	type plain Collected
	err := json.Unmarshal(b, (*plain)(c))
	if c.PathBase64 != nil {
		c.Path = string(c.PathBase64)
	}
	return err
}

// UnmarshalJSON sets Path to the exact bytes.
func (e *Entry) UnmarshalJSON(b []byte) error {
	type plain Entry
	err := json.Unmarshal(b, (*plain)(e))
	if e.PathBase64 != nil {
		e.Path = string(e.PathBase64)
	}
	return err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// whole gives empty files an empty slice, because nil would omit the member, and encodes paths.
func whole(files []File) []File {
	all := append([]File(nil), files...)
	for i := range all {
		if all[i].ID == "" && all[i].Data == nil {
			all[i].Data = []byte{}
		}
		if f := &all[i]; !utf8.ValidString(f.Path) {
			f.Path, f.PathBase64 = "", []byte(f.Path)
		}
	}
	return all
}

// MarshalJSON encodes durations in milliseconds.
func (c Call) MarshalJSON() ([]byte, error) {
	type plain Call
	c.Files = whole(c.Files)
	return json.Marshal(struct {
		plain
		TimeoutMS float64 `json:"timeout_ms"`
		GraceMS   float64 `json:"grace_ms,omitempty"`
	}{plain(c), ms(c.Timeout), ms(c.Grace)})
}

// MarshalJSON is like [Call.MarshalJSON].
func (c Cell) MarshalJSON() ([]byte, error) {
	type plain Cell
	c.Files = whole(c.Files)
	return json.Marshal(struct {
		plain
		TimeoutMS float64 `json:"timeout_ms"`
	}{plain(c), ms(c.Timeout)})
}

// MarshalJSON is like [Call.MarshalJSON].
func (o SessionOptions) MarshalJSON() ([]byte, error) {
	type plain SessionOptions
	o.Files = whole(o.Files)
	return json.Marshal(struct {
		plain
		IdleTimeoutMS float64 `json:"idle_timeout_ms,omitempty"`
		LifetimeMS    float64 `json:"lifetime_ms,omitempty"`
	}{plain(o), ms(o.IdleTimeout), ms(o.Lifetime)})
}
