// Package cli defines sbxrun's command line as kong grammars, parses it, and prints its
// help. Man pages, completions and the flag reference are made from the same grammars
// (internal/clidoc).
package cli

import (
	"errors"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/values"
)

// CLI is the whole command line; the command is Run if none is named. [Parse] builds only the grammar
// of the selected command, and help texts and placeholders are in help.txt, because a run starts in
// milliseconds and kong's time grows with the number and the length of tags. Tags of our own:
//
//	choices     the values of a flag; one that ends with = may be followed by anything
//	needs       flags, or values of flags, without one of which this flag is an error, because it would have no effect
//	complete    completion of a positional argument: running or all sandboxes, with execs, or paths
type CLI struct {
	Run     Run     `cmd:"" default:"withargs"`
	Start   Start   `cmd:""`
	Exec    Exec    `cmd:""`
	Cp      Cp      `cmd:""`
	Diff    Diff    `cmd:""`
	Apply   Apply   `cmd:""`
	Ps      Ps      `cmd:""`
	Inspect Inspect `cmd:""`
	Wait    Wait    `cmd:""`
	Logs    Logs    `cmd:""`
	Kill    Kill    `cmd:""`

	Snapshot Snapshot `cmd:""`
	Volume   Volume   `cmd:""`

	Cleanup Cleanup `cmd:""`
	Stats   Stats   `cmd:""`
	Doctor  Doctor  `cmd:""`
	Serve   Serve   `cmd:""`
	MCP     MCP     `cmd:"" name:"mcp"`
	Gateway Gateway `cmd:""`
	Nodes   Nodes   `cmd:""`
}

// View is the flags of run and start for files, network, environment and identity.
type View struct {
	Rootfs    Path
	Device    []string
	RoBind    []string
	Bind      []string
	RoBindTry []string
	BindTry   []string
	Overlay   []string
	Upper     Directory `needs:"overlay from cwd=overlay"`
	From      string
	Data
	Volume      []string
	Put         []string
	FollowLinks bool `needs:"put"`
	Tmpfs       []string
	TmpSize     values.Size `default:"256M"`
	Write       bool        `short:"w"`
	Cwd         string      `choices:"ro|rw|overlay|none"`
	CwdRoot     string
	Protect     []string
	Workdir     string
	Tools       bool
	Net         string `default:"none" choices:"none|host|allow="`
	Publish     []string
	Connect     []string

	Vars     `group:"be"`
	Seccomp  string `default:"default" choices:"default|off" group:"be"`
	User     string `group:"be"`
	Hostname string `default:"sandbox" group:"be"`
}

// Vars is the flags for the command's environment.
type Vars struct {
	Env        []string
	EnvFile    []string
	InheritEnv bool
}

// DeadlineFlags control when and how run and exec end a command.
type DeadlineFlags struct {
	Timeout values.Duration
	First
	ProofTimeout   values.Span `default:"5s"`
	PreserveStatus bool
	Foreground     bool
}

// First is the flags of run, start and exec for the time between the deadline and SIGKILL.
type First struct {
	Signal values.Signal   `short:"s"`
	Grace  values.Duration `short:"k" aliases:"kill-after"`
}

// Period returns the time between the first signal and SIGKILL. Without --grace it is 5 s if a signal was named,
// so that the command can handle it.
func (f First) Period() time.Duration {
	const heard = 5 * time.Second
	if f.Grace == 0 && f.Signal != 0 && f.Signal != values.Signal(syscall.SIGKILL) {
		return heard
	}
	return time.Duration(f.Grace)
}

// Limits is the resource limits of run, start and exec.
type Limits struct {
	Memory      values.Size
	MemorySwap  values.Swap `needs:"memory"`
	Pids        values.Number
	Cpus        values.Decimal
	CPUTime     values.Duration
	Fsize       values.Size
	Nofile      values.Number
	Stack       values.Size
	Nice        values.Adjustment
	OomScoreAdj values.Adjustment
	Limits      string `default:"required" choices:"required|best-effort"`
}

// OutputFlags control what run and exec report about a command, and where.
type OutputFlags struct {
	Report      string
	JSON        bool
	MaxOutput   *values.Size `needs:"json output-limit detach"`
	OutputLimit string       `choices:"kill|truncate"`
	Verbose     bool         `short:"v"`
	Quiet       bool         `short:"q"`
}

// AdmissionFlags control what run, start and exec do on a busy machine.
type AdmissionFlags struct {
	OnPressure  string          `default:"refuse" choices:"refuse|wait|ignore"`
	WaitTimeout values.Duration `default:"1m" needs:"on-pressure=wait max-parallel"`
	MaxParallel values.Number
	Warn        values.Percent `default:"60"`
	Alert       values.Percent `default:"80"`
}

// Run is sbxrun run, and sbxrun without a command.
type Run struct {
	DeadlineFlags `group:"end"`

	View          `group:"see"`
	Get           []string      `group:"see"`
	GetMaxSize    values.Size   `default:"256M" group:"see" needs:"get"`
	GetMaxEntries values.Number `default:"10000" group:"see" needs:"get"`
	Apply         bool          `group:"see" needs:"overlay from cwd=overlay"`
	ApplyDelete   bool          `group:"see" needs:"overlay from cwd=overlay"`
	ApplyAll      bool          `group:"see" needs:"overlay from cwd=overlay"`

	Tty bool `short:"t" group:"be"`

	Limits      `group:"use"`
	FakeMeminfo bool `group:"use" needs:"memory"`

	AdmissionFlags `group:"busy"`

	OutputFlags  `group:"tell"`
	Diff         bool      `group:"tell" needs:"overlay from cwd=overlay"`
	PrintCommand bool      `group:"tell"`
	PrintFilter  string    `group:"tell" needs:"print-command"`
	Version      bool      `group:"tell"`
	StateDir     Directory `group:"tell"`

	Command []string `arg:"" optional:"" passthrough:"partial"`
}

type Start struct {
	Timeout      values.Duration `group:"end"`
	IdleTimeout  values.Duration `group:"end"`
	First        `group:"end"`
	ProofTimeout values.Span `default:"5s" group:"end"`
	Rm           bool        `group:"end"`

	View `group:"see"`

	Name Title    `group:"be"`
	Tag  []string `group:"be"`

	Limits      `group:"use"`
	FakeMeminfo bool   `group:"use" needs:"memory"`
	OutputLimit string `default:"truncate" choices:"kill|truncate" group:"use"`

	ReadyTCP      string          `xor:"probe" group:"ready"`
	ReadyExec     string          `xor:"probe" group:"ready"`
	ReadyLog      string          `xor:"probe" group:"ready"`
	ReadyInterval values.Span     `default:"100ms" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	ReadyTimeout  values.Duration `default:"5m" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	WaitReady     bool            `group:"ready" needs:"ready-tcp ready-exec ready-log"`

	AdmissionFlags `group:"busy"`

	MaxOutput *values.Size `group:"tell"`
	JSON      bool         `group:"tell"`
	StateDir  Directory    `group:"tell"`

	Command []string `arg:"" optional:"" passthrough:"partial"`
}

// Title is a name that must not be empty: the flag without a value is the empty one.
type Title string

// UnmarshalText sets n to any text but the empty one.
func (n *Title) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("the name is empty")
	}
	*n = Title(text)
	return nil
}

// Path is a path as it was given. It must not be empty: a shell's unset variable is a mistake.
type Path string

// UnmarshalText sets p to any text but the empty one.
func (p *Path) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("the path is empty")
	}
	*p = Path(text)
	return nil
}

// Directory is the absolute path of a directory. It must not be empty: a shell's unset variable is a mistake.
type Directory string

// UnmarshalText sets d to any path but the empty one, resolved against the current directory.
func (d *Directory) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("the path is empty; want one such as /run/user/1000/sandboxes")
	}
	path, err := filepath.Abs(string(text))
	*d = Directory(path)
	return err
}

// Recorded is the flag of commands that work with records of sandboxes.
type Recorded struct{ StateDir Directory }

// Data is the flag of commands that work with snapshots and volumes.
type Data struct{ DataDir Directory }

type Exec struct {
	DeadlineFlags `group:"end"`
	Detach        bool `short:"d" group:"end"`

	Workdir string `group:"be"`
	Vars    `group:"be"`
	Tty     bool `short:"t" group:"be"`

	Limits `group:"use"`

	AdmissionFlags `group:"busy"`

	OutputFlags `group:"tell"`
	StateDir    Directory `group:"tell"`

	Sandbox string   `arg:"" complete:"running"`
	Command []string `arg:"" optional:"" passthrough:"partial"`
}

type Cp struct {
	Recursive   bool        `short:"r"`
	FollowLinks bool        `short:"H"`
	MaxSize     values.Size `default:"1G"`
	Quiet       bool        `short:"q"`
	JSON        bool
	Recorded

	Paths []string `arg:"" name:"path" complete:"paths"`
}

type Diff struct {
	Patch bool `short:"p" xor:"as"`
	Stat  bool `xor:"as"`
	Tar   bool `xor:"as"`
	JSON  bool `xor:"as"`

	Exclude []string
	Recorded

	Sandbox string   `arg:"" complete:"all"`
	Paths   []string `arg:"" optional:"" name:"path"`
}

type Apply struct {
	Check  bool
	Delete bool
	All    bool
	Force  bool
	Quiet  bool `short:"q"`
	JSON   bool

	Exclude []string
	Recorded

	Sandbox string   `arg:"" complete:"all"`
	Paths   []string `arg:"" optional:"" name:"path"`
}

type Ps struct {
	All    bool     `short:"a"`
	Status []string `choices:"starting|running|completed|failed|killed|error|lost"`
	Tag    []string
	Names  bool `xor:"as"`
	Quiet  bool `short:"q" xor:"as"`
	JSON   bool `xor:"as"`
	Recorded

	Sandbox string `arg:"" optional:"" complete:"running"`
}

type Inspect struct {
	JSON bool
	Recorded

	Sandboxes []string `arg:"" name:"sandbox" complete:"all execs"`
}

type Wait struct {
	Ready   bool   `xor:"for"`
	Log     string `xor:"for"`
	Timeout values.Duration
	JSON    bool
	Recorded

	Sandbox string `arg:"" complete:"all execs"`
}

type Logs struct {
	Follow bool   `short:"f"`
	Stream string `choices:"stdout|stderr"`
	Tail   string
	JSON   bool
	Recorded

	Sandbox string `arg:"" complete:"all execs"`
}

type Kill struct {
	Signal       values.Signal   `default:"TERM" short:"s"`
	Grace        values.Duration `default:"5s" short:"k" aliases:"kill-after"`
	ProofTimeout values.Span     `default:"5s"`
	All          bool            `short:"a"`
	Tag          []string
	JSON         bool
	Recorded

	Sandboxes []string `arg:"" optional:"" name:"sandbox" complete:"running execs"`
}

// Snapshot and Volume have commands of their own.
type Snapshot struct {
	Create SnapshotCreate `cmd:""`
	Ls     SnapshotLs     `cmd:""`
	Rm     SnapshotRm     `cmd:""`
	Export SnapshotExport `cmd:""`
	Import SnapshotImport `cmd:""`
}

// Stored is the flags of snapshot create and snapshot import.
type Stored struct {
	Name    Title
	TTL     values.Duration
	MaxSize values.Size `default:"16G"`
	JSON    bool
	Data
}

type SnapshotCreate struct {
	Stored
	Recorded

	Sandbox string `arg:"" complete:"running"`
}

type SnapshotLs struct {
	Quiet bool `short:"q" xor:"as"`
	JSON  bool `xor:"as"`
	Data
}

type SnapshotRm struct {
	JSON bool
	Data

	Snapshots []string `arg:"" name:"snapshot"`
}

type SnapshotExport struct {
	Data

	Snapshot string `arg:""`
	File     string `arg:"" optional:""`
}

type SnapshotImport struct {
	Stored

	File string `arg:"" optional:""`
}

type Volume struct {
	Ls     VolumeLs     `cmd:""`
	Rm     VolumeRm     `cmd:""`
	Export VolumeExport `cmd:""`
}

type VolumeLs struct {
	JSON bool
	Data
	Recorded
}

type VolumeRm struct {
	JSON bool
	Data
	Recorded

	Names []string `arg:"" name:"name"`
}

type VolumeExport struct {
	Data
	Recorded

	Name string `arg:""`
	File string `arg:"" optional:""`
}

type Cleanup struct {
	OlderThan values.Duration
	DryRun    bool `short:"n"`
	JSON      bool
	Data
	Recorded

	Sandboxes []string `arg:"" optional:"" name:"sandbox" complete:"all execs"`
}

type Stats struct {
	JSON       bool           `xor:"as"`
	Prometheus bool           `xor:"as"`
	Watch      bool           `short:"w"`
	Interval   values.Span    `default:"2s" needs:"watch"`
	Warn       values.Percent `default:"60"`
	Alert      values.Percent `default:"80"`
	Recorded
}

type Serve struct{ Listening }

type Gateway struct{ Listening }

// Listening is the flags of servers. They override the configuration.
type Listening struct {
	Config       string
	Listen       []string
	TokenFile    string
	TLSCert      string
	TLSKey       string
	DrainTimeout values.Duration
	NATS         string `name:"nats"`
	NATSCreds    string `name:"nats-creds"`
	Node         string
	CheckConfig  bool
}

type Nodes struct {
	Config    string
	NATS      string `name:"nats"`
	NATSCreds string `name:"nats-creds"`
	JSON      bool
}

type MCP struct {
	Config      string
	CheckConfig bool
}

type Doctor struct {
	JSON   bool `xor:"as"`
	Script bool `xor:"as"`
	PID    int  `needs:"script"`
	UID    int  `needs:"script"`
}
