// Package cli is the definition of sbxrun's command line: structs whose tags say all
// that there is to say of a flag. One index of these tags (index.go) drives parsing, the
// words for what is wrong, --help, the man pages and the completions.
package cli

import (
	"errors"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sbxrun/sbxrun/internal/values"
)

// CLI is the whole command line. The first command need not be named. Of the tags of a
// command
//
//	words      is what follows its name; SANDBOX, SANDBOX: and COMMAND in it say how that is
//	           parsed and completed (see [Command])
//	ended      says that the sandboxes may have ended
//	help       is a sentence that fits on one line of the list of commands
//	example    is a command line with it
//
// and of those of a flag
//
//	help           is a sentence, or some
//	placeholder    stands for its value; a list such as none|host names all that there are,
//	               and a word with = in it the beginning of one
//	default        is its value unless it is given
//	short          is a letter
//	alias          is another name, by which other tools have it
//	group          is one of [topics]
//	xor            is the same for flags of which only one may be given
//	instead        follows the error for a value that is none of those in the placeholder
type CLI struct {
	Run     Run     `words:"[flags] [--] COMMAND [ARG...]" help:"Run a command in a new sandbox, and leave nothing behind (default)." example:"sbxrun --timeout 5 python3 job.py"`
	Start   Start   `words:"[flags] [[--] COMMAND [ARG...]]" help:"Start a sandbox that lives on, and print its id." example:"sbxrun start --name web --ready-tcp 8000 --wait-ready python3 -m http.server"`
	Exec    Exec    `words:"[flags] SANDBOX [--] COMMAND [ARG...]" help:"Run a command in a running sandbox, and leave nothing of it behind." example:"sbxrun exec --timeout 5 web make test"`
	Cp      Cp      `words:"[flags] SANDBOX:SRC... DST|SRC... SANDBOX:DST" help:"Copy files into a running sandbox, or out of it." example:"sbxrun cp -r web:/tmp/results ."`
	Diff    Diff    `words:"[flags] SANDBOX [PATH...]" help:"Show what a sandbox has changed in its overlays." ended:"" example:"sbxrun diff agent -p src"`
	Apply   Apply   `words:"[flags] SANDBOX [PATH...]" help:"Make the changes of a sandbox's overlays on the host." ended:"" example:"sbxrun apply agent --delete src"`
	Ps      Ps      `words:"[flags] [SANDBOX]" help:"List sandboxes, or the detached execs in one." example:"sbxrun ps --all --status failed"`
	Inspect Inspect `words:"[flags] SANDBOX[/EXEC]..." help:"Print everything known about sandboxes, as JSON." ended:"" example:"sbxrun inspect web"`
	Wait    Wait    `words:"[flags] SANDBOX[/EXEC]" help:"Wait for a sandbox to end, and exit with its command's code." ended:"" example:"sbxrun wait web --timeout 1m"`
	Logs    Logs    `words:"[flags] SANDBOX[/EXEC]" help:"Print what a sandbox's command has written." ended:"" example:"sbxrun logs -f web --stream stderr"`
	Kill    Kill    `words:"[flags] SANDBOX[/EXEC]...|--all|--tag KEY=VALUE" help:"End sandboxes, and prove it." example:"sbxrun kill web --grace 1s"`

	Snapshot  Snapshot  `words:"[flags] SANDBOX|rm SNAPSHOT...|export SNAPSHOT [FILE]|import [FILE]" help:"Keep what a sandbox wrote to its overlays, to start others from." example:"sbxrun snapshot web --name before"`
	Snapshots Snapshots `words:"[flags]" help:"List snapshots." example:"sbxrun snapshots --json"`

	Cleanup Cleanup `words:"[flags] [SANDBOX[/EXEC]...]" help:"Remove what ended sandboxes and crashes have left behind." ended:"" example:"sbxrun cleanup --older-than 24h"`
	Volume  Volume  `words:"[flags] ls|rm NAME...|export NAME [FILE|-]" help:"List, remove or export the directories that outlive sandboxes." example:"sbxrun volume export cache cache.tar"`
	Stats   Stats   `words:"[flags]" help:"Print how many tasks are in use, and the limits on them." example:"sbxrun stats --watch"`
	Serve   Serve   `words:"[flags]" help:"Serve calls over HTTP, on a Unix socket or with tokens." example:"sbxrun serve --listen unix:/run/sbxrund.sock"`
	Gateway Gateway `words:"[flags]" help:"Offer many servers, connected by NATS, as one." example:"sbxrun gateway --nats nats://nats.example --listen tcp:0.0.0.0:8443 --config gateway.toml"`
	Nodes   Nodes   `words:"[flags]" help:"List the nodes and gateways of a cluster." example:"sbxrun nodes --nats nats://nats.example"`
	MCP     MCP     `words:"[flags]" help:"Give agents tools that run code, on stdio (Model Context Protocol)." example:"sbxrun mcp --config agent.toml"`
	Doctor  Doctor  `words:"[--json|--script]" help:"Check what a run needs from this machine, and say what is missing." example:"sbxrun doctor"`
}

// View is the flags that say what a sandbox shows, of run and of start.
type View struct {
	RoBind    []string    `help:"Show a host path read-only." placeholder:"SRC[:DST]" group:"see"`
	Bind      []string    `help:"Show a host path, writable." placeholder:"SRC[:DST]" group:"see"`
	RoBindTry []string    `help:"Like --ro-bind, if the path exists." placeholder:"SRC[:DST]" group:"see"`
	BindTry   []string    `help:"Like --bind, if the path exists." placeholder:"SRC[:DST]" group:"see"`
	Overlay   []string    `help:"Show a host directory as writable, and keep it as it is: what is written goes to a layer, which diff and apply read." placeholder:"[SRC:]DST" group:"see"`
	Upper     Directory   `help:"Keep the layers of --overlay in this directory, and not in memory. It must be empty, or have been used for the same." placeholder:"DIR" group:"see"`
	From      string      `help:"Start with what a snapshot has: its overlays, with its layers below what is written." placeholder:"SNAPSHOT" group:"see"`
	DataDir   Directory   `help:"Directory for snapshots and volumes. Default: $SBXRUN_DATA_DIR, or one of the user's own." placeholder:"DIR" group:"see"`
	Volume    []string    `help:"Show a named directory that outlives sandboxes, made if there is none." placeholder:"NAME:DST[:ro]" group:"see"`
	Put       []string    `help:"Copy a file or directory into the sandbox before the command begins." placeholder:"SRC[:DST]" group:"see"`
	Tmpfs     []string    `help:"Mount an empty directory in memory." placeholder:"DST[:SIZE]" group:"see"`
	TmpSize   values.Size `help:"Size of /tmp, and of every other directory in memory." default:"256M" placeholder:"SIZE" group:"see"`
	Write     bool        `help:"Let the command write to the current directory: --cwd rw." short:"w" group:"see"`
	Cwd       string      `help:"Access to the current directory: read (ro, the default without --workdir), write (rw), write to a layer of its own (overlay), or none, which starts in an empty home." placeholder:"ro|rw|overlay|none" instead:"; --workdir DIR has the command start there" group:"see"`
	Protect   []string    `help:"Keep this path read-only where the command may otherwise write. Default: hooks and configuration of the git repository; none leaves these writable." placeholder:"PATH|none" group:"see"`
	CwdRoot   string      `help:"Show this parent of the current directory instead of it." placeholder:"DIR" group:"see"`
	Workdir   string      `help:"Working directory in the sandbox. Default: the current one." placeholder:"DIR" group:"see"`
	Tools     bool        `help:"Show, read-only, the tools that PATH leads to: pyenv, venv, nvm, cargo, ~/.local/bin and the like." group:"see"`
	Net       string      `help:"Network: none, the host's, or only what is listed: hosts with ports, *.names, addresses, networks." default:"none" placeholder:"none|host|allow=host[:port],..." group:"see"`
	Publish   []string    `help:"Lead a port of the host, by default of 127.0.0.1, to a port of the sandbox. HOSTPORT 0 picks one." placeholder:"[ADDR:]HOSTPORT:PORT" group:"see"`
	Connect   []string    `help:"Give a unix socket of the host as a port of 127.0.0.1 in the sandbox." placeholder:"unix:PATH=PORT" group:"see"`

	Vars
	Seccomp  string `help:"Refuse system calls that ordinary programs do not need (default), or refuse none (off)." default:"default" placeholder:"default|off" group:"be"`
	User     string `help:"User and group id in the sandbox." placeholder:"UID[:GID]" group:"be"`
	Hostname string `help:"Host name in the sandbox." default:"sandbox" placeholder:"NAME" group:"be"`

	FollowLinks bool `help:"With --put: follow symbolic links in SRC. Links in a directory are copied as links." group:"see"`
}

// Vars is the flags for the command's environment.
type Vars struct {
	Env        []string `help:"Set a variable, or pass one through." placeholder:"NAME[=VALUE]" group:"be"`
	EnvFile    []string `help:"Set variables from a file of NAME=VALUE lines." placeholder:"FILE" group:"be"`
	InheritEnv bool     `help:"Pass the whole environment through, except PATH, HOME and USER." group:"be"`
}

// DeadlineFlags say when and how run and exec end a command.
type DeadlineFlags struct {
	Timeout values.Duration `help:"Kill everything after this time: 5, 0.5, 1500ms, 5m. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	First
	ProofTimeout   values.Span `help:"How long to wait for proof that nothing is left." default:"5s" placeholder:"DUR" group:"end"`
	PreserveStatus bool        `help:"After a deadline, exit with the command's own code, or 128+n, instead of 124." group:"end"`
	Foreground     bool        `help:"No effect; accepted for compatibility with timeout(1)." group:"end"`
}

// First is the flags that say what comes before SIGKILL at a deadline, of run, start and
// exec.
type First struct {
	Signal values.Signal   `help:"Signal that every process gets first at the deadline, by name or number. Default: TERM." placeholder:"SIGNAL" short:"s" group:"end"`
	Grace  values.Duration `help:"Time between that signal and SIGKILL. Default: 0, which sends SIGKILL at once, or 5s with --signal. Also --kill-after." default:"0" placeholder:"DUR" short:"k" alias:"kill-after" group:"end"`
}

// Period is from the first signal to SIGKILL. Who names a signal wants it to be heard.
func (f First) Period() time.Duration {
	const heard = 5 * time.Second
	if f.Grace == 0 && f.Signal != 0 && f.Signal != values.Signal(syscall.SIGKILL) {
		return heard
	}
	return time.Duration(f.Grace)
}

// Limits is the flags that say how much a command may use, of run, start and exec.
type Limits struct {
	Memory      values.Size       `help:"Memory for all processes together, including files in /tmp and caches." placeholder:"SIZE" group:"use"`
	MemorySwap  values.Swap       `help:"Memory plus swap; unlimited sets no limit on swap. Default: the value of --memory, so no swap." placeholder:"SIZE" group:"use"`
	Pids        values.Number     `help:"Maximum number of tasks at once: processes and threads." placeholder:"N" group:"use"`
	Cpus        values.Decimal    `help:"Number of CPUs that may be busy, such as 0.5 or 2." placeholder:"N" group:"use"`
	CPUTime     values.Duration   `help:"Kill everything once all processes together have used this much CPU time." default:"0" placeholder:"DUR" group:"use"`
	Fsize       values.Size       `help:"Maximum size of a file that is written." placeholder:"SIZE" group:"use"`
	Nofile      values.Number     `help:"Maximum number of open descriptors per process; 1024 by default with --memory." placeholder:"N" group:"use"`
	Stack       values.Size       `help:"Maximum stack size of a process." placeholder:"SIZE" group:"use"`
	Nice        values.Adjustment `help:"Niceness, from -20 to 19." placeholder:"N" group:"use"`
	OomScoreAdj values.Adjustment `help:"How readily the kernel kills it when memory runs out, from -1000 to 1000." placeholder:"N" group:"use"`
	Limits      string            `help:"If a limit cannot be enforced: refuse to start (required), or run without it (best-effort)." default:"required" placeholder:"required|best-effort" group:"use"`
}

// OutputFlags say what run and exec report of a command, and where.
type OutputFlags struct {
	Report      string      `help:"Write the JSON report to a file or an open descriptor." placeholder:"PATH|fd:N" group:"tell"`
	JSON        bool        `help:"Capture stdout and stderr, and print them within the report." group:"tell"`
	MaxOutput   values.Size `help:"How much of each stream is kept: its head and tail with --json, its head with --output-limit." default:"1M" placeholder:"SIZE" group:"tell"`
	OutputLimit string      `help:"When a stream exceeds --max-output: kill everything, or drop the rest. Default with --json: truncate." placeholder:"kill|truncate" group:"use"`
	Verbose     bool        `help:"Say on stderr which signal is sent to end the command." short:"v" group:"tell"`
	Quiet       bool        `help:"Do not say on stderr why the command was ended." short:"q" group:"tell"`
}

// AdmissionFlags say what run, start and exec do when the machine has no room for all of them.
type AdmissionFlags struct {
	OnPressure  string          `help:"When too many tasks are in use: exit with 75, wait, or start anyway." default:"refuse" placeholder:"refuse|wait|ignore" group:"busy"`
	WaitTimeout values.Duration `help:"Wait no longer than this." default:"1m" placeholder:"DUR" group:"busy"`
	MaxParallel values.Number   `help:"Run at most N such commands at once. 0 sets no limit." default:"0" placeholder:"N" group:"busy"`
	Warn        values.Percent  `help:"Warn when this percentage of a limit on tasks is in use." default:"60" placeholder:"PERCENT" group:"busy"`
	Alert       values.Percent  `help:"Apply --on-pressure when this percentage of a limit on tasks is in use." default:"80" placeholder:"PERCENT" group:"busy"`
}

// Run is the flags of sbxrun run, which is also sbxrun without a command.
type Run struct {
	DeadlineFlags

	View
	Limits
	Get           []string      `help:"Copy what the command has left to a directory, when it is proven to be gone. Default: the current one." placeholder:"GLOB[:DIR]" group:"see"`
	GetMaxSize    values.Size   `help:"Copy no more than this with --get, all files together. 0 is no limit." default:"256M" placeholder:"SIZE" group:"see"`
	GetMaxEntries values.Number `help:"Copy no more files, directories and links than this with --get. 0 is a million." default:"10000" placeholder:"N" group:"see"`
	FakeMeminfo   bool          `help:"Show --memory in /proc/meminfo, for programs that size themselves by it." group:"use"`
	Tty           bool          `help:"Give the command a terminal of its own." short:"t" group:"be"`

	AdmissionFlags
	Diff        bool `help:"With --overlay: say on stderr at the end what was changed." group:"tell"`
	Apply       bool `help:"With --overlay: if the exit code is 0, make the changes on the host." group:"see"`
	ApplyDelete bool `help:"Like --apply, and also delete what was deleted." group:"see"`
	ApplyAll    bool `help:"Like --apply, and also apply files that programs on the host execute or trust, such as .git/hooks." group:"see"`
	OutputFlags
	PrintCommand bool      `help:"Print the bwrap command, and run nothing." group:"tell"`
	PrintFilter  string    `help:"With --print-command: write the seccomp filter here, and use it in the command." placeholder:"PATH|fd:N" group:"tell"`
	Version      bool      `help:"Print the version." group:"tell"`
	StateDir     Directory `help:"Directory for records of sandboxes. Default: $SBXRUN_STATE_DIR, or one of the user's own." placeholder:"DIR" group:"tell"`
	Help         bool      `help:"Print this." short:"h" group:"tell"`
}

type Start struct {
	Name Name     `help:"A name that no other running sandbox has." placeholder:"NAME" group:"be"`
	Tag  []string `help:"A tag to select sandboxes by." placeholder:"KEY=VALUE" group:"be"`

	Timeout     values.Duration `help:"Lifetime: kill everything after this time. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	IdleTimeout values.Duration `help:"Kill everything when no exec has run in it for this time. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	First
	ProofTimeout values.Span `help:"How long to wait for proof that nothing is left." default:"5s" placeholder:"DUR" group:"end"`
	Rm           bool        `help:"Remove its record and logs once it is proven to have ended." group:"end"`

	View
	Limits
	FakeMeminfo bool   `help:"Show --memory in /proc/meminfo, for programs that size themselves by it." group:"use"`
	OutputLimit string `help:"When a stream exceeds --log-max: kill everything, or drop the rest." default:"truncate" placeholder:"kill|truncate" group:"use"`

	ReadyTCP      string          `help:"Ready when something listens on this TCP port of the sandbox." placeholder:"PORT" xor:"probe" group:"ready"`
	ReadyExec     string          `help:"Ready when this shell command succeeds in the sandbox." placeholder:"COMMAND" xor:"probe" group:"ready"`
	ReadyLog      string          `help:"Ready when a line of the output matches this regular expression." placeholder:"RE" xor:"probe" group:"ready"`
	ReadyInterval values.Span     `help:"Time between two checks." default:"100ms" placeholder:"DUR" group:"ready"`
	ReadyTimeout  values.Duration `help:"Stop checking after this time. The sandbox lives on." default:"5m" placeholder:"DUR" group:"ready"`
	WaitReady     bool            `help:"Return when it is ready." group:"ready"`

	AdmissionFlags

	LogMax   values.Size `help:"How much of stdout, and of stderr, is kept: the head." default:"64M" placeholder:"SIZE" group:"tell"`
	JSON     bool        `help:"Print what was started, as JSON." group:"tell"`
	StateDir Directory   `help:"Directory for records of sandboxes. Default: $SBXRUN_STATE_DIR, or one of the user's own." placeholder:"DIR" group:"tell"`
	Help     bool        `help:"Print this." short:"h" group:"tell"`
}

// Name is a sandbox's name. That none was given is the empty one, so nobody can
// give that.
type Name string

// UnmarshalText sets n to any text but the empty one.
func (n *Name) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("the name is empty")
	}
	*n = Name(text)
	return nil
}

// Directory is the absolute path of a directory. That none was given is the empty one, so
// nobody can give that: a shell's empty variable is a mistake.
type Directory string

// UnmarshalText sets d to any path but the empty one, from the current directory on.
func (d *Directory) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("the path is empty; want one such as /run/user/1000/sandboxes")
	}
	path, err := filepath.Abs(string(text))
	*d = Directory(path)
	return err
}

// Recorded is the last flags of commands that work with records of sandboxes.
type Recorded struct {
	StateDir Directory `help:"Directory for records of sandboxes. Default: $SBXRUN_STATE_DIR, or one of the user's own." placeholder:"DIR"`
	Help     bool      `help:"Print this." short:"h"`
}

type Exec struct {
	DeadlineFlags

	Workdir string `help:"Working directory in the sandbox. Default: the sandbox's own." placeholder:"DIR" group:"be"`
	Vars
	Limits
	Tty    bool `help:"Give the command a terminal of its own." short:"t" group:"be"`
	Detach bool `help:"Return once the command runs, and print its handle, SANDBOX/EXEC. It ends with the sandbox, or at its deadline." short:"d" group:"end"`

	AdmissionFlags
	OutputFlags
	LogMax   values.Size `help:"With --detach: how much of stdout, and of stderr, is kept: the head." default:"64M" placeholder:"SIZE" group:"tell"`
	StateDir Directory   `help:"Directory for records of sandboxes. Default: $SBXRUN_STATE_DIR, or one of the user's own." placeholder:"DIR" group:"tell"`
	Help     bool        `help:"Print this." short:"h" group:"tell"`
}

type Cp struct {
	Recursive bool        `help:"Copy directories, with all that is in them." short:"r"`
	MaxSize   values.Size `help:"Copy no more than this, all files together. 0 is no limit." default:"1G" placeholder:"SIZE"`
	Quiet     bool        `help:"Show no progress, and do not name what was left out." short:"q"`
	JSON      bool        `help:"Print what was copied, as JSON."`

	FollowLinks bool `help:"Follow symbolic links in SRC on the host, as cp -H does. Links in a directory are copied as links." short:"H"`
	Recorded
}

type Diff struct {
	Patch bool `help:"Print a patch, as git diff does." short:"p" xor:"as"`
	Stat  bool `help:"Print only how much it is." xor:"as"`
	Tar   bool `help:"Write a tar: an OCI layer, with .wh.NAME for what was deleted." xor:"as"`
	JSON  bool `help:"Print JSON." xor:"as"`
	Recorded
}

type Apply struct {
	Check  bool `help:"Change nothing, and say what would be done."`
	Delete bool `help:"Also delete what was deleted in the sandbox."`
	All    bool `help:"Also apply files that programs on the host execute or trust, such as .git/hooks."`
	Force  bool `help:"Replace what has changed on the host since the sandbox began."`
	Quiet  bool `help:"Do not name what is deleted or left." short:"q"`
	JSON   bool `help:"Print what was done, as JSON."`
	Recorded
}

type Ps struct {
	All    bool     `help:"Include those that have ended." short:"a"`
	Status []string `help:"Only those with this status, ended or not." placeholder:"starting|running|completed|failed|killed|error|lost"`
	Tag    []string `help:"Only those with this tag." placeholder:"KEY=VALUE"`
	Names  bool     `help:"Print only names, one per line; the id where there is no name." xor:"as"`
	Quiet  bool     `help:"Print only ids, one per line." short:"q" xor:"as"`
	JSON   bool     `help:"Print a JSON array." xor:"as"`
	Recorded
}

type Inspect struct {
	JSON bool `help:"Print JSON, which is the only format."`
	Recorded
}

type Wait struct {
	Ready   bool            `help:"Wait until it is ready, as decided by the probe given to start." xor:"for"`
	Log     string          `help:"Wait until a line of its output matches this regular expression." placeholder:"RE" xor:"for"`
	Timeout values.Duration `help:"Wait no longer than this. The sandbox lives on. 0 is forever." default:"0" placeholder:"DUR"`
	JSON    bool            `help:"Print the outcome as JSON."`
	Recorded
}

type Logs struct {
	Follow bool   `help:"Keep printing until the sandbox has ended." short:"f"`
	Stream string `help:"Only this stream." placeholder:"stdout|stderr"`
	Tail   string `help:"Only the last N lines of each stream." placeholder:"N"`
	JSON   bool   `help:"Print a JSON object for each piece of output."`
	Recorded
}

type Kill struct {
	Signal       values.Signal   `help:"Signal that every process gets first, by name or number." default:"TERM" placeholder:"SIGNAL" short:"s"`
	Grace        values.Duration `help:"Time between that signal and SIGKILL. 0 sends SIGKILL at once. Also --kill-after." default:"5s" placeholder:"DUR" short:"k" alias:"kill-after"`
	ProofTimeout values.Span     `help:"How long to wait for proof that nothing is left." default:"5s" placeholder:"DUR"`
	All          bool            `help:"All running sandboxes." short:"a"`
	Tag          []string        `help:"All running sandboxes with this tag." placeholder:"KEY=VALUE"`
	JSON         bool            `help:"Print a JSON array of the outcomes."`
	Recorded
}

type Snapshot struct {
	Name    Name            `help:"A name that no other snapshot has." placeholder:"NAME"`
	TTL     values.Duration `help:"Time to live: cleanup removes it after this time. 0 is never." default:"0" placeholder:"DUR"`
	MaxSize values.Size     `help:"How much all snapshots together may take on the disk, and one of them unpacked." default:"16G" placeholder:"SIZE"`
	JSON    bool            `help:"Print the snapshot's manifest, as JSON."`
	DataDir Directory       `help:"Directory for snapshots and volumes. Default: $SBXRUN_DATA_DIR, or one of the user's own." placeholder:"DIR"`
	Recorded
}

type Snapshots struct {
	Quiet   bool      `help:"Print only ids, one per line." short:"q" xor:"as"`
	JSON    bool      `help:"Print a JSON array." xor:"as"`
	DataDir Directory `help:"Directory for snapshots and volumes. Default: $SBXRUN_DATA_DIR, or one of the user's own." placeholder:"DIR"`
	Help    bool      `help:"Print this." short:"h"`
}

type Cleanup struct {
	OlderThan values.Duration `help:"Keep records of what ended less than this long ago." default:"0" placeholder:"DUR"`
	DryRun    bool            `help:"Only say what would be done." short:"n"`
	JSON      bool            `help:"Print a JSON array of what was found and done."`
	DataDir   Directory       `help:"Directory for snapshots and volumes. Default: $SBXRUN_DATA_DIR, or one of the user's own." placeholder:"DIR"`
	Recorded
}

type Volume struct {
	JSON    bool      `help:"With ls: print a JSON array."`
	DataDir Directory `help:"Directory for snapshots and volumes. Default: $SBXRUN_DATA_DIR, or one of the user's own." placeholder:"DIR"`
	Recorded
}

type Stats struct {
	JSON       bool           `help:"Print a JSON object." xor:"as"`
	Prometheus bool           `help:"Print Prometheus's text format." xor:"as"`
	Watch      bool           `help:"Keep printing; on a terminal, show a live screen." short:"w"`
	Interval   values.Span    `help:"With --watch: time between two updates." default:"2s" placeholder:"DUR"`
	Warn       values.Percent `help:"Percentage of a limit from which the level is warn." default:"60" placeholder:"PERCENT"`
	Alert      values.Percent `help:"Percentage of a limit from which the level is alert." default:"80" placeholder:"PERCENT"`
	Recorded
}

type Serve struct{ Listening }

type Gateway struct{ Listening }

// Listening is the flags of servers. What is given counts in place of what the configuration
// says.
type Listening struct {
	Config       string          `help:"Configuration in TOML." placeholder:"FILE"`
	Listen       []string        `help:"Where to listen: unix:PATH, or tcp:HOST:PORT, which requires tokens." placeholder:"ADDRESS"`
	TokenFile    string          `help:"Whose calls are accepted: lines of TENANT sha256:HEX." placeholder:"FILE"`
	TLSCert      string          `help:"Certificate for TCP, in PEM." placeholder:"FILE"`
	TLSKey       string          `help:"Its key, in PEM." placeholder:"FILE"`
	DrainTimeout values.Duration `help:"How long to wait for running calls on SIGTERM. Default: 30s." placeholder:"DUR"`
	NATS         string          `help:"Take part in a cluster, by these servers of NATS: nats://HOST:PORT, or several with commas." placeholder:"URL"`
	NATSCreds    string          `help:"Credentials for NATS." placeholder:"FILE"`
	Node         string          `help:"Name in the cluster, which no other has. Default: the host's." placeholder:"NAME"`
	CheckConfig  bool            `help:"Check the configuration, and exit."`
	Help         bool            `help:"Print this." short:"h"`
}

type Nodes struct {
	Config    string `help:"Configuration in TOML, of which the part about NATS counts." placeholder:"FILE"`
	NATS      string `help:"Servers of NATS: nats://HOST:PORT, or several with commas." placeholder:"URL"`
	NATSCreds string `help:"Credentials for NATS." placeholder:"FILE"`
	JSON      bool   `help:"Print a JSON object."`
	Help      bool   `help:"Print this." short:"h"`
}

type MCP struct {
	Config      string `help:"Configuration in TOML, as for sbxrun serve: limits, languages, what sandboxes see." placeholder:"FILE"`
	CheckConfig bool   `help:"Check the configuration, and exit."`
	Help        bool   `help:"Print this." short:"h"`
}

type Doctor struct {
	JSON   bool `help:"Print the findings as JSON." xor:"as"`
	Script bool `help:"Print a script that, run by root, lets you set limits from this shell: sbxrun doctor --script | sudo sh." xor:"as"`
	Help   bool `help:"Print this." short:"h"`
}

// topics are the groups of flags, in the order of --help and of the man pages.
var topics = []struct{ key, title string }{
	{"", "Flags:"},
	{"end", "Deadline and end:"},
	{"see", "Files and network:"},
	{"be", "Identity and environment:"},
	{"use", "Limits:"},
	{"ready", "Readiness:"},
	{"busy", "On a busy machine:"},
	{"tell", "Output:"},
}
