// Command clidoc generates sbxrun's man pages and flag reference from templates and the grammar in internal/cli. It is a
// separate command to keep sbxrun's startup fast.
//
// usage: clidoc ROOT man|reference DIR
package main

import (
	"bytes"
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
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: clidoc ROOT man|reference DIR")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, "clidoc: error:", err)
		os.Exit(1)
	}
}

// run writes the man pages, or the reference, of the source tree in root to dir.
func run(root, what, dir string) error {
	sources, err := filepath.Glob(filepath.Join(root, map[string]string{"man": "docs/man/*.1.md", "reference": "internal/clidoc/commands.md"}[what]))
	if err != nil || len(sources) == 0 {
		return fmt.Errorf("%q: want man or reference, in the source tree", what)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, source := range sources {
		name, page := filepath.Base(source), bytes.Buffer{}
		t, err := template.New(name).Funcs(functions).ParseFiles(filepath.Join(root, "internal/clidoc/parts.tmpl"), source)
		if err == nil {
			err = t.Execute(&page, root)
		}
		text := page.Bytes()
		if what == "man" {
			name = strings.TrimSuffix(name, ".md")
			// groff would print - as a hyphen, a different character that breaks searching and copying.
			text = regexp.MustCompile(`(?m)^[^.\n].*`).ReplaceAllFunc(md2man.Render(text), func(line []byte) []byte {
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
		return os.WriteFile(filepath.Join(dir, "sbxrun-run.1"), []byte(".so man1/sbxrun.1\n"), 0o644)
	}
	return nil
}

// functions are for the templates: the pages, whose argument is the root of the source tree, and parts.tmpl.
var functions = template.FuncMap{
	"commands":  commands,
	"first":     func() []*kong.Node { return cli.Model().Model.Children },
	"flags":     flags,
	"spellings": func(f *kong.Flag) string { return strings.Join(cli.Spellings(f), "**, **") },
	"anchor":    func(text string) string { return strings.ReplaceAll(text, " ", "-") },
	"help": func(name string) (string, error) {
		var text strings.Builder
		err := cli.Help(name).Text(&text)
		return text.String(), err
	},
	"codes": codes,
}

// commands returns the commands of which one of these is the first word, or all.
func commands(words ...string) ([]*kong.Node, error) {
	all := slices.DeleteFunc(cli.Commands(), func(c *kong.Node) bool {
		return len(words) > 0 && !slices.Contains(words, strings.Fields(c.Path())[0])
	})
	if len(all) == 0 {
		return nil, fmt.Errorf("no command %q", words)
	}
	return all, nil
}

// flags returns the flags of a command about a topic, "" for those without one.
func flags(topic string, c *kong.Node) (list []*kong.Flag) {
	for _, f := range c.Flags {
		if f.Group == nil && topic == "" || f.Group != nil && f.Group.Key == topic {
			list = append(list, f)
		}
	}
	return list
}

// codes returns the rows of the table of exit codes in the reference, with their cells.
func codes(root string) ([][][]byte, error) {
	text, err := os.ReadFile(filepath.Join(root, "docs/reference/exit-codes.md"))
	return regexp.MustCompile(`(?m)^\| ([0-9].*) \| .* \| (.*) \|$`).FindAllSubmatch(text, -1), err
}
