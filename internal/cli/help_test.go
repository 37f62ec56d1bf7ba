package cli

import (
	"strings"
	"testing"
)

func help(t *testing.T, command string) string {
	t.Helper()
	var text strings.Builder
	if err := Help(&text, command); err != nil {
		t.Fatalf("help of %q: %v", command, err)
	}
	return text.String()
}

// TestHelp: the help of all tells every command, on one line of a terminal, and
// the flags of run; that of a command its words, an example and its flags.
func TestHelp(t *testing.T) {
	k, err := New(&CLI{})
	if err != nil {
		t.Fatal(err)
	}
	all := help(t, "")
	for _, want := range []string{"Usage: sbxrun [run] [flags] [--] COMMAND [ARG...]\n", "|exec|", "Example: sbxrun --timeout 5 ",
		"(default 5s)", "(default 256M)", "Default:"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in the help:\n%s", want, all)
		}
	}
	for _, line := range strings.Split(all, "\n") {
		if len(line) > 80 {
			t.Errorf("longer than a terminal's line: %s", line)
		}
	}
	for _, node := range k.Model.Children {
		if !strings.Contains(all, "\n  "+node.Name+strings.Repeat(" ", 9-len(node.Name))+node.Help+"\n") {
			t.Errorf("%s is not in the list of commands:\n%s", node.Name, all)
		}
		text := help(t, node.Name)
		if node.Name == "run" {
			for _, flag := range node.Flags {
				if !strings.Contains(all, "--"+flag.Name) {
					t.Errorf("no --%s in the help", flag.Name)
				}
			}
		}
		if want := "Usage: sbxrun " + node.Name + " " + Words(node) + "\n\nExample: sbxrun " + node.Name; !strings.HasPrefix(text, want) || Words(node) == "" {
			t.Errorf("help of %s does not begin with %q:\n%s", node.Name, want, text)
		}
		if strings.Count(text, node.Help) != 1 {
			t.Errorf("what %s does is not told once:\n%s", node.Name, text)
		}
		for _, flag := range node.Flags {
			if !strings.Contains(text, "--"+flag.Name) {
				t.Errorf("help of %s: no --%s", node.Name, flag.Name)
			}
		}
	}
	if err := Help(&strings.Builder{}, "nosuch"); err == nil {
		t.Error("help of a command that does not exist")
	}
}

// TestHelpOrder: the topics are in one order everywhere, whatever order the
// struct of a command has.
func TestHelpOrder(t *testing.T) {
	text := help(t, "start")
	at := 0
	for _, group := range groups {
		i := strings.Index(text, "\n"+group.Title+"\n")
		if i < at {
			t.Errorf("%q is not where it should be:\n%s", group.Title, text)
		}
		at = i
	}
}

// TestExamples: what the examples show is accepted.
func TestExamples(t *testing.T) {
	parsers := map[string]func(args []string) error{
		"start":   parses[Start],
		"exec":    parsesExec,
		"run":     parses[Run],
		"ps":      names[Ps],
		"inspect": names[Inspect],
		"wait":    names[Wait],
		"logs":    names[Logs],
		"kill":    names[Kill],
		"cleanup": names[Cleanup],
		"stats":   names[Stats],
		"doctor":  parses[Doctor],
	}
	for command, example := range examples {
		words := strings.Fields(example)[1:]
		if command == "" {
			command = "run"
		} else {
			words = words[1:]
		}
		if err := parsers[command](words); err != nil {
			t.Errorf("%s: %v", example, err)
		}
	}
}

func parses[F any](args []string) error { _, err := Parse(new(F), args); return err }
func names[F any](args []string) error  { _, err := ParseNames(new(F), args); return err }
func parsesExec(args []string) error {
	payload, err := Parse(&Exec{}, args)
	if err == nil {
		_, _, err = SplitExec(payload)
	}
	return err
}
