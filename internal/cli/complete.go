package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// CompleteWord is the command that prints the result of [Complete].
const CompleteWord = "__complete"

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
	k := Model()
	n, begin, current := k.Model.Node, 0, words[last]
	for begin < last && find(n, words[begin:begin+1]) != nil {
		n, begin = find(n, words[begin:begin+1]), begin+1
	}
	switch {
	case last == 0 && !isFlag(current):
		return append(describe("command 0", n.Children), "help\tPrint the help of a command, or of all.", "version\tPrint the version.")
	case last == 1 && words[0] == "help":
		return describe("words", n.Children)
	case last > 0 && (words[0] == "help" || words[0] == "version"):
		return nil
	case begin == 0:
		n = n.DefaultCmd
	case len(n.Children) > 0 && begin == last:
		return describe("words", n.Children)
	case len(n.Children) > 0:
		return nil
	}
	ctx, err := kong.Trace(k, slices.Concat(strings.Fields(n.Path()), words[begin:last]))
	if err != nil || ctx.Error != nil { // probably for want of a value
		return valuesOf(flagOf(n, words[last-1]))
	}
	var next *kong.Positional
	if i := slices.IndexFunc(n.Positional, func(p *kong.Positional) bool { return !p.Set || p.IsCumulative() }); i >= 0 {
		next = n.Positional[i]
	}
	flag, _, hasValue := strings.Cut(current, "=")
	switch dashes := slices.Contains(words[begin:last], "--"); {
	case next != nil && next.Passthrough && next.Set:
		line := ctx.Value(ctx.Path[len(ctx.Path)-1]).Interface().([]string)
		if line[0] == "--" {
			line = line[1:]
		}
		return []string{fmt.Sprintf("command %d", last-len(line))}
	case !dashes && hasValue && flagOf(n, flag) != nil:
		return valuesOf(flagOf(n, flag))
	case !dashes && strings.HasPrefix(current, "-"):
		lines := []string{"words"}
		for _, f := range n.Flags {
			for _, word := range Spellings(f) {
				lines = append(lines, word+"\t"+f.Help)
			}
		}
		return lines
	case next == nil:
		return nil
	case next.Passthrough:
		return []string{fmt.Sprintf("command %d", last)}
	}
	action := map[string]string{"paths": "paths", "running": "sandboxes", "all": "sandboxes --all"}
	what, execs := strings.CutSuffix(next.Tag.Get("complete"), " execs")
	if sandbox, _, ok := strings.Cut(current, "/"); ok && sandbox != "" && execs {
		return []string{action[what] + " " + sandbox}
	}
	return []string{action[what]}
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
	if choices := Choices(f.Tag); choices != nil {
		return append([]string{"words"}, slices.DeleteFunc(choices, func(c string) bool { return strings.HasSuffix(c, "=") })...)
	}
	for placeholder, action := range map[string]string{
		"SIGNAL": "words TERM INT HUP QUIT USR1 USR2 KILL", // the shells' own lists have dozens and spell them differently
		"DIR":    "directories", "DST": "directories", "FILE": "files", "PATH": "files", "SRC": "files", "[SRC": "files", "NAME[=": "variables",
	} {
		if strings.HasPrefix(f.PlaceHolder, placeholder) {
			return strings.Fields(action)
		}
	}
	return nil
}
