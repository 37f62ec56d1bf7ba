package main

import (
	"bytes"
	"embed"
	"fmt"
	"strings"
	"text/template"
)

//go:embed templates
var templates embed.FS

// shells are the files to be installed, under the names the shells look for, and
// what they are made from.
var shells = map[string]string{
	"sbxrun.bash": "bash.tmpl",
	"_sbxrun":     "zsh.tmpl",
	"sbxrun.fish": "fish.tmpl",
}

// completion makes the completion for one shell.
func completion(line commandLine, name string) ([]byte, error) {
	t, err := template.New(name).Funcs(template.FuncMap{
		"words":     words,
		"patterns":  patterns,
		"spellings": spellings,
		"join":      strings.Join,
		"quote":     quote,
		"zsh":       zshSpec,
	}).ParseFS(templates, "templates/"+name)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, line); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// words are all spellings of all flags of a command.
func words(c command) string {
	var all []string
	for _, o := range c.Flags {
		all = append(all, o.Words()...)
	}
	return strings.Join(all, " ")
}

// patterns are the flags of all commands whose value is of a kind, as the case of
// bash takes them, each after its command: exec:--workdir|start:--workdir. For
// the kind "any" they are all that take a value.
func patterns(line commandLine, of kind) string {
	var all []string
	for _, c := range line.Commands {
		for _, word := range spellings(c, of) {
			all = append(all, c.Name+":"+word)
		}
	}
	return strings.Join(all, "|")
}

func spellings(c command, of kind) []string {
	var all []string
	for _, o := range c.Flags {
		if o.TakesValue() && (of == "any" || o.Values.Kind == of) {
			all = append(all, o.Words()...)
		}
	}
	return all
}

// quote makes one word of a text, the same way for bash, zsh and fish. Only for
// fish a backslash is special within single quotes, so there must be none.
func quote(text string) (string, error) {
	if strings.Contains(text, `\`) {
		return "", fmt.Errorf("%q: a backslash means something else to each shell", text)
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'", nil
}

// zshSpec is a flag as _arguments takes it, one per spelling.
func zshSpec(o option) (string, error) {
	escape := strings.NewReplacer("[", `\[`, "]", `\]`, ":", `\:`)
	action := map[kind]string{
		anything: " ",
		file:     "_files",
		dir:      "_files -/",
		variable: "_parameters -g '*export*'",
		oneOf:    "(" + strings.Join(o.Values.List, " ") + ")",
	}
	exclude := "(" + strings.Join(o.Words(), " ") + ")"
	if o.Repeats {
		exclude = "*"
	}
	var specs []string
	for _, word := range o.Words() {
		spec := exclude + word
		if o.TakesValue() {
			spec += map[bool]string{true: "=", false: "+"}[strings.HasPrefix(word, "--")]
		}
		spec += "[" + escape.Replace(o.Help) + "]"
		if o.TakesValue() {
			a, ok := action[o.Values.Kind]
			if !ok {
				return "", fmt.Errorf("no action for %q", o.Values.Kind)
			}
			spec += ":" + escape.Replace(o.Placeholder) + ":" + a
		}
		specs = append(specs, `"`+strings.NewReplacer(`\`, `\\`, `"`, `\"`, "$", `\$`, "`", "\\`").Replace(spec)+`"`)
	}
	return strings.Join(specs, "\n    "), nil
}
