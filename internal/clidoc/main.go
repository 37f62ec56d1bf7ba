// Command clidoc generates sbxrun's man pages, shell completions and flag reference from the grammar in internal/cli.
// It is a separate command to keep sbxrun's startup fast.
//
// usage: clidoc [-C ROOT] man|completions|reference DIR
package main

import (
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
	files := map[string]func() ([]byte, error){}
	switch what {
	case "man":
		pages, err := manPages(root)
		if err != nil {
			return err
		}
		for name := range pages {
			files[name] = func() ([]byte, error) { return manPage(pages, name) }
		}
		// man sbxrun-run shows sbxrun(1) (soelim(1)).
		files["sbxrun-run.1"] = func() ([]byte, error) { return []byte(".so man1/sbxrun.1\n"), nil }
	case "completions":
		for name, shell := range shells {
			files[name] = func() ([]byte, error) { return completion(shell) }
		}
	case "reference":
		files["commands.md"] = func() ([]byte, error) { return reference(), nil }
	default:
		return fmt.Errorf("%q: want man, completions or reference", what)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, make := range files {
		text, err := make()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
