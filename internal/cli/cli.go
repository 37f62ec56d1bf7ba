// Package cli defines sbxrun's command line as kong grammars, parses it, and prints its
// help. Man pages, completions and the flag reference are made from the same grammars
// (internal/clidoc).
package cli

import "github.com/sbxrun/sbxrun/internal/values"

// CLI is the whole command line; the command is Run if none is named. [Parse] builds only the grammar of the flags that
// are given, and help texts and placeholders are in help.txt, because a run starts in milliseconds and kong's time grows
// with the number and the length of tags. The type of a command's struct is named like the command. Tags of our own:
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
	Image    Image    `cmd:""`
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
	Net                                       string `default:"none" choices:"none|host|allow="`
	Publish, Connect                          []string

	Vars     `group:"be"`
	Seccomp  string `default:"default" choices:"default|off" group:"be"`
	User     string `group:"be"`
	Hostname string `default:"sandbox" group:"be"`

	FakeMeminfo bool `group:"use" needs:"memory"`
}

// Vars is the flags for the command's environment.
type Vars struct {
	Env, EnvFile []string
	InheritEnv   bool
}

// DeadlineFlags control when and how run and exec end a command.
type DeadlineFlags struct {
	Timeout values.Duration
	First
	ProofTimeout               values.Span `default:"5s"`
	PreserveStatus, Foreground bool
}

// First is the flags of run, start and exec for the time between the deadline and SIGKILL.
type First struct {
	Signal values.Signal   `short:"s"`
	Grace  values.Duration `short:"k" aliases:"kill-after"`
}

// LimitFlags are the resource limits of run, start and exec.
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

// OutputFlags control what run and exec report about a command, and where.
type OutputFlags struct {
	Report      string
	JSON        bool
	MaxOutput   values.Maximum `needs:"json output-limit detach"`
	OutputLimit string         `choices:"kill|truncate"`
	Verbose     bool           `short:"v"`
	Quiet       bool           `short:"q"`
}

// AdmissionFlags control what run, start and exec do on a busy machine.
type AdmissionFlags struct {
	OnPressure  string          `default:"refuse" choices:"refuse|wait|ignore"`
	WaitTimeout values.Duration `default:"1m" needs:"on-pressure=wait max-parallel"`
	MaxParallel values.Number
	Levels
}

// Levels are the percentages of a limit on tasks that have consequences.
type Levels struct {
	Warn  values.Percent `default:"60"`
	Alert values.Percent `default:"80"`
}

// Run is sbxrun run, and sbxrun without a command.
type Run struct {
	DeadlineFlags `group:"end"`

	View                         `group:"see"`
	Get                          []string      `group:"see"`
	GetMaxSize                   values.Size   `default:"256M" group:"see" needs:"get"`
	GetMaxEntries                values.Number `default:"10000" group:"see" needs:"get"`
	Apply, ApplyDelete, ApplyAll bool          `group:"see" needs:"overlay from cwd=overlay"`

	Tty bool `short:"t" group:"be"`

	LimitFlags     `group:"use"`
	AdmissionFlags `group:"busy"`

	OutputFlags  `group:"tell"`
	Diff         bool   `group:"tell" needs:"overlay from cwd=overlay"`
	PrintCommand bool   `group:"tell"`
	PrintFilter  string `group:"tell" needs:"print-command"`
	Version      bool   `group:"tell"`
	StateDir     string `group:"tell"`

	Command []string `arg:"" optional:"" passthrough:"partial"`
}

type Start struct {
	Timeout, IdleTimeout values.Duration `group:"end"`
	First                `group:"end"`
	ProofTimeout         values.Span `default:"5s" group:"end"`
	Rm                   bool        `group:"end"`

	View `group:"see"`

	Name string   `group:"be"`
	Tag  []string `group:"be"`

	LimitFlags  `group:"use"`
	OutputLimit string `default:"truncate" choices:"kill|truncate" group:"use"`

	ReadyTCP, ReadyExec, ReadyLog string          `xor:"probe" group:"ready"`
	ReadyInterval                 values.Span     `default:"100ms" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	ReadyTimeout                  values.Duration `default:"5m" group:"ready" needs:"ready-tcp ready-exec ready-log"`
	WaitReady                     bool            `group:"ready" needs:"ready-tcp ready-exec ready-log"`

	AdmissionFlags `group:"busy"`

	MaxOutput values.Maximum `group:"tell"`
	JSON      bool           `group:"tell"`
	StateDir  string         `group:"tell"`

	Command []string `arg:"" optional:"" passthrough:"partial"`
}

type Exec struct {
	DeadlineFlags `group:"end"`
	Detach        bool `short:"d" group:"end"`

	Workdir string `group:"be"`
	Vars    `group:"be"`
	Tty     bool `short:"t" group:"be"`

	LimitFlags     `group:"use"`
	AdmissionFlags `group:"busy"`
	OutputFlags    `group:"tell"`
	StateDir       string `group:"tell"`

	Sandbox string   `arg:"" complete:"running"`
	Command []string `arg:"" optional:"" passthrough:"partial"`
}

type Cp struct {
	Recursive   bool        `short:"r"`
	FollowLinks bool        `short:"H"`
	MaxSize     values.Size `default:"1G"`
	Quiet       bool        `short:"q"`
	JSON        bool
	StateDir    string
	Paths       []string `arg:"" name:"path" complete:"paths"`
}

type Diff struct {
	Patch           bool `short:"p" xor:"as"`
	Stat, Tar, JSON bool `xor:"as"`
	Exclude         []string
	StateDir        string
	Sandbox         string   `arg:"" complete:"all"`
	Paths           []string `arg:"" optional:"" name:"path"`
}

type Apply struct {
	Check, Delete, All, Force bool
	Quiet                     bool `short:"q"`
	JSON                      bool
	Exclude                   []string
	StateDir                  string
	Sandbox                   string   `arg:"" complete:"all"`
	Paths                     []string `arg:"" optional:"" name:"path"`
}

type Ps struct {
	All      bool     `short:"a"`
	Status   []string `choices:"starting|running|completed|failed|killed|error|lost"`
	Tag      []string
	Names    bool `xor:"as"`
	Quiet    bool `short:"q" xor:"as"`
	JSON     bool `xor:"as"`
	StateDir string
	Sandbox  string `arg:"" optional:"" complete:"running"`
}

type Inspect struct {
	JSON      bool
	StateDir  string
	Sandboxes []string `arg:"" name:"sandbox" complete:"all execs"`
}

type Wait struct {
	Ready    bool   `xor:"for"`
	Log      string `xor:"for"`
	Timeout  values.Duration
	JSON     bool
	StateDir string
	Sandbox  string `arg:"" complete:"all execs"`
}

type Logs struct {
	Follow   bool   `short:"f"`
	Stream   string `choices:"stdout|stderr"`
	Tail     string
	JSON     bool
	StateDir string
	Sandbox  string `arg:"" complete:"all execs"`
}

type Kill struct {
	Signal       values.Signal   `default:"TERM" short:"s"`
	Grace        values.Duration `default:"5s" short:"k" aliases:"kill-after"`
	ProofTimeout values.Span     `default:"5s"`
	All          bool            `short:"a"`
	Tag          []string
	JSON         bool
	StateDir     string
	Sandboxes    []string `arg:"" optional:"" name:"sandbox" complete:"running execs"`
}

// Snapshot has commands of its own, as Image and Volume have.
type Snapshot struct {
	Create SnapshotCreate `cmd:""`
	Ls     SnapshotLs     `cmd:""`
	Rm     SnapshotRm     `cmd:""`
	Export SnapshotExport `cmd:""`
	Import SnapshotImport `cmd:""`
}

// Stored is the flags of snapshot create and snapshot import.
type Stored struct {
	Name    string
	TTL     values.Duration
	MaxSize values.Size `default:"16G"`
	JSON    bool
	DataDir string
}

type SnapshotCreate struct {
	Stored
	StateDir string
	Sandbox  string `arg:"" complete:"running"`
}

type SnapshotLs struct {
	Quiet   bool `short:"q" xor:"as"`
	JSON    bool `xor:"as"`
	DataDir string
}

type SnapshotRm struct {
	JSON      bool
	DataDir   string
	Snapshots []string `arg:"" name:"snapshot"`
}

type SnapshotExport struct {
	DataDir  string
	Snapshot string `arg:""`
	File     string `arg:"" optional:""`
}

type SnapshotImport struct {
	Stored
	File string `arg:"" optional:""`
}

type Image struct {
	Pull    ImagePull    `cmd:""`
	Import  ImageImport  `cmd:""`
	Ls      ImageLs      `cmd:""`
	Inspect ImageInspect `cmd:""`
	Rm      ImageRm      `cmd:""`
	Export  ImageExport  `cmd:""`
	Commit  ImageCommit  `cmd:""`
}

// Imported is the flags of commands that add an image.
type Imported struct {
	TTL     values.Duration
	MaxSize values.Size `default:"16G"`
	JSON    bool
	DataDir string
}

type ImagePull struct {
	Name, Platform, Authfile string
	Imported
	Reference string `arg:""`
}

type ImageImport struct {
	Name, Platform string
	Imported
	Source string `arg:"" name:"src"`
}

type ImageLs SnapshotLs

type ImageInspect struct {
	JSON    bool
	DataDir string
	Images  []string `arg:"" name:"image"`
}

type ImageRm ImageInspect

type ImageExport struct {
	DataDir string
	Image   string `arg:""`
	File    string `arg:"" optional:""`
}

type ImageCommit struct {
	Imported
	StateDir string
	Sandbox  string `arg:"" complete:"running"`
	Name     string `arg:""`
}

type Volume struct {
	Ls     VolumeLs     `cmd:""`
	Rm     VolumeRm     `cmd:""`
	Export VolumeExport `cmd:""`
}

type VolumeLs struct {
	JSON              bool
	DataDir, StateDir string
}

type VolumeRm struct {
	JSON              bool
	DataDir, StateDir string
	Names             []string `arg:"" name:"name"`
}

type VolumeExport struct {
	DataDir, StateDir string
	Name              string `arg:""`
	File              string `arg:"" optional:""`
}

type Cleanup struct {
	OlderThan         values.Duration
	DryRun            bool `short:"n"`
	JSON              bool
	DataDir, StateDir string
	Sandboxes         []string `arg:"" optional:"" name:"sandbox" complete:"all execs"`
}

type Stats struct {
	JSON, Prometheus bool        `xor:"as"`
	Watch            bool        `short:"w"`
	Interval         values.Span `default:"2s" needs:"watch"`
	Levels
	StateDir string
}

type Serve struct{ Listening }

type Gateway struct{ Listening }

// Listening is the flags of servers. They override the configuration.
type Listening struct {
	Config                     string
	Listen                     []string
	TokenFile, TLSCert, TLSKey string
	DrainTimeout               values.Duration
	Cluster
	Node        string
	CheckConfig bool
}

// Cluster is the flags of commands that use NATS.
type Cluster struct{ NATS, NATSCreds string }

type Nodes struct {
	Config string
	Cluster
	JSON bool
}

type MCP struct {
	Config      string
	CheckConfig bool
}

type Doctor struct {
	JSON, Script bool          `xor:"as"`
	PID, UID     values.Number `needs:"script"`
}
