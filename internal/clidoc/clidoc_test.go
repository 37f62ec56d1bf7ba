package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"
)

func commands(t *testing.T) commandLine {
	t.Helper()
	line, err := define()
	if err != nil {
		t.Fatal(err)
	}
	return line
}

// write makes all files of a kind, as a build does, and returns their directory.
func write(t *testing.T, what string) string {
	t.Helper()
	dir := t.TempDir()
	if err := run("../..", what, dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func read(t *testing.T, elem ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elem...))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestEverywhere: every flag and every command of the definition is in the man
// page and in each completion, in the form that belongs there.
func TestEverywhere(t *testing.T) {
	completions := write(t, "completions")
	for name, text := range map[string]string{
		"sbxrun.1":    read(t, write(t, "man"), "sbxrun.1"),
		"sbxrun.bash": read(t, completions, "sbxrun.bash"),
		"_sbxrun":     read(t, completions, "_sbxrun"),
		"sbxrun.fish": read(t, completions, "sbxrun.fish"),
	} {
		for _, c := range commands(t).Commands {
			if !regexp.MustCompile(`\b` + c.Name + `\b`).MatchString(text) {
				t.Errorf("%s: no command %s", name, c.Name)
			}
			for _, o := range c.Flags {
				for _, word := range o.Words() {
					want := regexp.QuoteMeta(word) + `([^a-z-]|$)`
					switch name {
					case "sbxrun.1":
						want = `\\fB` + regexp.QuoteMeta(strings.ReplaceAll(word, "-", `\-`)) + `\\fP`
					case "sbxrun.fish":
						letter := map[bool]string{true: "-l ", false: "-s "}[strings.HasPrefix(word, "--")]
						want = `__sbxrun_at flags ` + c.Name + `'.* ` + letter + strings.TrimLeft(word, "-") + " "
					}
					if !regexp.MustCompile(`(?m)` + want).MatchString(text) {
						t.Errorf("%s: no %s of sbxrun %s", name, word, c.Name)
					}
				}
				if name != "sbxrun.bash" {
					flat := strings.NewReplacer(`\-`, "-", `'\''`, "'", `\`, "").Replace(text)
					if !strings.Contains(flat, strings.ReplaceAll(o.Help, `\`, "")) {
						t.Errorf("%s: the help of --%s is not there: %s", name, o.Name, o.Help)
					}
				}
			}
		}
	}
}

// TestManSections: the sections people look for, in the usual order.
func TestManSections(t *testing.T) {
	page := read(t, write(t, "man"), "sbxrun.1")
	var got []string
	for _, m := range regexp.MustCompile(`(?m)^\.SH (.*)$`).FindAllStringSubmatch(page, -1) {
		got = append(got, m[1])
	}
	want := []string{"NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXIT STATUS", "SIGNALS",
		"ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("sections (-want +got):\n%s", diff)
	}
	if strings.Contains(page, "{{") {
		t.Error("a template action was left in the page")
	}
}

// TestManIsClean: man(7) as groff understands it, where there is a groff.
func TestManIsClean(t *testing.T) {
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("no groff here: not checked")
		return
	}
	out, err := exec.Command(groff, "-man", "-ww", "-z", "-Tutf8", filepath.Join(write(t, "man"), "sbxrun.1")).CombinedOutput()
	if err != nil || len(out) > 0 {
		t.Errorf("groff: %v\n%s", err, out)
	}
}

// TestSyntax: every shell that is here accepts its file.
func TestSyntax(t *testing.T) {
	dir := write(t, "completions")
	for file, shell := range map[string]string{"sbxrun.bash": "bash", "_sbxrun": "zsh", "sbxrun.fish": "fish"} {
		if _, err := exec.LookPath(shell); err != nil {
			t.Logf("no %s here: %s not checked", shell, file)
			continue
		}
		if out, err := exec.Command(shell, "-n", filepath.Join(dir, file)).CombinedOutput(); err != nil {
			t.Errorf("%s -n %s: %v\n%s", shell, file, err, out)
		}
	}
}

// TestBash completes command lines as an interactive bash would call us: cut
// into words at blanks, and at = and : as well.
func TestBash(t *testing.T) {
	script := filepath.Join(write(t, "completions"), "sbxrun.bash")
	here := t.TempDir()
	for _, name := range []string{"job.py", "job.env", "space here", "bin/tool"} {
		if err := os.MkdirAll(filepath.Join(here, filepath.Dir(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(here, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct{ line, want string }{
		{"sbxrun --time", "--timeout"},
		{"sbxrun --ro-bind-", "--ro-bind-try"},
		{"sbxrun run --print", "--print-command"},
		{"sbxrun --timeout 5 --print", "--print-command"},
		{"sbxrun --timeout=5 --print", "--print-command"},
		{"sbxrun --ro-bind /a:/b --print", "--print-command"},
		{"sbxrun --net ", "none host"},
		{"sbxrun --net=h", "host"},
		{"sbxrun --env-file job", "job.py job.env"},
		{"sbxrun --env-file=job.e", "job.env"},
		{"sbxrun --workdir b", "bin"},
		{"sbxrun --ro-bind /x:job.p", "job.py"},
		{"sbxrun --ro-bind sp", "space here"},
		{"sbxrun --env SBXRUN_TEST_V", "SBXRUN_TEST_VARIABLE"},
		{"sbxrun --timeout 1 doctor-of-nothing", ""},
		{"sbxrun doct", "doctor"},
		{"sbxrun doctor --", "--json --help"},
		{"sbxrun doctor ", ""},
		{"sbxrun doctor --json job", ""},
		// After the command's name nothing is a flag of sbxrun.
		{"sbxrun cat --time", ""},
		{"sbxrun -- --time", ""},
		{"sbxrun -q -- cat --time", ""},
	} {
		t.Run(tt.line, func(t *testing.T) {
			cmd := exec.Command("bash", "--norc", "-c", `
				compopt() { :; }
				source "$1"
				COMP_LINE=$2
				shift 2
				COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_POINT=${#COMP_LINE}
				_sbxrun
				printf '%s\n' "${COMPREPLY[@]}"`, "bash", script, tt.line)
			cmd.Args = append(cmd.Args, cut(tt.line)...)
			cmd.Dir = here
			cmd.Env = append(os.Environ(), "SBXRUN_TEST_VARIABLE=1")
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			out, err := cmd.Output()
			if err != nil || stderr.Len() > 0 {
				t.Fatalf("bash: %v\n%s", err, &stderr)
			}
			got := sorted(strings.TrimSuffix(string(out), "\n"), "\n")
			want := sorted(tt.want, " ")
			if tt.want == "space here" {
				want = []string{tt.want}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("proposals (-want +got):\n%s", diff)
			}
		})
	}
}

// cut divides a line as readline does for COMP_WORDS.
func cut(line string) []string {
	words := []string{""}
	for _, c := range line {
		last := &words[len(words)-1]
		separator := *last == "=" || *last == ":"
		switch {
		case c == ' ':
			words = append(words, "")
		case c == '=' || c == ':':
			if *last == "" {
				*last = string(c)
			} else {
				words = append(words, string(c))
			}
		case separator:
			words = append(words, string(c))
		default:
			*last += string(c)
		}
	}
	return words
}

func sorted(text, separator string) []string {
	if text == "" {
		return nil
	}
	words := strings.Split(text, separator)
	slices.Sort(words)
	return words
}

// TestNewPlaceholder: a flag whose value nobody has thought about is an error.
func TestNewPlaceholder(t *testing.T) {
	var flags struct {
		Colour string `placeholder:"COLOUR"`
	}
	k, err := kong.New(&flags, kong.NoDefaultHelp())
	if err != nil {
		t.Fatal(err)
	}
	_, err = newOption(k.Model.Flags[0])
	if err == nil || !strings.Contains(err.Error(), `"COLOUR"`) {
		t.Errorf("got error %v, want one that names the placeholder", err)
	}
}
