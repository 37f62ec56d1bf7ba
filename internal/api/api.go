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
	Argv     []string          `json:"argv,omitempty" maxItems:"4096" doc:"Command and arguments; alternatively, give code"`
	Language string            `json:"language,omitempty" maxLength:"64" doc:"A language of /v1/languages; default: python"`
	Code     string            `json:"code,omitempty" doc:"Program text"`
	Stdin    string            `json:"stdin,omitempty" doc:"Standard input as text"`
	Env      map[string]string `json:"env,omitempty" maxProperties:"1024" doc:"Environment variables in addition to PATH, HOME and USER; the server's environment is not inherited"`
	Workdir  string            `json:"workdir,omitempty" maxLength:"4096" doc:"Working directory, an absolute path; default: the workspace"`

	TimeoutMS float64 `json:"timeout_ms,omitempty" minimum:"0" doc:"Time limit after which everything is killed; 0 for the server's default. A value above the server's maximum is reduced and listed in clamped."`
	GraceMS   float64 `json:"grace_ms,omitempty" minimum:"0" doc:"Time between SIGTERM and SIGKILL at the deadline; 0 for SIGKILL at once. Reduced like timeout_ms."`

	Limits  Limits   `json:"limits,omitempty"`
	Files   []FileIn `json:"files,omitempty" maxItems:"1024" doc:"Files to write to the workspace first"`
	Collect []string `json:"collect,omitempty" maxItems:"64" doc:"Patterns of workspace files to store after the end, in the syntax of Go's path.Match, where ** stands for any number of directories: *.png, out/**/*.csv. A matching directory includes all files below it"`

	Parts // for a new sandbox; a session has its own
}

// Parts are the image, mounts and network access of a sandbox in addition to its workspace. The server's configuration
// determines which of them a tenant may use.
type Parts struct {
	Image    string   `json:"image,omitempty" maxLength:"64" doc:"Image to use instead of the server's own programs, by its name in /v1/images. Default: the language's image"`
	Overlay  *Overlay `json:"overlay,omitempty" doc:"Copy-on-write view of a directory on the server. Not for commands of a session"`
	Snapshot string   `json:"snapshot,omitempty" maxLength:"64" doc:"ID or name of the snapshot that the overlay starts from; overlay is optional then"`
	Volumes  []Volume `json:"volumes,omitempty" maxItems:"16" doc:"Persistent directories"`
	Network  *Network `json:"network,omitempty"`
}

// Overlay is a directory on the server, by its name in the configuration.
type Overlay struct {
	Name string `json:"name" minLength:"1" maxLength:"64"`
	Path string `json:"path,omitempty" maxLength:"4096" doc:"Mount point, an absolute path; default: /work"`
}

// Volume is a directory of the tenant, created on first use.
type Volume struct {
	Name     string `json:"name" minLength:"1" maxLength:"63"`
	Path     string `json:"path" minLength:"1" maxLength:"4096" doc:"Mount point, an absolute path"`
	ReadOnly bool   `json:"read_only,omitempty" doc:"Mount read-only. A volume has either one writer or several readers"`
}

// Network is the network access of a sandbox.
type Network struct {
	Allow []string `json:"allow" maxItems:"1000" doc:"Allowed hosts, in the syntax of --net allow=; each must be permitted for the tenant"`
}

// Limits are the resource limits of a call.
type Limits struct {
	Memory    int64   `json:"memory,omitempty" minimum:"1048576" doc:"Memory in bytes of all processes and their files in memory"`
	Pids      int64   `json:"pids,omitempty" minimum:"4" doc:"Number of processes and threads"`
	CPUs      float64 `json:"cpus,omitempty" minimum:"0.001" maximum:"65536"`
	CPUTimeMS float64 `json:"cpu_time_ms,omitempty" minimum:"1" doc:"CPU time of all processes together, in milliseconds"`
	FSize     int64   `json:"fsize,omitempty" minimum:"1" doc:"Size of a file in bytes"`
	MaxOutput int64   `json:"max_output,omitempty" minimum:"1" doc:"Bytes kept of stdout and of stderr each: the beginning and the end; for a stream, the beginning"`
	Output    string  `json:"output,omitempty" enum:"truncate,kill" doc:"What happens beyond max_output: truncate drops the rest (default), kill ends everything with the cause output-limit"`
}

// FileIn is a file for the workspace, with exactly one of id, text and base64.
type FileIn struct {
	Path       string  `json:"path,omitempty" maxLength:"1024" doc:"Path in the workspace"`
	PathBase64 []byte  `json:"path_base64,omitempty" maxLength:"1368" doc:"Path in the workspace if it is not UTF-8, instead of path"`
	ID         string  `json:"id,omitempty" maxLength:"128" doc:"ID in the content store"`
	Text       *string `json:"text,omitempty"`
	Base64     *string `json:"base64,omitempty"`
	Mode       string  `json:"mode,omitempty" pattern:"^0?[0-7]{3}$" doc:"Octal permissions" example:"755"`
}

// FileOut is a collected file.
type FileOut struct {
	Path       string `json:"path" doc:"Path in the workspace; invalid UTF-8 is replaced"`
	PathBase64 []byte `json:"path_base64,omitempty" doc:"The path, if it is not UTF-8"`
	ID         string `json:"id,omitempty" doc:"ID in the content store"`
	Size       int64  `json:"size"`
	MediaType  string `json:"media_type,omitempty"`
	Error      string `json:"error,omitempty" doc:"Reason if it was not stored"`

	ModTime time.Time `json:"-"` // modification time
}

// Answer is the report of a call.
type Answer struct {
	result.Report
	Files     []FileOut `json:"files,omitempty"`
	Unmatched []string  `json:"unmatched,omitempty" doc:"Patterns of collect that matched no file"`
	QueueMS   float64   `json:"queue_ms" doc:"Time in the queue"`
	Room      string    `json:"room,omitempty" enum:"cold,warm" doc:"Whether the sandbox was created for it or in advance"`
	TimeoutMS float64   `json:"timeout_ms,omitempty" doc:"Effective timeout"`
	Clamped   []string  `json:"clamped,omitempty" doc:"Request members that were reduced to the server's maximum"`
	RequestID string    `json:"request_id,omitempty"`
}

// Short returns a copy of the report without its long members. a may be nil.
func (a *Answer) Short() *Answer {
	if a == nil {
		return nil
	}
	short := *a // the original is shared
	short.Argv, short.Files, short.Unmatched, short.Network = nil, nil, nil, nil
	return &short
}

// Event is one line of a stream, or one server-sent event.
type Event struct {
	Event  string  `json:"event" enum:"start,stdout,stderr,keepalive,report,error" doc:"The last event is report or error; a stream without either is incomplete."`
	ID     string  `json:"id,omitempty" doc:"ID of the call, in the start event"`
	Text   string  `json:"text,omitempty" doc:"Output, if it is UTF-8"`
	Base64 []byte  `json:"base64,omitempty" doc:"Output, if it is not UTF-8"`
	Report *Answer `json:"report,omitempty"`
	Error  *Error  `json:"error,omitempty"`
}

// Language describes how a program is run.
type Language struct {
	Name    string   `json:"name"`
	Command []string `json:"command" doc:"Command that runs a program; {file} stands for its path"`
	File    string   `json:"file" doc:"File name of the program in the workspace"`
	Cells   bool     `json:"cells" doc:"Whether sessions can run cells in this language"`
	Image   string   `json:"image,omitempty" doc:"Image in which it runs; a session for it must have this image"`
}

// Image describes an image that requests can name.
type Image struct {
	Name     string   `json:"name" doc:"Its key in the server's configuration"`
	Digest   string   `json:"digest" doc:"Digest of its manifest"`
	Platform string   `json:"platform" example:"linux/amd64"`
	Devices  []string `json:"devices,omitempty" doc:"Devices of its sandboxes"`
}

// Images is a list of images.
type Images struct {
	Images []Image `json:"images"`
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
	StdoutBytes int64     `json:"stdout_bytes" doc:"Bytes available"`
	StderrBytes int64     `json:"stderr_bytes"`
	Started     bool      `json:"started" doc:"Whether it has started. If it ended without starting, a retry is safe."`
	Report      *Answer   `json:"report,omitempty" doc:"Present after the end"`
	Failure     *Failure  `json:"error,omitempty" doc:"Why there is no report, or that processes may still be running"`
}

// MaxListed is the size up to which a list includes a report in full; there may be a thousand.
const MaxListed = 8 << 10

// Shorten drops the long members of the report.
func (s *CallStatus) Shorten() { s.Report = s.Report.Short() }

// NewSession is a request for a sandbox that is kept.
type NewSession struct {
	Limits        Limits   `json:"limits,omitempty" doc:"For all processes of the session together"`
	IdleTimeoutMS float64  `json:"idle_timeout_ms,omitempty" minimum:"0" doc:"The session ends when it has not been used for this time; 0 for the server's default, which is also the maximum"`
	LifetimeMS    float64  `json:"lifetime_ms,omitempty" minimum:"0" doc:"The session ends after this time in any case; 0 for the server's default, which is also the maximum"`
	Files         []FileIn `json:"files,omitempty" maxItems:"1024" doc:"Files to write to the workspace"`
	Parts
}

// Session describes a session.
type Session struct {
	ID        string    `json:"id"`
	Made      time.Time `json:"created_at"`
	Expires   time.Time `json:"expires_at" doc:"Latest time at which it ends"`
	IdleMS    float64   `json:"idle_timeout_ms"`
	Limits    Limits    `json:"limits"`
	Room      string    `json:"room" enum:"cold,warm"`
	Processes int       `json:"processes" doc:"Number of running background processes"`
	Clamped   []string  `json:"clamped,omitempty"`
	Parts
}

// NewSnapshot is a request for a snapshot.
type NewSnapshot struct {
	Name  string  `json:"name,omitempty" maxLength:"63" doc:"Name for later use; must not exist yet"`
	TTLMS float64 `json:"ttl_ms,omitempty" minimum:"0" doc:"Time until it expires; 0 for never"`
}

// Snapshot describes a snapshot of an overlay.
type Snapshot struct {
	ID      string `json:"id"`
	Name    string `json:"name,omitempty"`
	Made    string `json:"created_at"`
	Expires string `json:"expires_at,omitempty"`
	Session string `json:"session,omitempty" doc:"The session it was taken from"`
	Path    string `json:"path" doc:"Mount point of the overlay"`
	Layers  int    `json:"layers" doc:"Number of layers, one per snapshot in its history"`
	Size    int64  `json:"size" doc:"Stored bytes; snapshots share equal layers"`
	Frozen  bool   `json:"frozen" doc:"Whether the session was frozen for it. A session without limits cannot be frozen, so its files may be inconsistent"`
	LeftOut int    `json:"left_out,omitempty" doc:"Number of sockets, named pipes and devices, which are not saved"`
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
	Path     string           `json:"path" doc:"Mount point of the overlay"`
	Changes  []overlay.Change `json:"changes" doc:"Sorted by path, parents first. A deleted directory is one change"`
	Count    int              `json:"count"`
	Bytes    int64            `json:"bytes" doc:"Size of added and changed files in bytes"`
	Warnings []string         `json:"warnings,omitempty" doc:"Files that could not be read"`
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
	KeepStdin bool `json:"keep_stdin,omitempty" doc:"Keep stdin open after the text in stdin, for POST …/stdin"`
}

// Signal is sent to all processes of a command.
type Signal struct {
	Signal string `json:"signal" minLength:"1" maxLength:"16" doc:"Name or number, as for kill(1)" example:"INT"`
}

// Stored is a file in the content store.
type Stored struct {
	ID      string     `json:"id"`
	Size    int64      `json:"size"`
	Expires *time.Time `json:"expires_at,omitempty" doc:"In a list: when the file is removed, unless it is used before"`
}

// StoredFiles is a list of files in the content store.
type StoredFiles struct {
	Files []Stored `json:"files"`
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
	Running  int      `json:"running" doc:"Running calls of the tenant"`
	Waiting  int      `json:"waiting"`
	Sessions int      `json:"sessions"`
	Recent   []Recent `json:"recent" doc:"Finished calls and cells, latest first"`
	Machine  *Machine `json:"machine,omitempty" doc:"Only for callers who may read /metrics"`
}

// MaxRecent is the number of recent calls in a status.
const MaxRecent = 32

// Recent is a finished call or cell.
type Recent struct {
	ID       string         `json:"id"`
	Ended    time.Time      `json:"ended_at"`
	Cause    result.Cause   `json:"cause"`
	ExitCode *int           `json:"exit_code,omitempty" doc:"Exit code of a call"`
	Verdict  result.Verdict `json:"verdict" enum:"proven,unproven,not_applicable"`
	Room     string         `json:"room,omitempty" enum:"cold,warm"`
	Duration float64        `json:"duration_ms"`
	Code     string         `json:"code,omitempty" doc:"Code, if show_code is configured"`
}

// Machine describes the activity of all tenants.
type Machine struct {
	Places   int         `json:"places" doc:"Number of calls that may run at once"`
	Running  int         `json:"running"`
	Kept     int         `json:"kept" doc:"Slots of calls and sessions that are held because processes survived an unproven teardown"`
	Waiting  int         `json:"waiting"`
	Oldest   float64     `json:"oldest_waiting_ms" doc:"Waiting time of the oldest call in the queue"`
	Sessions int         `json:"sessions"`
	Rooms    Rooms       `json:"rooms"`
	Tasks    []TaskBound `json:"tasks" doc:"Limits on tasks, of the machine and of the server's cgroups, the tightest first; empty at a gateway"`
	Nodes    []Node      `json:"nodes,omitempty" doc:"Only at a gateway; the other figures are then sums over these nodes"`
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
	Instance string    `json:"instance" doc:"Changes at each start"`
	Version  string    `json:"version"`
	State    NodeState `json:"state" enum:"ready,draining,left,lost" doc:"A node that is gone is listed for ten minutes: left if it was stopped, lost if it was silent for six seconds"`
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
	Pressure  float64 `json:"pressure" doc:"Used fraction of the tightest limit on tasks"`
}

// Busy returns the number of running and waiting calls relative to the slots.
func (l Load) Busy() float64 { return float64(l.Running+l.Waiting) / float64(max(1, l.Places)) }

// Rooms is the number of prestarted sandboxes.
type Rooms struct {
	Idle int `json:"idle" doc:"Waiting for a call"`
	All  int `json:"all" doc:"Including those in use, being created, or ending"`
}

// TaskBound is a limit on tasks.
type TaskBound struct {
	Name    string `json:"name"`
	Current int64  `json:"current"`
	Max     int64  `json:"max"`
}
