package main

import (
	"errors"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/quantity"
)

// cli is the whole command line: what --help, the man page and the completions
// are made from. A command is parsed with its own struct alone, which is
// quicker, and leaves no doubt about what belongs to the payload.
type cli struct {
	Run    runFlags    `cmd:"" default:"withargs" help:"Run a command in a new sandbox, and leave nothing behind (the default command)."`
	Doctor doctorFlags `cmd:"" help:"Try what a run needs on this machine, and tell what is missing."`
}

type runFlags struct {
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

type doctorFlags struct {
	JSON bool `help:"Print the findings as JSON."`
	Help bool `help:"Print this." short:"h"`
}

var groups = []kong.Group{
	{Key: "end", Title: "How it ends:"},
	{Key: "see", Title: "What it sees:"},
	{Key: "be", Title: "What it is:"},
	{Key: "tell", Title: "What sbxrun tells:"},
}

// parser is a kong parser for one command's flags.
func parser(flags any) (*kong.Kong, error) {
	return kong.New(flags, kong.Name("sbxrun"), kong.NoDefaultHelp(), kong.ExplicitGroups(groups))
}

// split divides the words after the command's name into sbxrun's flags and the
// payload's words. The payload begins at the first word that is neither a flag
// nor a flag's value, or after --, and is taken verbatim.
func split(model *kong.Application, args []string) (flags, payload []string) {
	for i := 0; i < len(args); i++ {
		word := args[i]
		switch {
		case word == "--":
			return args[:i], args[i+1:]
		case word == "-" || !strings.HasPrefix(word, "-"):
			return args[:i], args[i:]
		case takesValue(model, word):
			i++
		}
	}
	return args, nil
}

// takesValue says whether the next word belongs to this flag. Of a flag that
// does not exist nothing is known; kong will complain about it.
func takesValue(model *kong.Application, word string) bool {
	name, long := strings.CutPrefix(word, "--")
	if strings.Contains(name, "=") {
		return false
	}
	for _, flag := range model.Flags {
		if long && flag.Name == name {
			return !flag.IsBool()
		}
		// The last of -qt decides; -uVALUE would not end in a flag's letter.
		if !long && strings.HasSuffix(word, string(flag.Short)) && flag.Short != 0 {
			return !flag.IsBool()
		}
	}
	return false
}

// parse fills flags from args and returns the payload's words.
func parse[F any](flags *F, args []string) (payload []string, err error) {
	if payload, ok := quickParse(flags, args); ok {
		return payload, nil
	}
	*flags = *new(F) // what the quick way may have left
	k, err := parser(flags)
	if err != nil {
		return nil, err
	}
	words, payload := split(k.Model, args)
	if _, err := k.Parse(words); err != nil {
		return nil, usageError(unwrapParse(err))
	}
	return payload, nil
}

// unwrapParse takes the text of a kong error without its wrapping.
func unwrapParse(err error) error {
	var p *kong.ParseError
	if errors.As(err, &p) {
		return p.Unwrap()
	}
	return err
}

// help prints the help of the whole command line, or of one command.
func help(args ...string) int {
	k, err := kong.New(&cli{}, kong.Name("sbxrun"), kong.NoDefaultHelp(), kong.ExplicitGroups(groups),
		kong.Description("Run a command in a sandbox, and leave nothing behind."),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}))
	if err != nil {
		return fail(err)
	}
	ctx, err := kong.Trace(k, args)
	if err != nil {
		return fail(err)
	}
	if err := kong.DefaultHelpPrinter(kong.HelpOptions{Compact: true, WrapUpperBound: 100, NoExpandSubcommands: true}, ctx); err != nil {
		return fail(err)
	}
	return 0
}
