// Command clidoc generates sbxrun's man pages and flag reference from templates and the grammar in internal/cli. It is a
// separate command to keep sbxrun's startup fast.
//
// usage: clidoc ROOT man|reference DIR
package main

import (
	"bytes"
	"cmp"
	"log"
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
	log.SetFlags(0)
	if len(os.Args) != 4 {
		log.Fatal("usage: clidoc ROOT man|reference DIR")
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		log.Fatal("clidoc: error: ", err)
	}
}

// run writes the man pages, or the reference, of the source tree in root to dir.
func run(root, what, dir string) error {
	sources := map[string]string{"man": "docs/man/*.1.md", "reference": "internal/clidoc/commands.md"}[what]
	pages, err := template.New("").Funcs(functions).ParseGlob(filepath.Join(root, sources))
	if err == nil {
		_, err = pages.ParseFiles(filepath.Join(root, "internal/clidoc/parts.tmpl"))
	}
	if err = cmp.Or(err, os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	for _, t := range pages.Templates() {
		if !strings.HasSuffix(t.Name(), ".md") {
			continue // a part of pages
		}
		var page bytes.Buffer
		if err := t.Execute(&page, root); err != nil {
			return err
		}
		name, text := t.Name(), page.Bytes()
		if what == "man" {
			name = strings.TrimSuffix(name, ".md")
			// groff would print - as a hyphen, a different character that breaks searching and copying.
			text = regexp.MustCompile(`(?m)^[^.\n].*`).ReplaceAllFunc(md2man.Render(text), func(line []byte) []byte {
				return regexp.MustCompile(`\\?-`).ReplaceAll(line, []byte(`\-`))
			})
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	if what == "man" { // man sbxrun-run shows sbxrun(1) (soelim(1))
		return os.WriteFile(filepath.Join(dir, "sbxrun-run.1"), []byte(".so man1/sbxrun.1\n"), 0o644)
	}
	return nil
}

// functions can be called in the templates: the pages, whose argument is the root of the source tree, and parts.tmpl.
var functions = template.FuncMap{
	"model":     func() *kong.Application { return cli.Model().Model },
	"commands":  commands,
	"spellings": func(f *kong.Flag) string { return strings.Join(cli.Spellings(f), "**, **") },
	"anchor":    func(text string) string { return strings.ReplaceAll(text, " ", "-") },
	// flags returns the flags of a command about a topic.
	"flags": func(topic, command string) []*kong.Flag {
		return slices.DeleteFunc(commands(command)[0].Flags, func(f *kong.Flag) bool { return f.Tag.Group != topic })
	},
	"help": func(name string) (string, error) {
		var text strings.Builder
		err := cli.Help(name).Text(&text)
		return text.String(), err
	},
	// codes returns the rows of the table of exit codes in the reference, with their cells.
	"codes": func(root string) ([][][]byte, error) {
		text, err := os.ReadFile(filepath.Join(root, "docs/reference/exit-codes.md"))
		return regexp.MustCompile(`(?m)^\| ([0-9].*) \| .* \| (.*) \|$`).FindAllSubmatch(text, -1), err
	},
}

// commands returns the commands that begin with this word.
func commands(word string) []*kong.Node {
	return slices.DeleteFunc(cli.Commands(), func(c *kong.Node) bool { return strings.Fields(c.Path())[0] != word })
}
