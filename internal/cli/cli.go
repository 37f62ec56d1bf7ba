// Package cli is the definition of sbxrun's command line: the structs that kong
// parses, and from which --help, the man page and the completions are made.
package cli

import (
	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/quantity"
)

// CLI is the whole command line: what --help, the man page and the completions
// are made from. A command is parsed with its own struct alone, which is
// quicker, and leaves no doubt about what belongs to the payload.
type CLI struct {
	Run    Run    `cmd:"" default:"withargs" help:"Run a command in a new sandbox, and leave nothing behind (the default command)."`
	Doctor Doctor `cmd:"" help:"Try what a run needs on this machine, and tell what is missing."`
}

// Run is the flags of sbxrun run, which is also sbxrun without a command.
type Run struct {
	Timeout      quantity.Duration `help:"Kill everything after this time: 5, 0.5, 1500ms, 5m. 0 is never." default:"0" placeholder:"DUR" group:"end"`
	Grace        quantity.Duration `help:"At the deadline send SIGTERM to every process first, and SIGKILL after this time." default:"0" placeholder:"DUR" group:"end"`
	ProofTimeout quantity.Duration `help:"How long to wait for the proof that nothing is left." default:"5s" placeholder:"DUR" group:"end"`

	RoBind    []string      `help:"Show a host path read-only." placeholder:"SRC[:DST]" sep:"none" group:"see"`
	Bind      []string      `help:"Show a host path, writable." placeholder:"SRC[:DST]" sep:"none" group:"see"`
	RoBindTry []string      `help:"As --ro-bind, if the path exists." placeholder:"SRC[:DST]" sep:"none" group:"see"`
	BindTry   []string      `help:"As --bind, if the path exists." placeholder:"SRC[:DST]" sep:"none" group:"see"`
	Tmpfs     []string      `help:"An empty directory in memory." placeholder:"DST[:SIZE]" sep:"none" group:"see"`
	TmpSize   quantity.Size `help:"How much fits into /tmp, and into every other directory in memory." default:"256M" placeholder:"SIZE" group:"see"`
	Workdir   string        `help:"Working directory in the sandbox. Default: the current one, shown read-only." placeholder:"DIR" group:"see"`
	Net       string        `help:"Network: none, or the host's." default:"none" placeholder:"none|host" group:"see"`

	Env        []string `help:"Set a variable, or pass one through." placeholder:"NAME[=VALUE]" sep:"none" group:"be"`
	EnvFile    []string `help:"Set the variables in a file of NAME=VALUE lines." placeholder:"FILE" sep:"none" group:"be"`
	InheritEnv bool     `help:"Pass the whole environment through, but for PATH, HOME and USER." group:"be"`
	User       string   `help:"User and group id in the sandbox." placeholder:"UID[:GID]" group:"be"`
	Hostname   string   `help:"Host name in the sandbox." default:"sandbox" placeholder:"NAME" group:"be"`
	Tty        bool     `help:"Run on a terminal of its own." short:"t" group:"be"`

	Report       string        `help:"Write the JSON report to a file or an open descriptor." placeholder:"PATH|fd:N" group:"tell"`
	JSON         bool          `help:"Capture stdout and stderr, and print the report with them." group:"tell"`
	MaxOutput    quantity.Size `help:"With --json: how much of each stream is kept, head and tail." default:"1M" placeholder:"SIZE" group:"tell"`
	PrintCommand bool          `help:"Print the bwrap command, and run nothing." group:"tell"`
	Quiet        bool          `help:"Do not say on stderr why the command was ended." short:"q" group:"tell"`
	Version      bool          `help:"Print the version." group:"tell"`
	Help         bool          `help:"Print this." short:"h" group:"tell"`
}

// Doctor is the flags of sbxrun doctor.
type Doctor struct {
	JSON bool `help:"Print the findings as JSON."`
	Help bool `help:"Print this." short:"h"`
}

// groups are the topics of the flags, in the order of --help and the man page.
var groups = []kong.Group{
	{Key: "end", Title: "How it ends:"},
	{Key: "see", Title: "What it sees:"},
	{Key: "be", Title: "What it is:"},
	{Key: "tell", Title: "What sbxrun tells:"},
}

// New is a kong parser for [CLI], or for the flags of one command.
func New(flags any, options ...kong.Option) (*kong.Kong, error) {
	return kong.New(flags, append([]kong.Option{
		kong.Name("sbxrun"),
		kong.Description("Run a command in a sandbox, and leave nothing behind."),
		kong.NoDefaultHelp(),
		kong.ExplicitGroups(groups),
	}, options...)...)
}
