package cli

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/output"
)

// help.txt contains the usage, an example and a sentence for each command; a text for each flag, after a placeholder if it
// takes a value that is not one of its choices; for some words of other programs, marked with ?, what to write instead;
// and the topics of flags. The section "# *" applies to every command without a line for the flag.
//
//go:embed help.txt
var helpText string

// texts returns the lines of help.txt by section and first word, such as "run --timeout".
func texts() map[string]string {
	all := map[string]string{}
	for _, section := range strings.Split(helpText, "\n# ")[1:] {
		name, lines, _ := strings.Cut(section, "\n")
		for line := range strings.Lines(lines) {
			word, text, _ := strings.Cut(strings.TrimSpace(line), " ")
			all[name+" "+word] = text
		}
	}
	return all
}

// Model returns kong's model of the whole command line, with its texts: for help, man pages, completions, the flag
// reference and error messages. The usage of a command is in Tag.Vars.
func Model() *kong.Kong {
	k, lines := build(new(CLI)), texts()
	topics, _, _ := strings.Cut(helpText, "# *")
	topic := func(f *kong.Flag) int { return strings.Index(topics, "\n"+f.Tag.Group+" ") }
	for _, n := range nodes(k) {
		path := cmp.Or(n.Path(), "sbxrun")
		n.Help, n.Detail = lines[path+" help:"], "Example: "+lines[path+" example:"]
		n.Tag.Vars = kong.Vars{"usage": lines[path+" usage:"]}
		for _, f := range n.Flags {
			f.Help, f.PlaceHolder = cmp.Or(lines[path+" --"+f.Name], lines["* --"+f.Name]), f.Tag.Get("choices")
			if f.PlaceHolder == "" && !f.IsBool() {
				f.PlaceHolder, f.Help, _ = strings.Cut(f.Help, " ")
			}
			f.Tag.Sep = -1 // no list in one word
			if f.Group != nil {
				f.Group.Title = lines["topics "+f.Group.Key]
			}
			if f.Default != "" && !strings.Contains(f.Help, "efault") {
				f.Help = strings.TrimSuffix(f.Help, ".") + " (default " + f.Default + ")."
			}
		}
		slices.SortStableFunc(n.Flags, func(a, b *kong.Flag) int { return topic(a) - topic(b) })
	}
	return k
}

// nodes returns the models of all commands, of groups of commands, and of sbxrun without a command.
func nodes(k *kong.Kong) []*kong.Node {
	return slices.Concat(k.Model.Leaves(false), k.Model.Children, []*kong.Node{k.Model.Node})
}

// Commands returns the model of each command in the order of [CLI], including the commands of snapshot and volume.
func Commands() []*kong.Node { return Model().Model.Leaves(false) }

// Name returns the name of the command whose struct flags points to, such as "snapshot ls" for SnapshotLs.
func Name(flags any) string {
	return strings.ToLower(regexp.MustCompile("([a-z])([A-Z])").ReplaceAllString(reflect.TypeOf(flags).Elem().Name(), "$1 $2"))
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

// flagOf returns the flag with this spelling, or nil.
func flagOf(flags []*kong.Flag, word string) *kong.Flag {
	for _, f := range flags {
		if slices.Contains(Spellings(f), word) {
			return f
		}
	}
	return nil
}

// Instead returns hints for a word that is not a program: what to type instead of a command of sbxrun, docker or a shell,
// and kong's question about similar commands. They are "" for other words.
func Instead(word string) (hint, similar string) {
	ctx, _ := kong.Trace(Model(), []string{word}) // its error is in ctx
	if ctx.Selected() != nil {
		return "sbxrun's own command must be the first word: sbxrun " + word, ""
	}
	if _, names, ok := strings.Cut(fmt.Sprint(ctx.Error), ", did you mean "); ok {
		similar = "did you mean sbxrun " + strings.NewReplacer(`"`, "", "one of ", "", ", ", " or ").Replace(names)
	}
	return instead("sbxrun", word), similar
}

// Help returns the help of a command or a group, such as "snapshot ls", or of sbxrun for "".
func Help(name string) output.Result {
	return output.Result{Text: func(w io.Writer) error {
		k := Model()
		k.Stdout = w
		ctx, _ := kong.Trace(k, strings.Fields(name))
		n := cmp.Or(ctx.Selected(), k.Model.Node)
		if n.Path() != name {
			return UsageError(new(Run), fmt.Errorf("no command %q", name))
		}
		n.Positional = nil // the usage has the arguments
		fmt.Fprintln(w, "Usage:", n.FullPath(), n.Tag.Vars["usage"])
		return kong.DefaultHelpPrinter(kong.HelpOptions{
			Compact: true, NoAppSummary: true, NoExpandSubcommands: true, WrapUpperBound: 80, ValueFormatter: kong.DefaultHelpValueFormatter,
		}, ctx)
	}}
}
