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
// and for some flags of other programs, marked with ?, what to write instead. The section "# *" applies to every
// command without a line for the flag.
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

// groups are the topics of the flags, in the order of the structs.
var groups = []kong.Group{
	{Key: "end", Title: "Deadline and end:"},
	{Key: "see", Title: "Files and network:"},
	{Key: "be", Title: "Identity and environment:"},
	{Key: "use", Title: "Limits:"},
	{Key: "ready", Title: "Readiness:"},
	{Key: "busy", Title: "On a busy machine:"},
	{Key: "tell", Title: "Output:"},
}

// Model returns kong's model of the whole command line, with its texts: for help, man pages, completions and the flag reference. The usage and the
// example of a command are in Tag.Vars.
func Model() *kong.Kong {
	k, err := kong.New(new(CLI), append(options(), kong.Name("sbxrun"), kong.ExplicitGroups(groups),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true, WrapUpperBound: 80}))...)
	if err != nil {
		panic(fmt.Sprintf("cli: %v", err)) // TestModel
	}
	lines := texts()
	for _, n := range append(nodes(k.Model.Node), k.Model.Node) {
		path := cmp.Or(n.Path(), "sbxrun")
		n.Help = lines[path+" help:"].help
		n.Tag.Vars = kong.Vars{"usage": lines[path+" usage:"].help, "example": lines[path+" example:"].help}
		for _, f := range n.Flags {
			line := cmp.Or(lines[path+" --"+f.Name], lines["* --"+f.Name])
			f.PlaceHolder, f.Help = cmp.Or(line.placeholder, strings.Join(Choices(f.Tag), "|")), line.help
			f.Tag.Sep = -1 // no list in one word
		}
	}
	return k
}

// Commands returns the model of each command in the order of [CLI], including the commands of snapshot and volume.
func Commands() []*kong.Node {
	return slices.DeleteFunc(nodes(Model().Model.Node), func(n *kong.Node) bool { return len(n.Children) > 0 })
}

func nodes(n *kong.Node) (all []*kong.Node) {
	for _, c := range n.Children {
		all = append(append(all, c), nodes(c)...)
	}
	return all
}

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

// IsCommand reports whether the words name a command, such as "snapshot", "ls".
func IsCommand(names ...string) bool { return find(Model().Model.Node, names) != nil }

// Similar returns a question that suggests commands with a similar name, based on kong's, or "".
func Similar(word string) string {
	k := Model()
	k.Model.DefaultCmd = nil
	_, err := k.Parse([]string{word})
	if err == nil {
		return ""
	}
	_, question, _ := strings.Cut(err.Error(), ", did you mean ")
	question = strings.NewReplacer(`"`, "", "one of ", "").Replace(question)
	if question != "" {
		question = "did you mean sbxrun " + strings.ReplaceAll(question, ", ", " or ")
	}
	return question
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

// HelpOf returns the help of a command, such as "snapshot ls", or of sbxrun without a name.
func HelpOf(name string) output.Result {
	return output.Result{Text: func(w io.Writer) error { return Help(w, strings.Fields(name)...) }}
}

// Help writes the help of a command, or of sbxrun without names.
func Help(w io.Writer, names ...string) error {
	k := Model()
	n := find(k.Model.Node, names)
	if n == nil {
		return fmt.Errorf("no command %q", strings.Join(names, " "))
	}
	usage := strings.Join(append(append([]string{"Usage: sbxrun"}, names...), n.Tag.Vars["usage"]), " ")
	n.Detail = "Example: " + n.Tag.Vars["example"]
	for _, f := range n.Flags {
		if f.Default != "" && f.Default != "0" && !strings.Contains(f.Help, "efault") {
			f.Help = strings.TrimSuffix(f.Help, ".") + " (default " + f.Default + ")."
		}
	}
	n.Positional = nil // the usage has them
	var b strings.Builder
	k.Stdout = &b
	if err := kong.Help(kong.DefaultHelpPrinter).Apply(k); err != nil {
		return err
	}
	_, _ = k.Parse(append(names, "--help")) // prints into b
	_, rest, _ := strings.Cut(b.String(), "\n")
	_, err := io.WriteString(w, usage+"\n"+rest)
	return err
}
