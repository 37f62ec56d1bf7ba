package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"text/template"

	"github.com/cpuguy83/go-md2man/v2/md2man"

	"github.com/sbxrun/sbxrun/internal/cli"
)

// manSources is the directory of the man pages in Markdown. Template actions insert parts from the grammar.
const manSources = "docs/man"

// manPages maps the man pages to their sources.
func manPages(root string) (map[string]string, error) {
	sources, err := filepath.Glob(filepath.Join(root, manSources, "*.md"))
	if err != nil {
		return nil, err
	}
	pages := map[string]string{}
	for _, source := range sources {
		pages[strings.TrimSuffix(filepath.Base(source), ".md")] = source
	}
	return pages, nil
}

// pageOf returns the page of a command: its own, or sbxrun.1.
func pageOf(command string, pages map[string]string) string {
	if own := "sbxrun-" + command + ".1"; pages[own] != "" {
		return own
	}
	return "sbxrun.1"
}

// manPage returns a page in man(7) format.
func manPage(pages map[string]string, name string) ([]byte, error) {
	prose, err := os.ReadFile(pages[name])
	if err != nil {
		return nil, err
	}
	page, err := template.New(name).Funcs(template.FuncMap{
		"options":  manOptions,
		"synopsis": manSynopsis,
		"commands": func() string { return manCommands(pages) },
		"exits":    func() (string, error) { return manExits(pages) },
	}).Parse(string(prose))
	if err != nil {
		return nil, err
	}
	var markdown bytes.Buffer
	if err := page.Execute(&markdown, nil); err != nil {
		return nil, err
	}
	return minuses(md2man.Render(markdown.Bytes())), nil
}

// manSynopsis returns the usage of a command, or of all commands of a group, with placeholders in italics and literal words in bold.
func manSynopsis(name string) (string, error) {
	found, err := find(name)
	var lines []string
	for _, c := range found {
		begin := "**sbxrun " + c.Path() + "** "
		if name == "run" {
			begin = "**sbxrun** [**run**] "
		}
		lines = append(lines, begin+regexp.MustCompile(`[A-Za-z-]+`).ReplaceAllStringFunc(c.Tag.Vars["usage"], func(word string) string {
			if strings.HasPrefix(word, "-") {
				return "**" + word + "**"
			}
			return "*" + strings.ToLower(word) + "*"
		}))
	}
	return strings.Join(lines, "\n\n"), err
}

// manCommands returns all commands as a definition list.
func manCommands(pages map[string]string) string {
	var b strings.Builder
	for _, c := range first() {
		fmt.Fprintf(&b, "**%s**\n: %s", c.Name, c.Help)
		if page := pageOf(c.Name, pages); page != "sbxrun.1" {
			fmt.Fprintf(&b, " See **%s**(1).", strings.TrimSuffix(page, ".1"))
		}
		fmt.Fprint(&b, "\n\n")
	}
	return b.String()
}

// manExits returns the table of docs/reference/exit-codes.md as a definition list.
func manExits(pages map[string]string) (string, error) {
	text, err := os.ReadFile(filepath.Join(filepath.Dir(pages["sbxrun.1"]), "../reference/exit-codes.md"))
	rows := regexp.MustCompile(`(?m)^\| ([0-9].*) \| .* \| (.*) \|$`).FindAllSubmatch(text, -1)
	var b strings.Builder
	for _, row := range rows {
		fmt.Fprintf(&b, "%s\n: %s\n\n", row[1], row[2])
	}
	return b.String(), err
}

// minuses escapes each -, which groff would print as a hyphen, a different character that breaks searching and copying.
func minuses(page []byte) []byte {
	lines := bytes.Split(page, []byte("\n"))
	for i, line := range lines {
		if bytes.HasPrefix(line, []byte(".")) {
			continue
		}
		plain := bytes.ReplaceAll(line, []byte(`\-`), []byte("-"))
		lines[i] = bytes.ReplaceAll(plain, []byte("-"), []byte(`\-`))
	}
	return bytes.Join(lines, []byte("\n"))
}

// manOptions returns the flags of one topic as a definition list, of a group's commands one after the other.
func manOptions(name, topic string) (string, error) {
	found, err := find(name)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, c := range found {
		if len(found) > 1 {
			fmt.Fprintf(&b, "**%s**:\n\n", c.Path())
		}
		for _, f := range c.Flags {
			if (f.Group == nil) != (topic == "") || f.Group != nil && f.Group.Key != topic {
				continue
			}
			words := cli.Spellings(f)
			for i := range words {
				words[i] = "**" + words[i] + "**"
			}
			fmt.Fprint(&b, strings.Join(words, ", "))
			if !f.IsBool() {
				fmt.Fprintf(&b, " *%s*", f.PlaceHolder)
			}
			fmt.Fprintf(&b, "\n: %s", f.Help)
			if f.IsSlice() {
				fmt.Fprint(&b, " May be given more than once.")
			}
			if f.Default != "" {
				fmt.Fprintf(&b, " Default: %s.", f.Default)
			}
			fmt.Fprint(&b, "\n\n")
		}
	}
	if b.Len() == 0 {
		return "", fmt.Errorf("sbxrun %s has no flags of the topic %q", name, topic)
	}
	return b.String(), nil
}
