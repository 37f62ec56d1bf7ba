package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"text/template"

	"github.com/cpuguy83/go-md2man/v2/md2man"
)

// manSource is the man page's prose: Markdown, with a template action wherever
// something comes from the definition.
const manSource = "docs/sbxrun.1.md"

// manPage makes the page in man(7) form.
func manPage(line commandLine, source string) ([]byte, error) {
	prose, err := os.ReadFile(source)
	if err != nil {
		return nil, err
	}
	page, err := template.New(source).Funcs(template.FuncMap{
		"options": func(command, topic string) (string, error) { return manOptions(line, command, topic) },
		"help": func(command string) (string, error) {
			c, err := line.command(command)
			return c.Help, err
		},
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

// minuses keeps what is to be typed searchable and fit for copying: groff shows
// an unescaped - as a hyphen, which is another character than the minus.
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

// manOptions is the flags of one topic as a definition list.
func manOptions(line commandLine, command, topic string) (string, error) {
	c, err := line.command(command)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, o := range c.Flags {
		if o.Topic != topic {
			continue
		}
		words := o.Words()
		for i := range words {
			words[i] = "**" + words[i] + "**"
		}
		fmt.Fprint(&b, strings.Join(words, ", "))
		if o.TakesValue() {
			fmt.Fprintf(&b, " *%s*", o.Placeholder)
		}
		fmt.Fprintf(&b, "\n: %s", o.Help)
		if o.Repeats {
			fmt.Fprint(&b, " May be given more than once.")
		}
		if o.Default != "" {
			fmt.Fprintf(&b, " Default: %s.", o.Default)
		}
		fmt.Fprint(&b, "\n\n")
	}
	if b.Len() == 0 {
		return "", fmt.Errorf("sbxrun %s has no flags of the topic %q", command, topic)
	}
	return b.String(), nil
}
