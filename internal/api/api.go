// Package api defines the HTTP interface as types: requests, responses, stream events and errors. An answer
// is the command line's report with a few more members. The struct tags produce the OpenAPI document and the
// validation of requests.
package api

import (
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/overlay"
)

// Call is one command or program to run.
type Call struct {
	Argv     []string          `json:"argv,omitempty" maxItems:"4096" doc:"The command and its arguments; or give language and code instead"`
	Language string            `json:"language,omitempty" maxLength:"64" doc:"One of /v1/languages"`
	Code     string            `json:"code,omitempty" doc:"The program, with language"`
	Stdin    string            `json:"stdin,omitempty" doc:"What it reads, as text"`
	Env      map[string]string `json:"env,omitempty" maxProperties:"1024" doc:"Variables besides PATH, HOME and USER; none are taken from the server's environment"`
	Workdir  string            `json:"workdir,omitempty" maxLength:"4096" doc:"Working directory, absolute; the workspace by default"`

	TimeoutMS float64 `json:"timeout_ms,omitempty" minimum:"0" doc:"Time from its beginning until everything in it is killed; 0 for the server's default. Values above the server's maximum are reduced to that, and listed in clamped."`
	GraceMS   float64 `json:"grace_ms,omitempty" minimum:"0" doc:"Time from SIGTERM to SIGKILL at the deadline; 0 for SIGKILL at once. Reduced like timeout_ms."`

	Limits  Limits   `json:"limits,omitempty"`
	Files   []FileIn `json:"files,omitempty" maxItems:"1024" doc:"Files in the workspace when it begins"`
	Collect []string `json:"collect,omitempty" maxItems:"64" doc:"Patterns of files in the workspace to keep after the end, as for Go's path.Match: *.png, out/*.csv"`

	Parts // for a new sandbox; a session has its own
}

// Parts are mounts and network access of a sandbox in addition to its workspace. The server's configuration
// determines which of them a tenant may use.
type Parts struct {
	Overlay  *Overlay `json:"overlay,omitempty" doc:"A directory of the server's that is shown as writable, and stays as it is. In a session: not for its commands"`
	Snapshot string   `json:"snapshot,omitempty" maxLength:"64" doc:"Id or name of a snapshot, from whose state the overlay begins; overlay is not needed then"`
	Volumes  []Volume `json:"volumes,omitempty" maxItems:"16" doc:"Directories that outlive sandboxes"`
	Network  *Network `json:"network,omitempty"`
}

// Overlay is a directory on the server, by its name in the configuration.
type Overlay struct {
	Name string `json:"name" minLength:"1" maxLength:"64"`
	Path string `json:"path,omitempty" maxLength:"4096" doc:"Where it is shown, absolute; /work by default"`
}

// Volume is a directory of the tenant, created on first use.
type Volume struct {
	Name     string `json:"name" minLength:"1" maxLength:"63"`
	Path     string `json:"path" minLength:"1" maxLength:"4096" doc:"Where it is shown, absolute"`
	ReadOnly bool   `json:"read_only,omitempty" doc:"One sandbox can write to a volume, or several read it"`
}

// Network is the network access of a sandbox.
type Network struct {
	Allow []string `json:"allow" maxItems:"1000" doc:"Hosts, as for --net allow= (docs/concepts/network.md); each must be within the tenant's list"`
}

// Limits are the resource limits of a call.
type Limits struct {
	Memory    int64   `json:"memory,omitempty" minimum:"1048576" doc:"Bytes, for all its processes and the files that they write to memory"`
	Pids      int64   `json:"pids,omitempty" minimum:"4" doc:"Processes and threads"`
	CPUs      float64 `json:"cpus,omitempty" minimum:"0.001" maximum:"65536"`
	CPUTimeMS float64 `json:"cpu_time_ms,omitempty" minimum:"1" doc:"Of all its processes together"`
	FSize     int64   `json:"fsize,omitempty" minimum:"1" doc:"Bytes, of one file"`
	MaxOutput int64   `json:"max_output,omitempty" minimum:"1" doc:"Bytes kept of stdout, and of stderr: the beginning and the end; for a stream, the beginning"`
	Output    string  `json:"output,omitempty" enum:"truncate,kill" doc:"What happens when more is written: the rest is left out (default), or everything is killed, with the cause output-limit"`
}

// FileIn is a file for the workspace, with exactly one of id, text and base64.
type FileIn struct {
	Path   string  `json:"path" minLength:"1" maxLength:"1024" doc:"Relative to the workspace"`
	ID     string  `json:"id,omitempty" maxLength:"128" doc:"Of the content store"`
	Text   *string `json:"text,omitempty"`
	Base64 *string `json:"base64,omitempty"`
	Mode   string  `json:"mode,omitempty" pattern:"^0?[0-7]{3}$" doc:"Permissions in octal" example:"755"`
}

// FileOut is a collected file.
type FileOut struct {
	Path      string `json:"path"`
	ID        string `json:"id,omitempty" doc:"In the content store"`
	Size      int64  `json:"size"`
	MediaType string `json:"media_type,omitempty"`
	Error     string `json:"error,omitempty" doc:"Why it was not kept"`

	ModTime time.Time `json:"-"` // modification time
}

// Answer is the report of a call.
type Answer struct {
	result.Report
	Files     []FileOut `json:"files,omitempty"`
	QueueMS   float64   `json:"queue_ms" doc:"Time spent waiting for its turn"`
	Room      string    `json:"room,omitempty" enum:"cold,warm" doc:"Whether its room was built for it or built ahead"`
	TimeoutMS float64   `json:"timeout_ms,omitempty" doc:"The timeout that was in force"`
	Clamped   []string  `json:"clamped,omitempty" doc:"Members of the request that were reduced to the server's maximum"`
	RequestID string    `json:"request_id,omitempty"`
}

// Short returns a copy of the report without its long members. a may be nil.
func (a *Answer) Short() *Answer {
	if a == nil {
		return nil
	}
	short := *a // the original is shared
	short.Argv, short.Files = nil, nil
	return &short
}

// Event is one line of a stream, or one server-sent event.
type Event struct {
	Event  string  `json:"event" enum:"start,stdout,stderr,keepalive,report,error" doc:"The last one is report or error, which says whether anything was started. A stream without either has failed."`
	ID     string  `json:"id,omitempty" doc:"With start: that of the call"`
	Text   string  `json:"text,omitempty" doc:"For stdout and stderr, if it is UTF-8"`
	Base64 []byte  `json:"base64,omitempty" doc:"For stdout and stderr, if it is not UTF-8"`
	Report *Answer `json:"report,omitempty"`
	Error  *Error  `json:"error,omitempty"`
}

// Language describes how a program is run.
type Language struct {
	Name    string   `json:"name"`
	Command []string `json:"command" doc:"The command that runs the program; {file} is the program's path"`
	File    string   `json:"file" doc:"File name of the program in the workspace"`
	Cells   bool     `json:"cells" doc:"Whether a session can keep its interpreter, for POST …/code"`
}

// State is the progress of a background command.
type State string

// States of a background command.
const (
	Queued  State = "queued"
	Running State = "running"
	Over    State = "ended"
)

// CallStatus describes a background command.
type CallStatus struct {
	ID          string    `json:"id"`
	State       State     `json:"state" enum:"queued,running,ended"`
	Came        time.Time `json:"came_at"`
	StdoutBytes int64     `json:"stdout_bytes" doc:"That can be read so far"`
	StderrBytes int64     `json:"stderr_bytes"`
	Started     bool      `json:"started" doc:"Whether it has begun to run. If it has not, and has ended, it is safe to try again."`
	Report      *Answer   `json:"report,omitempty" doc:"When it has ended"`
	Failure     *Failure  `json:"error,omitempty" doc:"Why there is no report, or that something may be left"`
}

// MaxListed is the size up to which a list includes a report in full; there may be a thousand.
const MaxListed = 8 << 10

// Shorten drops the long members of the report.
func (s *CallStatus) Shorten() { s.Report = s.Report.Short() }

// NewSession is a request for a sandbox that is kept.
type NewSession struct {
	Limits        Limits   `json:"limits,omitempty" doc:"For everything that runs in it together"`
	IdleTimeoutMS float64  `json:"idle_timeout_ms,omitempty" minimum:"0" doc:"It ends when it has not been used for this time; 0 for the server's default, which is also the maximum"`
	LifetimeMS    float64  `json:"lifetime_ms,omitempty" minimum:"0" doc:"It ends after this time in any case; 0 for the server's default, which is also the maximum"`
	Files         []FileIn `json:"files,omitempty" maxItems:"1024" doc:"What lies in its workspace"`
	Parts
}

// Session describes a session.
type Session struct {
	ID        string    `json:"id"`
	Made      time.Time `json:"created_at"`
	Expires   time.Time `json:"expires_at" doc:"At the latest"`
	IdleMS    float64   `json:"idle_timeout_ms"`
	Limits    Limits    `json:"limits"`
	Room      string    `json:"room" enum:"cold,warm"`
	Processes int       `json:"processes" doc:"In the background, that run"`
	Clamped   []string  `json:"clamped,omitempty"`
	Parts
}

// NewSnapshot is a request for a snapshot.
type NewSnapshot struct {
	Name  string  `json:"name,omitempty" maxLength:"63" doc:"By which it can be used; there must be none of it"`
	TTLMS float64 `json:"ttl_ms,omitempty" minimum:"0" doc:"How long it can be used; 0 for ever"`
}

// Snapshot describes a snapshot of an overlay.
type Snapshot struct {
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Made    string `json:"created_at"`
	Expires string `json:"expires_at,omitempty"`
	Session string `json:"session,omitempty" doc:"That it was taken of"`
	Path    string `json:"path" doc:"Where the overlay is shown"`
	Layers  int    `json:"layers" doc:"One for each snapshot on the way to it"`
	Size    int64  `json:"size" doc:"Bytes stored; snapshots share equal layers"`
	Frozen  bool   `json:"frozen" doc:"Nothing ran meanwhile. A session that has no limits cannot be frozen: its files may be of different moments"`
	LeftOut int    `json:"left_out,omitempty" doc:"Sockets, named pipes and devices, which are not kept"`
}

// Snapshots is a list of snapshots.
type Snapshots struct {
	Snapshots []Snapshot `json:"snapshots"`
}

// VolumeInfo describes a volume.
type VolumeInfo struct {
	Name string `json:"name"`
}

// Volumes is a list of volumes.
type Volumes struct {
	Volumes []VolumeInfo `json:"volumes"`
}

// Diff lists the changes in a session's overlay.
type Diff struct {
	Path     string           `json:"path" doc:"Where the overlay is shown"`
	Changes  []overlay.Change `json:"changes" doc:"By path, parents first. What is below a directory that was deleted is part of that change"`
	Count    int              `json:"count"`
	Bytes    int64            `json:"bytes" doc:"Of the files that were added or changed"`
	Warnings []string         `json:"warnings,omitempty" doc:"What could not be read"`
}

// SessionEnd is the outcome of ending a session.
type SessionEnd struct {
	ID        string            `json:"id"`
	Verdict   result.Verdict    `json:"verdict" enum:"proven,unproven,not_applicable"`
	Survivors []result.Survivor `json:"survivors"`
}

// NewProcess is a command to run in the background of a session.
type NewProcess struct {
	Call
	KeepStdin bool `json:"keep_stdin,omitempty" doc:"Keep its stdin open after the text in stdin, for POST …/stdin"`
}

// Signal is sent to all processes of a command.
type Signal struct {
	Signal string `json:"signal" minLength:"1" maxLength:"16" doc:"A name or a number, as for kill(1)" example:"INT"`
}

// Stored is a file in the content store.
type Stored struct {
	ID   string `json:"id"`
	Size int64  `json:"size"`
}

// Calls is a list of calls, or of processes.
type Calls struct {
	Calls []CallStatus `json:"calls"`
}

// Sessions is a list of sessions.
type Sessions struct {
	Sessions []Session `json:"sessions"`
}

// Languages is a list of languages.
type Languages struct {
	Languages []Language `json:"languages"`
}

// Written describes a file that was written to a workspace.
type Written struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
}

// Status describes current activity, as far as the caller may see it.
type Status struct {
	Version  string   `json:"version"`
	Tenant   string   `json:"tenant"`
	Draining bool     `json:"draining"`
	Running  int      `json:"running" doc:"Calls of the tenant"`
	Waiting  int      `json:"waiting"`
	Sessions int      `json:"sessions"`
	Recent   []Recent `json:"recent" doc:"Calls and cells that have ended, the latest first"`
	Machine  *Machine `json:"machine,omitempty" doc:"Only for those who may read /metrics"`
}

// MaxRecent is the number of recent calls in a status.
const MaxRecent = 32

// Recent is a finished call or cell.
type Recent struct {
	ID       string         `json:"id"`
	Ended    time.Time      `json:"ended_at"`
	Cause    result.Cause   `json:"cause"`
	ExitCode *int           `json:"exit_code,omitempty" doc:"Of a call"`
	Verdict  result.Verdict `json:"verdict" enum:"proven,unproven,not_applicable"`
	Room     string         `json:"room,omitempty" enum:"cold,warm"`
	Duration float64        `json:"duration_ms"`
	Code     string         `json:"code,omitempty" doc:"The code, if the configuration has show_code"`
}

// Machine describes the activity of all tenants.
type Machine struct {
	Places   int         `json:"places" doc:"Calls that may run at once"`
	Running  int         `json:"running"`
	Kept     int         `json:"kept" doc:"Places, and shares of sessions, that are kept because processes have survived an unproven end"`
	Waiting  int         `json:"waiting"`
	Oldest   float64     `json:"oldest_waiting_ms" doc:"How long the call has waited that has waited longest"`
	Sessions int         `json:"sessions"`
	Rooms    Rooms       `json:"rooms"`
	Tasks    []TaskBound `json:"tasks" doc:"Limits on tasks, of the machine and of the server's cgroups, the tightest first; empty at a gateway"`
	Nodes    []Node      `json:"nodes,omitempty" doc:"At a gateway, whose other figures are their sums"`
}

// NodeState is the state of a node or gateway.
type NodeState string

const (
	StateReady    NodeState = "ready"
	StateDraining NodeState = "draining" // accepts no more work
	StateLeft     NodeState = "left"     // announced its end
	StateLost     NodeState = "lost"     // silent for six seconds
)

// Node is the latest heartbeat of a node or gateway.
type Node struct {
	Name     string    `json:"name"`
	Instance string    `json:"instance" doc:"Changes with each start"`
	Version  string    `json:"version"`
	State    NodeState `json:"state" enum:"ready,draining,left,lost" doc:"A node that is gone is listed for ten minutes: left if it was ended, lost if it was not heard for six seconds"`
	Heard    time.Time `json:"heard_at"`
	Load
}

// Load is the load of a node.
type Load struct {
	Places    int     `json:"places"`
	Running   int     `json:"running"`
	Kept      int     `json:"kept"`
	Waiting   int     `json:"waiting"`
	Oldest    float64 `json:"oldest_waiting_ms"`
	RoomsIdle int     `json:"rooms_idle"`
	RoomsAll  int     `json:"rooms_all"`
	Sessions  int     `json:"sessions"`
	Pressure  float64 `json:"pressure" doc:"How much of the tightest limit on tasks is used, 1 for all"`
}

// Busy returns the number of running and waiting calls relative to the places.
func (l Load) Busy() float64 { return float64(l.Running+l.Waiting) / float64(max(1, l.Places)) }

// Rooms is the number of prestarted sandboxes.
type Rooms struct {
	Idle int `json:"idle" doc:"That wait for a call"`
	All  int `json:"all" doc:"Including those in use, being built, or ending"`
}

// TaskBound is a limit on tasks.
type TaskBound struct {
	Name    string `json:"name"`
	Current int64  `json:"current"`
	Max     int64  `json:"max"`
}
