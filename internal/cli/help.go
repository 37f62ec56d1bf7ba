package cli

import (
	"fmt"
	"io"
	"strings"
)

// Help writes the help of the command that flags is a pointer to the struct of. That of
// the default command is also the help of the whole command line.
func Help(w io.Writer, flags any) error {
	c := commandOf(flags)
	var b strings.Builder
	if c.Name == Default().Name {
		var others []string
		for _, other := range Commands()[1:] {
			others = append(others, other.Name)
		}
		fmt.Fprintf(&b, "Usage: sbxrun [%s] %s\n       sbxrun %s ...\n\n", c.Name, c.Words(), alternatives(others))
		fmt.Fprintf(&b, "Example: %s\n\n%s\n\nCommands (sbxrun help NAME tells more):\n", c.Example(), Description)
		for _, each := range Commands() {
			fmt.Fprintf(&b, "  %-9s  %s\n", each.Name, each.Help())
		}
	} else {
		fmt.Fprintf(&b, "Usage: sbxrun %s %s\n\nExample: %s\n\n%s\n", c.Name, c.Words(), c.Example(), c.Help())
	}
	for _, topic := range topics {
		c.writeTopic(&b, topic.key, topic.title)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// alternatives are names, of which any may be written, in lines below "sbxrun ".
func alternatives(names []string) string {
	const left, right = len("       sbxrun "), 76
	var b strings.Builder
	at := left
	for i, name := range names {
		if i > 0 {
			b.WriteByte('|')
			at++
		}
		if at+len(name) >= right {
			b.WriteString("\n" + strings.Repeat(" ", left))
			at = left
		}
		b.WriteString(name)
		at += len(name)
	}
	return b.String()
}

// HelpLine is the command line that prints the help of the command with these flags.
func HelpLine(flags any) string {
	if name := commandOf(flags).Name; name != Default().Name {
		return "sbxrun " + name + " --help"
	}
	return "sbxrun --help"
}

const (
	lineWidth = 80
	leftWidth = 30 // a flag that is longer has a line of its own
	gap       = 4
)

// writeTopic writes the flags of one topic, if there are any, in two columns.
func (c Command) writeTopic(b *strings.Builder, key, title string) {
	var flags []Flag
	anyShort := false
	for _, f := range c.Flags {
		if f.Topic() == key {
			flags = append(flags, f)
			anyShort = anyShort || f.Short() != ""
		}
	}
	if flags == nil {
		return
	}
	fmt.Fprintf(b, "\n%s\n", title)
	var left []string
	width := 0
	for _, f := range flags {
		text := "--" + f.Name
		if f.TakesValue() {
			text += "=" + f.Placeholder()
		}
		switch {
		case f.Short() != "":
			text = "-" + f.Short() + ", " + text
		case anyShort:
			text = "    " + text
		}
		left = append(left, text)
		if len(text) <= leftWidth {
			width = max(width, len(text))
		}
	}
	indent := strings.Repeat(" ", 2+width+gap)
	for i, f := range flags {
		begin := fmt.Sprintf("  %-*s", width+gap, left[i])
		if len(left[i]) > width {
			begin = "  " + left[i] + "\n" + indent
		}
		b.WriteString(begin + strings.Join(wrap(f.helpWithDefault(), lineWidth-len(indent)), "\n"+indent) + "\n")
	}
}

// helpWithDefault is a flag's help with its default, if that says something.
func (f Flag) helpWithDefault() string {
	if d := f.Default(); d != "" && d != "0" && !strings.Contains(f.Help(), "efault") {
		return strings.TrimSuffix(f.Help(), ".") + " (default " + d + ")."
	}
	return f.Help()
}

// wrap breaks a text into lines.
func wrap(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return append(lines, line)
}
