package cli

import (
	"fmt"
	"regexp"
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
	k, begin, current := Model(), min(2, last), words[last]
	for find(k, strings.Join(words[:begin], " ")) == nil {
		begin--
	}
	n := find(k, strings.Join(words[:begin], " "))
	switch {
	case last == 0 && !isFlag(current):
		return append(describe("command 0", n.Children), "help\tPrint the help of a command, or of all.", "version\tPrint the version.")
	case last == 1 && words[0] == "help", len(n.Children) > 0 && begin > 0 && begin == last:
		return describe("words", n.Children)
	case last > 0 && (words[0] == "help" || words[0] == "version"), len(n.Children) > 0 && begin > 0:
		return nil
	case begin == 0:
		n = n.DefaultCmd
	}
	ctx, err := kong.Trace(k, slices.Concat(strings.Fields(n.Path()), words[begin:last]))
	if err != nil || ctx.Error != nil { // probably for want of a value
		return valuesOf(flagOf(n, words[last-1]))
	}
	flag, _, hasValue := strings.Cut(current, "=")
	i := slices.IndexFunc(n.Positional, func(p *kong.Positional) bool { return !p.Set || p.IsCumulative() })
	switch dashes := slices.Contains(words[begin:last], "--"); {
	case i >= 0 && n.Positional[i].Passthrough && n.Positional[i].Set:
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
	case i < 0:
		return nil
	case n.Positional[i].Passthrough:
		return []string{fmt.Sprintf("command %d", last)}
	}
	what, execs := strings.CutSuffix(n.Positional[i].Tag.Get("complete"), " execs")
	action := map[string]string{"paths": "paths", "running": "sandboxes", "all": "sandboxes --all"}[what]
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
	switch {
	case f == nil || f.IsBool():
		return nil
	case Choices(f.Tag) != nil:
		return append([]string{"words"}, slices.DeleteFunc(Choices(f.Tag), func(c string) bool { return strings.HasSuffix(c, "=") })...)
	}
	what := regexp.MustCompile(`^\[?[A-Z]*(\[=)?`).FindString(f.PlaceHolder)
	return strings.Fields(map[string]string{
		"SIGNAL": "words TERM INT HUP QUIT USR1 USR2 KILL", // the shells' own lists have dozens and spell them differently
		"DIR":    "directories", "DST": "directories", "FILE": "files", "PATH": "files", "SRC": "files", "[SRC": "files", "NAME[=": "variables",
	}[what])
}
