// Command clidoc generates sbxrun's man pages and flag reference from the grammar in internal/cli, and writes the shell
// completions. It is a separate command to keep sbxrun's startup fast.
//
// usage: clidoc [-C ROOT] man|completions|reference DIR
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
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
	files := map[string][]byte{}
	var failed error
	add := func(name string, text []byte, err error) { files[name], failed = text, errors.Join(failed, err) }
	switch what {
	case "man":
		pages, err := manPages(root)
		failed = err
		for name := range pages {
			text, err := manPage(pages, name)
			add(name, text, err)
		}
		add("sbxrun-run.1", []byte(".so man1/sbxrun.1\n"), nil) // man sbxrun-run shows sbxrun(1) (soelim(1))
	case "completions":
		for _, name := range []string{"sbxrun.bash", "sbxrun.fish", "_sbxrun"} {
			text, err := os.ReadFile(filepath.Join(root, "internal/clidoc/completions", name))
			add(name, text, err)
		}
	case "reference":
		add("commands.md", reference(), nil)
	default:
		return fmt.Errorf("%q: want man, completions or reference", what)
	}
	if failed == nil {
		failed = os.MkdirAll(dir, 0o755)
	}
	if failed != nil {
		return failed
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
