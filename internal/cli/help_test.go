package cli

import (
	"errors"
	"strings"
	"testing"
)

func help(t *testing.T, command string) string {
	t.Helper()
	var text strings.Builder
	if err := Help(&text, newFlags(command)); err != nil {
		t.Fatalf("help of %q: %v", command, err)
	}
	return text.String()
}

// TestHelp: the help of a command tells its words, an example, what it does and its flags;
// that of the default command every other command as well. No line is longer than a
// terminal's.
func TestHelp(t *testing.T) {
	all := help(t, "run")
	for _, want := range []string{"Usage: sbxrun [run] [flags] [--] COMMAND [ARG...]\n", "|exec|", "\n\nExample: sbxrun --timeout 5 ",
		"  -k, --grace=DUR ", "\n      --proof-timeout=DUR    How long to wait for proof that nothing is left\n                             (default 5s).\n",
		"(default 256M)", "Default:", "\n  -t, --tty ", "\n      --env=NAME[=VALUE] ",
		"\n  --on-pressure=refuse|wait|ignore\n                        When too many"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in the help:\n%s", want, all)
		}
	}
	for _, c := range Commands() {
		text := help(t, c.Name)
		for _, line := range strings.Split(text, "\n") {
			if len(line) > 80 && !strings.HasPrefix(line, "Usage:") && !strings.HasPrefix(line, "Example:") {
				t.Errorf("longer than a terminal's line: %s", line)
			}
		}
		if !strings.Contains(all, "\n  "+c.Name+strings.Repeat(" ", 11-len(c.Name))+c.Help()+"\n") {
			t.Errorf("%s is not in the list of commands:\n%s", c.Name, all)
		}
		if want := "Usage: sbxrun " + c.Name + " " + c.Words() + "\n\nExample: sbxrun " + c.Name; c.Name != "run" && !strings.HasPrefix(text, want) {
			t.Errorf("help of %s does not begin with %q:\n%s", c.Name, want, text)
		}
		if strings.Count(text, c.Help()) != 1 {
			t.Errorf("what %s does is not told once:\n%s", c.Name, text)
		}
		for _, f := range c.Flags {
			if n := strings.Count(text, " --"+f.Name+" ") + strings.Count(text, " --"+f.Name+"=") + strings.Count(text, " --"+f.Name+"\n"); n == 0 {
				t.Errorf("help of %s: no --%s", c.Name, f.Name)
			}
		}
	}
}

// TestHelpOrder: the topics are in one order everywhere, whatever order the
// struct of a command has.
func TestHelpOrder(t *testing.T) {
	text := help(t, "start")
	at := 0
	for _, topic := range topics[1:] {
		i := strings.Index(text, "\n"+topic.title+"\n")
		if i < at {
			t.Errorf("%q is not where it should be:\n%s", topic.title, text)
		}
		at = i
	}
}

// TestExamples: what the examples show is accepted.
func TestExamples(t *testing.T) {
	for _, c := range Commands() {
		words := strings.Fields(c.Example())[1:]
		if c.Name != Default().Name {
			if words[0] != c.Name {
				t.Errorf("%s: not of %s", c.Example(), c.Name)
			}
			words = words[1:]
		}
		words, err := Parse(newFlags(c.Name), words)
		if c.Name == "exec" {
			_, _, splitErr := SplitExec(words)
			err = errors.Join(err, splitErr)
		}
		if err != nil {
			t.Errorf("%s: %v", c.Example(), err)
		}
	}
}
