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
//	words      is what follows its name; SANDBOX and COMMAND in it say how that is parsed
//	           and completed (see [Command])
//	ended      says that the sandboxes may have ended
//	help       is a sentence that fits on one line of the list of commands
//	example    is a command line with it
//
// and of those of a flag
//
//	help           is a sentence, or some
//	placeholder    stands for its value; a list such as none|host names all that there are
//	default        is its value unless it is given
//	short          is a letter
//	alias          is another name, by which other tools have it
//	group          is one of [topics]
//	xor            is the same for flags of which only one may be given
type CLI struct {
	Run     Run     `words:"[flags] [--] COMMAND [ARG...]" help:"Run a command in a new sandbox, and leave nothing behind (default)." example:"sbxrun --timeout 5 python3 job.py"`
	Start   Start   `words:"[flags] [[--] COMMAND [ARG...]]" help:"Start a sandbox that lives on, and print its id." example:"sbxrun start --name web --ready-tcp 8000 --wait-ready python3 -m http.server"`
	Exec    Exec    `words:"[flags] SANDBOX [--] COMMAND [ARG...]" help:"Run a command in a running sandbox, and leave nothing of it behind." example:"sbxrun exec --timeout 5 web make test"`
	Ps      Ps      `words:"[flags] [SANDBOX]" help:"List the sandboxes, or the detached execs in one." example:"sbxrun ps --all --status failed"`
	Inspect Inspect `words:"[flags] SANDBOX[/EXEC]..." help:"Print all that is known of sandboxes, as JSON." ended:"" example:"sbxrun inspect web"`
	Wait    Wait    `words:"[flags] SANDBOX[/EXEC]" help:"Wait for a sandbox's end, and exit with its command's code." ended:"" example:"sbxrun wait web --timeout 1m"`
	Logs    Logs    `words:"[flags] SANDBOX[/EXEC]" help:"Print what a sandbox's command has written." ended:"" example:"sbxrun logs -f web --stream stderr"`
	Kill    Kill    `words:"[flags] SANDBOX[/EXEC]...|--all|--tag KEY=VALUE" help:"End sandboxes, and prove it." example:"sbxrun kill web --grace 1s"`
	Cleanup Cleanup `words:"[flags] [SANDBOX[/EXEC]...]" help:"Remove what ended sandboxes and crashes have left." ended:"" example:"sbxrun cleanup --older-than 24h"`
	Stats   Stats   `words:"[flags]" help:"Print how many tasks are in use against what bounds them." example:"sbxrun stats --watch"`
	Serve   Serve   `words:"[flags]" help:"Serve calls over HTTP, on a unix socket or with tokens." example:"sbxrun serve --listen unix:/run/sbxrun/api.sock"`
	MCP     MCP     `words:"[flags]" help:"Give an agent tools that run code, on stdio (Model Context Protocol)." example:"sbxrun mcp --config agent.toml"`
	Doctor  Doctor  `words:"[--json|--script]" help:"Try what a run needs on this machine, and tell what is missing." example:"sbxrun doctor"`
}

// View is the flags that say what a sandbox shows, of run and of start.
type View struct {
	RoBind    []string    `help:"Show a host path read-only." placeholder:"SRC[:DST]" group:"see"`
	Bind      []string    `help:"Show a host path, writable." placeholder:"SRC[:DST]" group:"see"`
	RoBindTry []string    `help:"As --ro-bind, if the path exists." placeholder:"SRC[:DST]" group:"see"`
	BindTry   []string    `help:"As --bind, if the path exists." placeholder:"SRC[:DST]" group:"see"`
	Tmpfs     []string    `help:"An empty directory in memory." placeholder:"DST[:SIZE]" group:"see"`
	TmpSize   values.Size `help:"How much fits into /tmp, and into every other directory in memory." default:"256M" placeholder:"SIZE" group:"see"`
	Write     bool        `help:"Let it write to the current directory: --cwd rw." short:"w" group:"see"`
	Cwd       string      `help:"What it sees of the current directory: read (ro, the default without --workdir), write (rw), nothing (none, in an empty home)." placeholder:"ro|rw|none" group:"see"`
	CwdRoot   string      `help:"Show this directory above the current one, in place of it." placeholder:"DIR" group:"see"`
	Workdir   string      `help:"Working directory in the sandbox. Default: the current one." placeholder:"DIR" group:"see"`
	Tools     bool        `help:"Show read-only what the directories of PATH belong to: pyenv, venv, nvm, cargo, ~/.local/bin and the like." group:"see"`
	Net       string      `help:"Network: none, or the host's." default:"none" placeholder:"none|host" group:"see"`

	Vars
	Seccomp  string `help:"Refuse system calls that no ordinary program needs (default), or none (off)." default:"default" placeholder:"default|off" group:"be"`
	User     string `help:"User and group id in the sandbox." placeholder:"UID[:GID]" group:"be"`
	Hostname string `help:"Host name in the sandbox." default:"sandbox" placeholder:"NAME" group:"be"`
}

// Vars is the flags for the command's environment.
type Vars struct {
	Env        []string `help:"Set a variable, or pass one through." placeholder:"NAME[=VALUE]" group:"be"`
	EnvFile    []string `help:"Set the variables in a file of NAME=VALUE lines." placeholder:"FILE" group:"be"`
	InheritEnv bool     `help:"Pass the whole environment through, but for PATH, HOME and USER." group:"be"`
}

// Ends is the flags that say how a command is ended, of run and exec.
type Ends struct {
	Timeout values.Duration `help:"Kill everything after this time: 5, 0.5, 1500ms, 5m. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	First
	ProofTimeout   values.Duration `help:"How long to wait for the proof that nothing is left." default:"5s" placeholder:"DUR" group:"end"`
	PreserveStatus bool            `help:"After a deadline exit with the command's own code, or 128+n, in place of 124." group:"end"`
	Foreground     bool            `help:"Changes nothing; for command lines of timeout(1)." group:"end"`
}

// First is the flags that say what comes before SIGKILL at a deadline, of run, start and
// exec.
type First struct {
	Signal values.Signal   `help:"What every process gets first at the deadline: a name or a number. Default: TERM." placeholder:"SIGNAL" short:"s" group:"end"`
	Grace  values.Duration `help:"SIGKILL comes so long after that signal. 0, the default, is at once, and with --signal 5s. Also --kill-after." default:"0" placeholder:"DUR" short:"k" alias:"kill-after" group:"end"`
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
	Memory      values.Size       `help:"How much memory all together may use, files in /tmp and caches included." placeholder:"SIZE" group:"use"`
	MemorySwap  values.Swap       `help:"Memory and swap together; unlimited is no limit on swap. Default: as --memory, so no swap." placeholder:"SIZE" group:"use"`
	Pids        values.Number     `help:"How many tasks there may be at once: processes and threads." placeholder:"N" group:"use"`
	Cpus        values.Decimal    `help:"How many CPUs may be busy, such as 0.5 or 2." placeholder:"N" group:"use"`
	CPUTime     values.Duration   `help:"Kill everything when all together have used so much CPU time." default:"0" placeholder:"DUR" group:"use"`
	Fsize       values.Size       `help:"How large a file may become that is written." placeholder:"SIZE" group:"use"`
	Nofile      values.Number     `help:"How many descriptors a process may have open." placeholder:"N" group:"use"`
	Stack       values.Size       `help:"How large a process's stack may grow." placeholder:"SIZE" group:"use"`
	Nice        values.Adjustment `help:"Niceness, from -20 to 19." placeholder:"N" group:"use"`
	OomScoreAdj values.Adjustment `help:"How willingly the kernel kills it when the machine has no memory left, from -1000 to 1000." placeholder:"N" group:"use"`
	Limits      string            `help:"What cannot be enforced here: refuse to start (required), or go on without (best-effort)." default:"required" placeholder:"required|best-effort" group:"use"`
}

// Tells is the flags that say what is told of a command, of run and exec.
type Tells struct {
	Report      string      `help:"Write the JSON report to a file or an open descriptor." placeholder:"PATH|fd:N" group:"tell"`
	JSON        bool        `help:"Capture stdout and stderr, and print the report with them." group:"tell"`
	MaxOutput   values.Size `help:"With --json or --output-limit: how much is kept of each stream; head and tail, or the head." default:"1M" placeholder:"SIZE" group:"tell"`
	OutputLimit string      `help:"Where more than --max-output is written: kill everything, or drop the rest. With --json, truncate is the default." placeholder:"kill|truncate" group:"use"`
	Verbose     bool        `help:"Say on stderr which signal is sent to end the command." short:"v" group:"tell"`
	Quiet       bool        `help:"Do not say on stderr why the command was ended." short:"q" group:"tell"`
}

// Busy is the flags that say what is done on a machine that has not room for all, of
// run, start and exec.
type Busy struct {
	OnPressure  string          `help:"What to do if there are too many tasks: exit with 75, wait, or start all the same." default:"refuse" placeholder:"refuse|wait|ignore" group:"busy"`
	WaitTimeout values.Duration `help:"Wait no longer than this." default:"1m" placeholder:"DUR" group:"busy"`
	MaxParallel values.Number   `help:"Run beside at most N-1 others that were given this. 0 is no bound." default:"0" placeholder:"N" group:"busy"`
	Warn        values.Percent  `help:"From which percentage of a bound of tasks on there is a warning." default:"60" placeholder:"PERCENT" group:"busy"`
	Alert       values.Percent  `help:"From which percentage of a bound on there are too many." default:"80" placeholder:"PERCENT" group:"busy"`
}

// Run is the flags of sbxrun run, which is also sbxrun without a command.
type Run struct {
	Ends

	View
	Limits
	FakeMeminfo bool `help:"Show --memory in /proc/meminfo, for programs that size themselves by it." group:"use"`
	Tty         bool `help:"Run on a terminal of its own." short:"t" group:"be"`

	Busy
	Tells
	PrintCommand bool      `help:"Print the bwrap command, and run nothing." group:"tell"`
	PrintFilter  string    `help:"With --print-command: write the seccomp filter, and have the command use it." placeholder:"PATH|fd:N" group:"tell"`
	Version      bool      `help:"Print the version." group:"tell"`
	StateDir     Directory `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR" group:"tell"`
	Help         bool      `help:"Print this." short:"h" group:"tell"`
}

// Start is the flags of sbxrun start.
type Start struct {
	Name Name     `help:"A name, which no other running sandbox may have." placeholder:"NAME" group:"be"`
	Tag  []string `help:"A tag, to select sandboxes by." placeholder:"KEY=VALUE" group:"be"`

	Timeout     values.Duration `help:"Lifetime: kill everything after this time. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	IdleTimeout values.Duration `help:"Kill everything when for this time no exec has run in it. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	First
	ProofTimeout values.Duration `help:"How long to wait for the proof that nothing is left." default:"5s" placeholder:"DUR" group:"end"`
	Rm           bool            `help:"When it has ended, proven, remove its record and logs." group:"end"`

	View
	Limits
	FakeMeminfo bool   `help:"Show --memory in /proc/meminfo, for programs that size themselves by it." group:"use"`
	OutputLimit string `help:"Where more than --log-max is written: kill everything, or drop the rest." default:"truncate" placeholder:"kill|truncate" group:"use"`

	ReadyTCP      string          `help:"Ready when something listens on this TCP port of the sandbox." placeholder:"PORT" xor:"probe" group:"ready"`
	ReadyExec     string          `help:"Ready when this shell command succeeds in the sandbox." placeholder:"COMMAND" xor:"probe" group:"ready"`
	ReadyLog      string          `help:"Ready when a line of the output matches this regular expression." placeholder:"RE" xor:"probe" group:"ready"`
	ReadyInterval values.Duration `help:"Pause between two looks." default:"100ms" placeholder:"DUR" group:"ready"`
	ReadyTimeout  values.Duration `help:"Look no longer than this. The sandbox lives on." default:"5m" placeholder:"DUR" group:"ready"`
	WaitReady     bool            `help:"Return when it is ready." group:"ready"`

	Busy

	LogMax   values.Size `help:"How much of stdout, and of stderr, is kept; the head." default:"64M" placeholder:"SIZE" group:"tell"`
	JSON     bool        `help:"Print what was started as JSON." group:"tell"`
	StateDir Directory   `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR" group:"tell"`
	Help     bool        `help:"Print this." short:"h" group:"tell"`
}

// Name is a sandbox's name. That none was given is the empty one, so nobody can
// give that.
type Name string

// UnmarshalText sets n to any text but the empty one.
func (n *Name) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		return errors.New("a name is not empty")
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

// Exec is the flags of sbxrun exec.
type Exec struct {
	Ends

	Workdir string `help:"Working directory in the sandbox. Default: the sandbox's." placeholder:"DIR" group:"be"`
	Vars
	Limits
	Tty    bool `help:"Run on a terminal of its own." short:"t" group:"be"`
	Detach bool `help:"Return when the command runs, and print a handle of it, SANDBOX/EXEC. It ends with the sandbox, or at its deadline." short:"d" group:"end"`

	Busy
	Tells
	LogMax   values.Size `help:"With --detach: how much of stdout, and of stderr, is kept; the head." default:"64M" placeholder:"SIZE" group:"tell"`
	StateDir Directory   `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR" group:"tell"`
	Help     bool        `help:"Print this." short:"h" group:"tell"`
}

// Ps is the flags of sbxrun ps.
type Ps struct {
	All      bool      `help:"Those that have ended, too." short:"a"`
	Status   []string  `help:"Only those of this status, ended or not." placeholder:"starting|running|completed|failed|killed|error|lost"`
	Tag      []string  `help:"Only those with this tag." placeholder:"KEY=VALUE"`
	Names    bool      `help:"Print only the names, one per line; the id of what has none." xor:"as"`
	Quiet    bool      `help:"Print only the ids, one per line." short:"q" xor:"as"`
	JSON     bool      `help:"Print a JSON array." xor:"as"`
	StateDir Directory `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help     bool      `help:"Print this." short:"h"`
}

// Inspect is the flags of sbxrun inspect.
type Inspect struct {
	JSON     bool      `help:"Print JSON, as it does anyway."`
	StateDir Directory `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help     bool      `help:"Print this." short:"h"`
}

// Wait is the flags of sbxrun wait.
type Wait struct {
	Ready    bool            `help:"Wait until it is ready, by the probe that start was given." xor:"for"`
	Log      string          `help:"Wait until a line of its output matches this regular expression." placeholder:"RE" xor:"for"`
	Timeout  values.Duration `help:"Wait no longer than this. The sandbox lives on. 0 is for ever." default:"0" placeholder:"DUR"`
	JSON     bool            `help:"Print what came of it as JSON."`
	StateDir Directory       `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help     bool            `help:"Print this." short:"h"`
}

// Logs is the flags of sbxrun logs.
type Logs struct {
	Follow   bool      `help:"Go on printing until the sandbox has ended." short:"f"`
	Stream   string    `help:"Only this stream." placeholder:"stdout|stderr"`
	Tail     string    `help:"Only the last lines of each stream." placeholder:"N"`
	JSON     bool      `help:"Print a JSON object for each piece of output."`
	StateDir Directory `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help     bool      `help:"Print this." short:"h"`
}

// Kill is the flags of sbxrun kill.
type Kill struct {
	Signal       values.Signal   `help:"What every process gets first: a name or a number." default:"TERM" placeholder:"SIGNAL" short:"s"`
	Grace        values.Duration `help:"SIGKILL comes after this time. 0 is at once." default:"5s" placeholder:"DUR"`
	ProofTimeout values.Duration `help:"How long to wait for the proof that nothing is left." default:"5s" placeholder:"DUR"`
	All          bool            `help:"All that run." short:"a"`
	Tag          []string        `help:"All that run and have this tag." placeholder:"KEY=VALUE"`
	JSON         bool            `help:"Print a JSON array of what came of it."`
	StateDir     Directory       `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help         bool            `help:"Print this." short:"h"`
}

// Cleanup is the flags of sbxrun cleanup.
type Cleanup struct {
	OlderThan values.Duration `help:"Keep the records of what has ended within this time." default:"0" placeholder:"DUR"`
	DryRun    bool            `help:"Only say what would be done." short:"n"`
	JSON      bool            `help:"Print a JSON array of what was found and done."`
	StateDir  Directory       `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help      bool            `help:"Print this." short:"h"`
}

// Stats is the flags of sbxrun stats.
type Stats struct {
	JSON       bool            `help:"Print a JSON object." xor:"as"`
	Prometheus bool            `help:"Print the text format of Prometheus." xor:"as"`
	Watch      bool            `help:"Go on printing; on a terminal, a live screen." short:"w"`
	Interval   values.Duration `help:"With --watch: pause between two looks." default:"2s" placeholder:"DUR"`
	Warn       values.Percent  `help:"From which percentage of a bound on the level is warn." default:"60" placeholder:"PERCENT"`
	Alert      values.Percent  `help:"From which percentage of a bound on it is alert." default:"80" placeholder:"PERCENT"`
	StateDir   Directory       `help:"Where the records of sandboxes are. Default: as SBXRUN_STATE_DIR says." placeholder:"DIR"`
	Help       bool            `help:"Print this." short:"h"`
}

// Serve is the flags of sbxrun serve. What is given counts in place of what the
// configuration says.
type Serve struct {
	Config       string          `help:"Configuration in TOML." placeholder:"FILE"`
	Listen       []string        `help:"Where to listen: unix:PATH, or tcp:HOST:PORT, which takes tokens." placeholder:"ADDRESS"`
	TokenFile    string          `help:"Whose calls are taken: lines of TENANT sha256:HEX." placeholder:"FILE"`
	TLSCert      string          `help:"Certificate for TCP, in PEM." placeholder:"FILE"`
	TLSKey       string          `help:"Its key, in PEM." placeholder:"FILE"`
	DrainTimeout values.Duration `help:"On SIGTERM wait so long for calls that run. Default: 30s." placeholder:"DUR"`
	CheckConfig  bool            `help:"Check the configuration, and serve nothing."`
	Help         bool            `help:"Print this." short:"h"`
}

// MCP is the flags of sbxrun mcp.
type MCP struct {
	Config      string `help:"Configuration in TOML, as of sbxrun serve: limits, languages, what sandboxes see." placeholder:"FILE"`
	CheckConfig bool   `help:"Check the configuration, and serve nothing."`
	Help        bool   `help:"Print this." short:"h"`
}

// Doctor is the flags of sbxrun doctor.
type Doctor struct {
	JSON   bool `help:"Print the findings as JSON." xor:"as"`
	Script bool `help:"Print a script for root that lets you set limits from this shell on: sbxrun doctor --script | sudo sh." xor:"as"`
	Help   bool `help:"Print this." short:"h"`
}

// topics are the groups of flags, in the order of --help and of the man pages.
var topics = []struct{ key, title string }{
	{"", "Flags:"},
	{"end", "How it ends:"},
	{"see", "What it sees:"},
	{"be", "What it is:"},
	{"use", "What it may use:"},
	{"ready", "When it is ready:"},
	{"busy", "When the machine is busy:"},
	{"tell", "What sbxrun tells:"},
}
