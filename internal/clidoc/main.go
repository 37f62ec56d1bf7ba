// Command clidoc generates sbxrun's man pages, flag reference and shell completions from templates and the grammar in
// internal/cli. It is a
// separate command to keep sbxrun's startup fast.
//
// usage: clidoc [-C ROOT] man|completions|reference DIR
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/template"

	"github.com/alecthomas/kong"
	"github.com/cpuguy83/go-md2man/v2/md2man"

	"github.com/sbxrun/sbxrun/internal/cli"
)

func main() {
	root := flag.String("C", ".", "root of the source `tree`")
	flag.Parse()
	if flag.NArg() != 2 {
		fmt.Fprintln(os.Stderr, "usage: clidoc [-C ROOT] man|completions|reference DIR")
		os.Exit(2)
	}
	if err := run(*root, flag.Arg(0), flag.Arg(1)); err != nil {
		fmt.Fprintln(os.Stderr, "clidoc: error:", err)
		os.Exit(1)
	}
}

func run(root, what, dir string) error {
	sources := map[string]string{"man": "docs/man/*.1.md", "completions": "internal/clidoc/completions/*", "reference": "internal/clidoc/commands.md"}
	names, err := filepath.Glob(filepath.Join(root, sources[what]))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("%q: want man, completions or reference, in the source tree", what)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, source := range names {
		text, err := render(root, source)
		name := filepath.Base(source)
		if what == "man" {
			name = strings.TrimSuffix(name, ".md")
			text = md2man.Render(text)
			// groff would print - as a hyphen, a different character that breaks searching and copying.
			text = regexp.MustCompile(`(?m)^[^.\n].*`).ReplaceAllFunc(text, func(line []byte) []byte {
				return regexp.MustCompile(`\\?-`).ReplaceAll(line, []byte(`\-`))
			})
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			return err
		}
	}
	if what == "man" { // man sbxrun-run shows sbxrun(1) (soelim(1))
		err = os.WriteFile(filepath.Join(dir, "sbxrun-run.1"), []byte(".so man1/sbxrun.1\n"), 0o644)
	}
	return err
}

// render executes a template of a page, which can use the functions below and the templates in parts.tmpl.
func render(root, source string) ([]byte, error) {
	page := template.New(filepath.Base(source))
	part := func(name string, data any, err error) (string, error) {
		var b strings.Builder
		if err == nil {
			err = page.ExecuteTemplate(&b, name, data)
		}
		return b.String(), err
	}
	page.Funcs(template.FuncMap{
		"commands": cli.Commands,
		"first":    func() []*kong.Node { return cli.Model().Model.Children },
		"flags":    flags,
		"join":     strings.Join,
		"cell":     func(text string) string { return strings.ReplaceAll(text, "|", `\|`) },
		"anchor":   func(text string) string { return strings.ReplaceAll(text, " ", "-") },
		"synopsis": func(name string) (string, error) { c, err := find(name); return part("synopsis", c, err) },
		"options": func(name, topic string) (string, error) {
			c, err := find(name)
			return part("options", flags(topic, c), err)
		},
		"section": func(names ...string) (string, error) { c, err := find(names...); return part("section", c, err) },
		"exits":   func() (string, error) { return exits(root) },
	})
	if _, err := page.ParseFiles(filepath.Join(root, "internal/clidoc/parts.tmpl"), source); err != nil {
		return nil, err
	}
	var b bytes.Buffer
	err := page.Execute(&b, nil)
	return b.Bytes(), err
}

// find returns the commands with these first words.
func find(names ...string) ([]*kong.Node, error) {
	all := slices.DeleteFunc(cli.Commands(), func(c *kong.Node) bool { return !slices.Contains(names, strings.Fields(c.Path())[0]) })
	if len(all) < len(names) {
		return nil, fmt.Errorf("one of these is not a command: %q", names)
	}
	return all, nil
}

// described is a flag with the commands that have it.
type described struct {
	*kong.Flag
	Words    []string // spellings
	Commands []string
	All      bool // all commands have it
}

// flags returns the flags of commands of a topic, "" for those without one. A flag appears once for each text that it has.
func flags(topic string, commands []*kong.Node) (all []described) {
	for _, c := range commands {
		for _, f := range c.Flags {
			if (f.Group == nil) != (topic == "") || f.Group != nil && f.Group.Key != topic {
				continue
			}
			i := slices.IndexFunc(all, func(d described) bool { return d.String() == f.String() && d.Help == f.Help })
			if i < 0 {
				i = len(all)
				if same := slices.IndexFunc(all, func(d described) bool { return d.Name == f.Name }); same >= 0 {
					i = same + 1
				}
				all = slices.Insert(all, i, described{Flag: f, Words: cli.Spellings(f)})
			}
			all[i].Commands = append(all[i].Commands, c.Name)
			all[i].All = len(all[i].Commands) == len(commands)
		}
	}
	return all
}

// exits returns the table of docs/reference/exit-codes.md as a definition list.
func exits(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, "docs/reference/exit-codes.md"))
	var b strings.Builder
	for _, row := range regexp.MustCompile(`(?m)^\| ([0-9].*) \| .* \| (.*) \|$`).FindAllSubmatch(text, -1) {
		fmt.Fprintf(&b, "%s\n: %s\n\n", row[1], row[2])
	}
	return b.String(), err
}
