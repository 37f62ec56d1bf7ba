package main

import (
	"bytes"
	"embed"
	"fmt"
	"strings"
	"text/template"

	"github.com/alecthomas/kong"

	"github.com/sbxrun/sbxrun/internal/cli"
)

//go:embed templates
var templates embed.FS

// shells maps the installed file names to templates.
var shells = map[string]string{
	"sbxrun.bash": "bash.tmpl",
	"_sbxrun":     "zsh.tmpl",
	"sbxrun.fish": "fish.tmpl",
}

// completion returns the completion for one shell.
func completion(name string) ([]byte, error) {
	t, err := template.New(name).Funcs(template.FuncMap{
		"first":      first,
		"others":     func() []word { return others },
		"groups":     groups,
		"words":      cli.Spellings,
		"switch":     (*kong.Flag).IsBool,
		"kind":       kindOf,
		"proposals":  proposals,
		"patterns":   patterns,
		"spellings":  spellings,
		"join":       strings.Join,
		"quote":      quote,
		"zsh":        zshSpec,
		"underscore": func(s string) string { return strings.ReplaceAll(s, "-", "_") },
	}).ParseFS(templates, "templates/"+name)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err = t.Execute(&b, commands())
	return b.Bytes(), err
}

// spellings returns the spellings of a command's flags with values of a kind. The kind "any" stands for all flags with
// values, and "all" includes switches.
func spellings(c command, of kind) (all []string) {
	for _, f := range c.Flags {
		if k := kindOf(f); k == of || of == "any" && k != "" || of == "all" {
			all = append(all, cli.Spellings(f)...)
		}
	}
	return all
}

// patterns returns the spellings in all commands as a pattern for case in bash: exec:--workdir|start:--workdir.
func patterns(of kind) string {
	var all []string
	for _, c := range commands() {
		for _, word := range spellings(c, of) {
			all = append(all, c.ID+":"+word)
		}
	}
	return strings.Join(all, "|")
}

// quote returns a text as one word for bash, zsh and fish. It must not contain a backslash, which is special within
// single quotes only in fish.
func quote(text string) (string, error) {
	if strings.Contains(text, `\`) {
		return "", fmt.Errorf("%q: a backslash means something else to each shell", text)
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'", nil
}

// zshSpec returns a flag for _arguments, once for each spelling.
func zshSpec(f *kong.Flag) string {
	escape := strings.NewReplacer("[", `\[`, "]", `\]`, ":", `\:`)
	exclude := "(" + strings.Join(cli.Spellings(f), " ") + ")"
	if f.IsSlice() {
		exclude = "*"
	}
	value := ""
	if !f.IsBool() {
		value = ":" + escape.Replace(f.PlaceHolder) + ":" + map[kind]string{
			anything: " ",
			file:     "_files",
			dir:      "_files -/",
			variable: "_parameters -g '*export*'",
			oneOf:    "(" + strings.Join(proposals(f), " ") + ")",
		}[kindOf(f)]
	}
	var specs []string
	for _, word := range cli.Spellings(f) {
		switch {
		case f.IsBool():
		case strings.HasPrefix(word, "--"):
			word += "="
		default:
			word += "+"
		}
		spec := exclude + word + "[" + escape.Replace(f.Help) + "]" + value
		specs = append(specs, `"`+strings.NewReplacer(`\`, `\\`, `"`, `\"`, "$", `\$`, "`", "\\`").Replace(spec)+`"`)
	}
	return strings.Join(specs, "\n    ")
}
