// Package cli defines sbxrun's command line as kong grammars, parses it, and prints its
// help. Man pages, completions and the flag reference are made from the same grammars
// (internal/clidoc).
package cli

import "github.com/sbxrun/sbxrun/internal/values"

// CLI is the whole command line; the command is Run if none is named. Help texts and placeholders are in help.txt, because
// a run starts in milliseconds and kong's time grows with the length of tags. Tags of our own:
//
//	choices     the values of a flag; anything may follow a =
//	needs       flags, or values of flags, without one of which this flag is an error, because it would have no effect
//	complete    what [Complete] proposes for a positional argument, with execs after the name of a sandbox and a slash
type CLI struct {
	Run      Run     `cmd:""`
	Start    Start   `cmd:""`
	Exec     Exec    `cmd:""`
	Cp       Cp      `cmd:""`
	Diff     Diff    `cmd:""`
	Apply    Apply   `cmd:""`
	Ps       Ps      `cmd:""`
	Inspect  Inspect `cmd:""`
	Wait     Wait    `cmd:""`
	Logs     Logs    `cmd:""`
	Kill     Kill    `cmd:""`
	Snapshot struct {
		Create SnapshotCreate `cmd:""`
		Ls     SnapshotLs     `cmd:""`
		Rm     SnapshotRm     `cmd:""`
		Export SnapshotExport `cmd:""`
		Import SnapshotImport `cmd:""`
	} `cmd:""`
	Image struct {
		Pull    ImagePull    `cmd:""`
		Import  ImageImport  `cmd:""`
		Ls      ImageLs      `cmd:""`
		Inspect ImageInspect `cmd:""`
		Rm      ImageRm      `cmd:""`
		Export  ImageExport  `cmd:""`
		Commit  ImageCommit  `cmd:""`
	} `cmd:""`
	Volume struct {
		Ls     VolumeLs     `cmd:""`
		Rm     VolumeRm     `cmd:""`
		Export VolumeExport `cmd:""`
	} `cmd:""`
	Cleanup Cleanup `cmd:""`
	Stats   Stats   `cmd:""`
	Doctor  Doctor  `cmd:""`
	Serve   Serve   `cmd:""`
	MCP     MCP     `cmd:"" name:"mcp"`
	Gateway Gateway `cmd:""`
	Nodes   Nodes   `cmd:""`
}

// View has the flags of run and start for files, network, environment and identity.
type View struct {
	Rootfs, Image                             string
	Device                                    []string
	RoBind, Bind, RoBindTry, BindTry, Overlay []string
	Upper                                     string `needs:"overlay from cwd=overlay"`
	From, DataDir                             string
	Volume, Put                               []string
	FollowLinks                               bool `needs:"put"`
	Tmpfs                                     []string
	TmpSize                                   values.Size `default:"256M"`
	Write                                     bool        `short:"w"`
	Cwd                                       string      `choices:"ro|rw|overlay|none"`
	CwdRoot                                   string
	Protect                                   []string
	Workdir                                   string
	Tools                                     bool
	Net                                       string `default:"none" choices:"none|host|allow=HOST[:PORT],..."`
	Publish, Connect                          []string

	Vars        `group:"be"`
	Seccomp     string `default:"default" choices:"default|off" group:"be"`
	User        string `group:"be"`
	Hostname    string `default:"sandbox" group:"be"`
	FakeMeminfo bool   `group:"use" needs:"memory"`
}

// Vars has the flags for the command's environment.
type Vars struct {
	Env, EnvFile []string
	InheritEnv   bool
}

// DeadlineFlags control when and how a command ends.
type DeadlineFlags struct {
	Timeout      values.Duration
	Signal       values.Signal   `short:"s"`
	Grace        values.Duration `short:"k" aliases:"kill-after"`
	ProofTimeout values.Span     `default:"5s"`
}

// LimitFlags are resource limits.
type LimitFlags struct {
	Memory            values.Size
	MemorySwap        values.Swap `needs:"memory"`
	Pids              values.Number
	Cpus              values.Decimal
	CPUTime           values.Duration
	Fsize             values.Size
	Nofile            values.Number
	Stack             values.Size
	Nice, OomScoreAdj values.Adjustment
	Limits            string `default:"required" choices:"required|best-effort"`
}

// AdmissionFlags control what happens on a busy machine.
type AdmissionFlags struct {
	OnPressure  string          `default:"refuse" choices:"refuse|wait|ignore"`
	WaitTimeout values.Duration `default:"1m" needs:"on-pressure=wait"`
	MaxParallel values.Number
	Warn        values.Percent `default:"60"`
	Alert       values.Percent `default:"80"`
}

// CommandFlags are the flags that run, start and exec share.
type CommandFlags struct {
	DeadlineFlags  `group:"end"`
	LimitFlags     `group:"use"`
	AdmissionFlags `group:"busy"`
	JSON           bool   `group:"tell"`
	StateDir       string `group:"tell"`
}

// ForegroundFlags are the flags that run and exec share.
type ForegroundFlags struct {
	CommandFlags
	PreserveStatus, Foreground bool           `group:"end"`
	Tty                        bool           `short:"t" group:"be"`
	Report                     string         `group:"tell"`
	MaxOutput                  values.Maximum `group:"tell" needs:"json output-limit detach"`
	OutputLimit                string         `group:"tell" choices:"kill|truncate"`
	Verbose                    bool           `short:"v" group:"tell"`
	Quiet                      bool           `short:"q" group:"tell"`
}

// Run is sbxrun run, and sbxrun without a command.
type Run struct {
	ForegroundFlags
	View                         `group:"see"`
	Get                          []string      `group:"see"`
	GetMaxSize                   values.Size   `default:"256M" group:"see" needs:"get"`
	GetMaxEntries                values.Number `default:"10000" group:"see" needs:"get"`
	Apply, ApplyDelete, ApplyAll bool          `group:"see" needs:"overlay from cwd=overlay"`
	Diff                         bool          `group:"tell" needs:"overlay from cwd=overlay"`
	PrintCommand                 bool          `group:"tell"`
	PrintFilter                  string        `group:"tell" needs:"print-command"`
	Version                      bool          `group:"tell"`
	Command                      []string      `arg:"" optional:"" passthrough:"partial"`
}

type Start struct {
	CommandFlags
	View                          `group:"see"`
	IdleTimeout                   values.Duration `group:"end"`
	Rm                            bool            `group:"end"`
	Name                          string          `group:"be"`
	Tag                           []string        `group:"be"`
	ReadyTCP, ReadyExec, ReadyLog string          `xor:"probe" group:"ready"`
	ReadyInterval                 values.Span     `default:"100ms" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	ReadyTimeout                  values.Duration `default:"5m" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	WaitReady                     bool            `group:"ready" needs:"ready-tcp ready-exec ready-log"`
	OutputLimit                   string          `default:"truncate" choices:"kill|truncate" group:"tell"`
	MaxOutput                     values.Maximum  `group:"tell"`
	Command                       []string        `arg:"" optional:"" passthrough:"partial"`
}

type Exec struct {
	ForegroundFlags
	Detach  bool   `short:"d" group:"end"`
	Workdir string `group:"be"`
	Vars    `group:"be"`
	Sandbox string   `arg:"" complete:"sandboxes"`
	Command []string `arg:"" optional:"" passthrough:"partial"`
}

// Records has the flags of commands that work with the records of sandboxes.
type Records struct {
	JSON     bool
	StateDir string
}

type Cp struct {
	Recursive   bool        `short:"r"`
	FollowLinks bool        `short:"H"`
	MaxSize     values.Size `default:"1G"`
	Quiet       bool        `short:"q"`
	Records
	Paths []string `arg:"" name:"path" complete:"paths"`
}

type Diff struct {
	Patch           bool `short:"p" xor:"as"`
	Stat, Tar, JSON bool `xor:"as"`
	Exclude         []string
	StateDir        string
	Sandbox         string   `arg:"" complete:"sandboxes --all"`
	Paths           []string `arg:"" optional:"" name:"path"`
}

type Apply struct {
	Check, Delete, All, Force bool
	Quiet                     bool `short:"q"`
	Exclude                   []string
	Records
	Sandbox string   `arg:"" complete:"sandboxes --all"`
	Paths   []string `arg:"" optional:"" name:"path"`
}

type Ps struct {
	All      bool     `short:"a"`
	Status   []string `choices:"starting|running|completed|failed|killed|error|lost"`
	Tag      []string
	Names    bool `xor:"as"`
	Quiet    bool `short:"q" xor:"as"`
	JSON     bool `xor:"as"`
	StateDir string
	Sandbox  string `arg:"" optional:"" complete:"sandboxes"`
}

type Inspect struct {
	Records
	Sandboxes []string `arg:"" name:"sandbox" complete:"sandboxes --all execs"`
}

type Wait struct {
	Ready   bool   `xor:"for"`
	Log     string `xor:"for"`
	Timeout values.Duration
	Records
	Sandbox string `arg:"" complete:"sandboxes --all execs"`
}

type Logs struct {
	Follow bool   `short:"f"`
	Stream string `choices:"stdout|stderr"`
	Tail   string
	Records
	Sandbox string `arg:"" complete:"sandboxes --all execs"`
}

type Kill struct {
	Signal       values.Signal   `default:"TERM" short:"s"`
	Grace        values.Duration `default:"5s" short:"k" aliases:"kill-after"`
	ProofTimeout values.Span     `default:"5s"`
	All          bool            `short:"a"`
	Tag          []string
	Records
	Sandboxes []string `arg:"" optional:"" name:"sandbox" complete:"sandboxes execs"`
}

type Cleanup struct {
	OlderThan values.Duration
	DryRun    bool `short:"n"`
	DataDir   string
	Records
	Sandboxes []string `arg:"" optional:"" name:"sandbox" complete:"sandboxes --all execs"`
}

// Stored has the flags of commands that add a snapshot or an image.
type Stored struct {
	TTL     values.Duration
	MaxSize values.Maximum `default:"16G"`
	JSON    bool
	DataDir string
}

// Listed has the flags of commands that list snapshots or images.
type Listed struct {
	Quiet   bool `short:"q" xor:"as"`
	JSON    bool `xor:"as"`
	DataDir string
}

// Named has the flags and arguments of commands for some of the stored things.
type Named struct {
	JSON    bool
	DataDir string
	Names   []string `arg:"" name:"name"`
}

// Exported has the flags and arguments of commands that write a file.
type Exported struct {
	DataDir string
	Name    string `arg:""`
	File    string `arg:"" optional:""`
}

type SnapshotCreate struct {
	Name string
	Stored
	StateDir string
	Sandbox  string `arg:"" complete:"sandboxes"`
}

type SnapshotImport struct {
	Name string
	Stored
	File string `arg:"" optional:""`
}

type ImagePull struct {
	Name, Platform, Authfile string
	Stored
	Reference string `arg:""`
}

type ImageImport struct {
	Name, Platform string
	Stored
	Source string `arg:"" name:"src"`
}

type ImageCommit struct {
	Stored
	StateDir string
	Sandbox  string `arg:"" complete:"sandboxes"`
	Name     string `arg:""`
}

type (
	SnapshotLs     struct{ Listed }
	SnapshotRm     struct{ Named }
	SnapshotExport struct{ Exported }
	ImageLs        struct{ Listed }
	ImageInspect   struct{ Named }
	ImageRm        struct{ Named }
	ImageExport    struct{ Exported }
)

type VolumeLs struct {
	JSON              bool
	DataDir, StateDir string
}

type VolumeRm struct {
	Named
	StateDir string
}

type VolumeExport struct {
	Exported
	StateDir string
}

type Stats struct {
	JSON, Prometheus bool           `xor:"as"`
	Watch            bool           `short:"w"`
	Interval         values.Span    `default:"2s" needs:"watch"`
	Warn             values.Percent `default:"60"`
	Alert            values.Percent `default:"80"`
	StateDir         string
}

type Serve struct{ Listening }

type Gateway struct{ Listening }

// Listening has the flags of servers. They override the configuration.
type Listening struct {
	Config                     string
	Listen                     []string
	TokenFile, TLSCert, TLSKey string
	DrainTimeout               values.Span
	NATS, NATSCreds, Node      string
	CheckConfig                bool
}

type Nodes struct {
	Config, NATS, NATSCreds string
	JSON                    bool
}

type MCP struct {
	Config      string
	CheckConfig bool
}

type Doctor struct {
	JSON, Script bool          `xor:"as"`
	PID, UID     values.Number `needs:"script"`
}
