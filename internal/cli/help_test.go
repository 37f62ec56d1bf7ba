package cli

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/tests/check"
)

// commands returns the commands and groups of commands.
func commands() []*kong.Node {
	groups := slices.DeleteFunc(Model().Model.Children, func(n *kong.Node) bool { return n.Leaf() })
	return append(Commands(), groups...)
}

func help(t *testing.T, name string) string {
	t.Helper()
	var text strings.Builder
	err := Help(name).Text(&text)
	check.Require(t, err == nil, "help of %q: %v", name, err)
	return text.String()
}

// TestModel checks that each command and flag has its texts, that no text is left over, and that no two
// flags of a command are typed alike.
func TestModel(t *testing.T) {
	used := map[string]bool{"sbxrun --help": true}
	for _, c := range commands() {
		check.That(t, c.Help != "" && c.Tag.Vars["usage"] != "" && c.Detail != "Example: ", "%s: help %q, %q, %q", c.Path(), c.Help, c.Tag.Vars, c.Detail)
		flags := c.Target.Addr().Interface()
		check.That(t, !c.Leaf() || Name(flags) == c.Path(), "%T is the struct of %s, want that of %s", flags, c.Path(), Name(flags))
		var typed []string
		for _, f := range c.Flags {
			typed = append(typed, Spellings(f)...)
			used[c.Path()+" --"+f.Name], used["* --"+f.Name] = true, true
			check.That(t, f.Help != "" && f.IsBool() == (f.PlaceHolder == "") && !regexp.MustCompile("^[A-Z][a-z]").MatchString(f.PlaceHolder),
				"%s --%s: help %q, placeholder %q", c.Path(), f.Name, f.Help, f.PlaceHolder)
			check.That(t, f.Group == nil || f.Group.Title != "", "%s --%s: no topic %v", c.Path(), f.Name, f.Group)
		}
		slices.Sort(typed)
		twice := slices.Compact(slices.Clone(typed))
		check.That(t, len(twice) == len(typed), "%s has flags twice: %q", c.Path(), typed)
	}
	section := ""
	for line := range strings.Lines(helpText) {
		if name, ok := strings.CutPrefix(line, "# "); ok {
			section = strings.TrimSpace(name)
		}
		flag := regexp.MustCompile(`^--[a-z-]+`).FindString(line)
		check.That(t, flag == "" || used[section+" "+flag], "help.txt: %s has no flag %s", section, flag)
	}
}

// TestHelp checks that the help of a command has its usage, an example, a sentence and its flags, that the help of sbxrun lists all
// commands on one screen, and that lines fit a terminal.
func TestHelp(t *testing.T) {
	all := help(t, "")
	for _, want := range []string{"Usage: sbxrun [run] [flags] [--] COMMAND [ARG...]\n", "\n\nExample: sbxrun --timeout 5 "} {
		check.That(t, strings.Contains(all, want), "no %q in the help:\n%s", want, all)
	}
	n := strings.Count(all, "\n")
	check.That(t, n <= 40, "the help has %d lines, want one screen", n)
	for _, want := range []string{"  -k, --grace=DUR ", "(default 256M)", "Default:", "\n  -t, --tty ", "\n      --env=NAME[=VALUE] ", "--on-pressure=refuse|wait|ignore"} {
		text := help(t, "run")
		check.That(t, strings.Contains(text, want), "no %q in the help of run:\n%s", want, text)
	}
	for _, c := range commands() {
		text := help(t, c.Path())
		for _, line := range strings.Split(text, "\n") {
			check.That(t, len(line) <= 80 || strings.HasPrefix(line, "Usage:") || strings.HasPrefix(line, "Example:"), "longer than a terminal's line: %s", line)
		}
		check.That(t, c.Parent.Parent != nil || strings.Contains(all, "\n  "+c.Name+" "), "%s is not in the list of commands:\n%s", c.Name, all)
		want := "Usage: sbxrun " + c.Path() + " " + c.Tag.Vars["usage"] + "\n"
		check.That(t, strings.HasPrefix(text, want), "help of %s does not begin with %q:\n%s", c.Path(), want, text)
		for _, f := range c.Flags {
			check.That(t, regexp.MustCompile(`[ ]--`+f.Name+`[ =\n]`).MatchString(text), "help of %s: no --%s", c.Path(), f.Name)
		}
	}
	err := Help("nosuch").Text(new(strings.Builder))
	check.That(t, err != nil, "there is help of nosuch")
}

// TestHelpOrder checks that the groups of flags come in one order in every command.
func TestHelpOrder(t *testing.T) {
	for _, name := range []string{"run", "start", "exec"} {
		text, at := help(t, name), 0
		for _, topic := range []string{"end", "see", "be", "use", "ready", "busy", "tell"} {
			title := texts()["topics "+topic]
			i := strings.Index(text, "\n"+title+"\n")
			check.That(t, i < 0 || i >= at, "%s: %q is out of order:\n%s", name, title, text)
			at = max(i, at)
		}
	}
}

// TestExamples parses the examples of the help.
func TestExamples(t *testing.T) {
	for _, c := range commands() {
		args := strings.Fields(c.Detail)[2:]
		if c.Name == "run" {
			args = slices.Insert(args, 0, "run")
		}
		flags, rest := empty(args)
		err := Parse(flags, rest)
		check.That(t, err == nil && (Name(flags) == c.Path() || len(c.Children) != 0), "%q: command %q, %v", args, Name(flags), err)
	}
}

func TestSimilar(t *testing.T) {
	for word, want := range map[string]string{"rnu": "did you mean sbxrun run?", "snapshots": "did you mean sbxrun snapshot?", "strat": "did you mean sbxrun start or stats?", "python3": ""} {
		_, got := Instead(word)
		check.That(t, got == want, "%s: %q, want %q", word, got, want)
	}
}
