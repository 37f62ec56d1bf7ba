package cli

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/output"
)

// help.txt contains the usage, an example and a sentence for each command, a placeholder and a text for each flag,
// for some words of other programs, marked with ?, what to write instead, and the topics of flags. The section "# *"
// applies to every command without a line for the flag.
//
//go:embed help.txt
var helpText string

// text is a line of help.txt.
type text struct{ placeholder, help string }

// texts returns the lines of help.txt by command and word, such as "run --timeout".
func texts() map[string]text {
	all := map[string]text{}
	for _, section := range strings.Split(helpText, "\n# ")[1:] {
		name, lines, _ := strings.Cut(section, "\n")
		for line := range strings.Lines(lines) {
			word, help, _ := strings.Cut(strings.TrimSpace(line), " ")
			flag, placeholder, _ := strings.Cut(word, "=")
			all[name+" "+flag] = text{placeholder, help}
		}
	}
	return all
}

// Model returns kong's model of the whole command line, with its texts: for help, man pages, completions and the flag
// reference. The usage and the example of a command are in Tag.Vars.
func Model() *kong.Kong {
	k, err := kong.New(new(CLI), kong.Name("sbxrun"), kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoAppSummary: true, NoExpandSubcommands: true, WrapUpperBound: 80}))
	if err != nil {
		panic(fmt.Sprintf("cli: %v", err)) // TestModel
	}
	lines := texts()
	for _, n := range slices.Concat(k.Model.Leaves(false), k.Model.Children, []*kong.Node{k.Model.Node}) {
		path := cmp.Or(n.Path(), "sbxrun")
		n.Help = lines[path+" help:"].help
		n.Tag.Vars = kong.Vars{"usage": lines[path+" usage:"].help, "example": lines[path+" example:"].help}
		for _, f := range n.Flags {
			line := cmp.Or(lines[path+" --"+f.Name], lines["* --"+f.Name])
			f.PlaceHolder, f.Help = cmp.Or(line.placeholder, strings.Join(Choices(f.Tag), "|")), line.help
			f.Tag.Sep = -1 // no list in one word
			if f.Group != nil {
				f.Group.Title = lines["topics "+f.Group.Key].help
			}
			if f.Default != "" && !strings.Contains(f.Help, "efault") {
				f.Help = strings.TrimSuffix(f.Help, ".") + " (default " + f.Default + ")."
			}
		}
	}
	return k
}

// Commands returns the model of each command in the order of [CLI], including the commands of snapshot and volume.
func Commands() []*kong.Node { return Model().Model.Leaves(false) }

// Spellings returns all ways to type a flag: --grace, --kill-after, -k.
func Spellings(f *kong.Flag) []string {
	all := []string{"--" + f.Name}
	for _, alias := range f.Aliases {
		all = append(all, "--"+alias)
	}
	if f.Short != 0 {
		all = append(all, "-"+string(f.Short))
	}
	return all
}

// flagOf returns the flag of a command with this spelling, or nil.
func flagOf(n *kong.Node, word string) *kong.Flag {
	for _, f := range n.Flags {
		if slices.Contains(Spellings(f), word) {
			return f
		}
	}
	return nil
}

// Instead returns a hint for a word that is not a program: a command of sbxrun, docker or a shell. It returns "" for
// other words.
func Instead(word string) string {
	if find(Model().Model.Node, []string{word}) != nil {
		return "sbxrun's own command must be the first word: sbxrun " + word
	}
	return instead("sbxrun", word, "")
}

// Similar returns a question that suggests commands with a similar name, based on kong's, or "".
func Similar(word string) string {
	k := Model()
	k.Model.DefaultCmd = nil
	ctx, err := kong.Trace(k, []string{word})
	if err != nil || ctx.Error == nil {
		return ""
	}
	_, names, found := strings.Cut(ctx.Error.Error(), ", did you mean ")
	if !found {
		return ""
	}
	return "did you mean sbxrun " + strings.NewReplacer(`"`, "", "one of ", "", ", ", " or ").Replace(names)
}

// find returns the command below n that names name, or nil.
func find(n *kong.Node, names []string) *kong.Node {
	for _, name := range names {
		i := slices.IndexFunc(n.Children, func(c *kong.Node) bool { return c.Name == name })
		if i < 0 {
			return nil
		}
		n = n.Children[i]
	}
	return n
}

// Help returns the help of a command, such as "snapshot", "ls", or of sbxrun without names.
func Help(names ...string) output.Result {
	return output.Result{Text: func(w io.Writer) error {
		k := Model()
		n := find(k.Model.Node, names)
		if n == nil {
			return UsageError(new(Run), fmt.Errorf("no command %q", strings.Join(names, " ")))
		}
		fmt.Fprintln(w, strings.Join(slices.Concat([]string{"Usage: sbxrun"}, names, []string{n.Tag.Vars["usage"]}), " "))
		n.Detail = "Example: " + n.Tag.Vars["example"]
		n.Positional, k.Model.DefaultCmd, k.Stdout = nil, nil, w // the usage has the arguments
		ctx, err := kong.Trace(k, names)
		if err != nil {
			return err
		}
		return ctx.PrintUsage(false)
	}}
}
