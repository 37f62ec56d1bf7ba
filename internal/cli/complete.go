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
	current := words[last]
	root := Model().Model.Node
	n, i := find(root, []string{"run"}), 0
	others := []string{"help\tPrint the help of a command, or of all.", "version\tPrint the version."}
	if last == 0 && !isFlag(current) {
		return slices.Concat([]string{"command 0"}, describe(root.Children), others)
	}
	if last > 0 {
		switch child := find(root, words[:1]); {
		case words[0] == "help" && last == 1:
			return append([]string{"words"}, describe(root.Children)...)
		case words[0] == "help" || words[0] == "version":
			return nil
		case child == nil:
		case len(child.Children) == 0:
			n, i = child, 1
		case last == 1:
			return append([]string{"words"}, describe(child.Children)...)
		default:
			if n, i = find(root, words[:2]), 2; n == nil {
				return nil
			}
		}
	}
	var takes string // sandboxes, execs or paths; see [CLI]
	payload, names, many := false, 0, false
	for _, p := range n.Positional {
		if what := p.Tag.Get("complete"); what != "" {
			takes, many = what, p.IsCumulative()
		}
		payload = p.Passthrough
	}
	before := 0 // names before the payload
	if takes != "" {
		before = 1
	}
	dashes := false
	for ; i < last; i++ {
		word := words[i]
		switch f := flagOf(n, word); {
		case payload && before > 0 && names == before:
			if word == "--" {
				i++
			}
			return []string{fmt.Sprintf("command %d", i)}
		case dashes || !isFlag(word):
			if payload && before == 0 {
				return []string{fmt.Sprintf("command %d", i)}
			}
			names++
		case word == "--":
			dashes = true
			if payload && before == 0 {
				return []string{fmt.Sprintf("command %d", i+1)}
			}
		case f != nil && !f.IsBool():
			if i++; i == last {
				return valuesOf(f)
			}
		}
	}
	flag, _, hasValue := strings.Cut(current, "=")
	switch f := flagOf(n, flag); {
	case payload && before > 0 && names == before:
		if isFlag(current) {
			return []string{"words", "--"}
		}
		return []string{fmt.Sprintf("command %d", last)}
	case !dashes && hasValue && f != nil:
		return valuesOf(f)
	case !dashes && strings.HasPrefix(current, "-"):
		lines := []string{"words"}
		for _, f := range n.Flags {
			for _, word := range Spellings(f) {
				lines = append(lines, word+"\t"+f.Help)
			}
		}
		return lines
	case takes == "paths":
		return []string{"paths"}
	case takes != "" && (many || names == 0):
		action := "sandboxes"
		if strings.HasPrefix(takes, "all") {
			action += " --all"
		}
		if box, _, ok := strings.Cut(current, "/"); ok && box != "" && strings.HasSuffix(takes, "execs") {
			action += " " + box
		}
		return []string{action}
	case !payload || takes != "":
		return nil
	}
	return []string{fmt.Sprintf("command %d", last)}
}

func describe(nodes []*kong.Node) (lines []string) {
	for _, n := range nodes {
		lines = append(lines, n.Name+"\t"+n.Help)
	}
	return lines
}

// flagOf returns the flag of a command with this spelling, or nil.
func flagOf(n *kong.Node, word string) *kong.Flag {
	i := slices.IndexFunc(n.Flags, func(f *kong.Flag) bool { return slices.Contains(Spellings(f), word) })
	if i < 0 {
		return nil
	}
	return n.Flags[i]
}

// valuesOf describes the completion of a flag's value.
func valuesOf(f *kong.Flag) []string {
	// The shells' own lists of signals have dozens of them and spell them differently.
	words := []string{"TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL"}
	if choices := Choices(f.Tag); choices != nil {
		words = slices.DeleteFunc(choices, func(c string) bool { return strings.HasSuffix(c, "=") })
	}
	begins := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.HasPrefix(f.PlaceHolder, w) })
	}
	switch {
	case begins("SIGNAL") || Choices(f.Tag) != nil:
		return append([]string{"words"}, words...)
	case begins("DIR", "DST"):
		return []string{"directories"}
	case begins("FILE", "PATH", "SRC", "[SRC"):
		return []string{"files"}
	case begins("NAME[="):
		return []string{"variables"}
	}
	return nil
}
