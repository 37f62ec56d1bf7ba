package cli

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Complete describes the completion of the last of the words after sbxrun, for the completion functions of shells, one
// item per line. The first line is the action:
//
//	words                         propose the words on the other lines, each with a description after a tab
//	files, directories, variables propose these, as the value of a flag
//	sandboxes [ARG...]            propose the names that sbxrun ps --names prints with these arguments
//	paths                         propose files, and names of sandboxes with a colon
//	command N                     complete the command line that begins with word N, and propose the words
func Complete(words []string) []string {
	last := len(words) - 1
	if last < 0 {
		return nil
	}
	k, given, current := Model(), words[:last], words[last]
	switch names := k.Model.Children; {
	case last == 0 && !isFlag(current):
		return append(describe("command 0", names), "help\tPrint the help of a command, or of all.", "version\tPrint the version.")
	case words[0] == "help" && last == 1:
		return describe("words", names)
	case words[0] == "help" || words[0] == "version":
		return nil
	case !slices.ContainsFunc(names, func(n *kong.Node) bool { return n.Name == words[0] }):
		given = append([]string{"run"}, given...)
	}
	ctx, _ := kong.Trace(k, given) // its error is in ctx
	n := ctx.Selected()
	if _, err := ctx.Apply(); err != nil || ctx.Error != nil { // a value is probably missing
		return valuesOf(flagOf(n.Flags, words[last-1]))
	}
	if len(n.Children) > 0 {
		return describe("words", n.Children)
	}
	i := slices.IndexFunc(n.Positional, func(p *kong.Positional) bool { return !p.Set || p.IsCumulative() })
	flag, _, hasValue := strings.Cut(current, "=")
	switch dashes := slices.Contains(given, "--"); {
	case i >= 0 && n.Positional[i].Passthrough && (n.Positional[i].Set || dashes || !strings.HasPrefix(current, "-")):
		return []string{fmt.Sprintf("command %d", last-n.Positional[i].Target.Len())}
	case !dashes && hasValue && flagOf(n.Flags, flag) != nil:
		return valuesOf(flagOf(n.Flags, flag))
	case !dashes && strings.HasPrefix(current, "-"):
		lines := []string{"words"}
		for _, f := range n.Flags {
			for _, word := range Spellings(f) {
				lines = append(lines, word+"\t"+f.Help)
			}
		}
		return lines
	case i < 0:
		return nil
	}
	action, execs := strings.CutSuffix(n.Positional[i].Tag.Get("complete"), " execs")
	if sandbox, _, ok := strings.Cut(current, "/"); ok && sandbox != "" && execs {
		action += " " + sandbox
	}
	return []string{action}
}

// describe returns an action and the names and helps of commands.
func describe(action string, nodes []*kong.Node) []string {
	lines := []string{action}
	for _, n := range nodes {
		lines = append(lines, n.Name+"\t"+n.Help)
	}
	return lines
}

// valuesOf describes the completion of a flag's value. It returns nil for no flag.
func valuesOf(f *kong.Flag) []string {
	if f == nil || f.IsBool() {
		return nil
	}
	if choices := f.Tag.Get("choices"); choices != "" {
		return slices.DeleteFunc(strings.Split("words|"+choices, "|"), func(c string) bool { return strings.Contains(c, "=") })
	}
	what := regexp.MustCompile(`^\[?[A-Z]*(\[=)?`).FindString(f.PlaceHolder)
	return strings.Fields(map[string]string{
		"SIGNAL": "words TERM INT HUP QUIT USR1 USR2 KILL", // the shells' own lists have dozens and spell them differently
		"DIR":    "directories", "DST": "directories", "FILE": "files", "PATH": "files", "SRC": "files", "[SRC": "files", "NAME[=": "variables",
	}[what])
}
