package cli

import (
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"maps"
	"reflect"
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
	for _, n := range nodes(k) {
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
		slices.SortStableFunc(n.Flags, func(a, b *kong.Flag) int { return cmp.Compare(topic(a), topic(b)) })
	}
	return k
}

// topic returns the place of a flag's topic in help.txt, which is the order in the help.
func topic(f *kong.Flag) int {
	if f.Group == nil {
		return 0
	}
	return strings.Index(helpText, "\n"+f.Group.Key+" "+f.Group.Title)
}

// nodes returns the models of all commands, of groups of commands, and of sbxrun without a command.
func nodes(k *kong.Kong) []*kong.Node {
	return slices.Concat(k.Model.Leaves(false), k.Model.Children, []*kong.Node{k.Model.Node})
}

// find returns the model of a command, or of a group, with this name, such as "run" or "snapshot ls". It returns nil if
// there is none, and sbxrun itself for "".
func find(k *kong.Kong, name string) *kong.Node {
	for _, n := range nodes(k) {
		if n.Path() == name {
			return n
		}
	}
	return nil
}

// structs returns the types of the structs of all commands and groups below a group, by name.
func structs(group reflect.Type, name string) map[string]reflect.Type {
	all := map[string]reflect.Type{name: group}
	for f := range group.Fields() {
		if strings.HasPrefix(string(f.Tag), "cmd:") {
			maps.Copy(all, structs(f.Type, strings.TrimSpace(name+" "+strings.ToLower(f.Name))))
		}
	}
	return all
}

// Name returns the name of the command that flags is a pointer to the struct of. It is "" for [CLI].
func Name(flags any) string {
	for name, t := range structs(reflect.TypeFor[CLI](), "") {
		if t == reflect.TypeOf(flags).Elem() {
			return name
		}
	}
	panic(fmt.Sprintf("cli: %T is not in CLI", flags))
}

// Flags returns an empty struct of the command, or the group of commands, that args begin with, and the rest of args.
func Flags(args []string) (flags any, rest []string) {
	all, n := structs(reflect.TypeFor[CLI](), ""), min(2, len(args))
	for all[strings.Join(args[:n], " ")] == nil {
		n--
	}
	return reflect.New(all[strings.Join(args[:n], " ")]).Interface(), args[n:]
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
	if find(Model(), word) != nil {
		return "sbxrun's own command must be the first word: sbxrun " + word
	}
	return instead("sbxrun", word, "")
}

// Similar returns a question that suggests commands with a similar name, based on kong's, or "".
func Similar(word string) string {
	k := Model()
	k.Model.DefaultCmd = nil
	ctx, _ := kong.Trace(k, []string{word}) // its error is in ctx
	_, names, found := strings.Cut(fmt.Sprint(ctx.Error), ", did you mean ")
	if !found {
		return ""
	}
	return "did you mean sbxrun " + strings.NewReplacer(`"`, "", "one of ", "", ", ", " or ").Replace(names)
}

// Help returns the help of a command or a group, such as "snapshot ls", or of sbxrun for "".
func Help(name string) output.Result {
	return output.Result{Text: func(w io.Writer) error {
		k := Model()
		n := find(k, name)
		if n == nil {
			return UsageError(new(Run), fmt.Errorf("no command %q", name))
		}
		fmt.Fprintln(w, strings.Join(strings.Fields("Usage: sbxrun "+name+" "+n.Tag.Vars["usage"]), " "))
		n.Detail = "Example: " + n.Tag.Vars["example"]
		n.Positional, k.Model.DefaultCmd, k.Stdout = nil, nil, w // the usage has the arguments
		ctx, err := kong.Trace(k, strings.Fields(name))
		if err != nil {
			return err
		}
		return ctx.PrintUsage(false)
	}}
}
