package main

import (
	"bytes"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/cli"
)

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

// pages are the man pages there are, and their sources.
func pages(t *testing.T) map[string]string {
	t.Helper()
	pages, err := manPages("../..")
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

// TestEverywhere: every flag and every command of the definition is in each
// completion, and in the command's man page, in the form that belongs there; and
// the page of all has every command.
func TestEverywhere(t *testing.T) {
	completions, man := write(t, "completions"), write(t, "man")
	for _, file := range []string{"man", "sbxrun.bash", "_sbxrun", "sbxrun.fish"} {
		for _, c := range cli.Commands() {
			name, dir := file, completions
			if name == "man" {
				name, dir = pageOf(c.Name, pages(t)), man
			}
			text := read(t, dir, name)
			if !regexp.MustCompile(`\b` + c.Name + `\b`).MatchString(text) {
				t.Errorf("%s: no command %s", name, c.Name)
			}
			for _, f := range c.Flags {
				for _, word := range f.Spellings() {
					want := regexp.QuoteMeta(word) + `([^a-z-]|$)`
					switch file {
					case "man":
						want = `\\fB` + regexp.QuoteMeta(strings.ReplaceAll(word, "-", `\-`)) + `\\fP`
					case "sbxrun.fish":
						letter := map[bool]string{true: "-l ", false: "-s "}[strings.HasPrefix(word, "--")]
						want = `__sbxrun_at "\*flags ` + c.Name + ` \*"'.* ` + letter + strings.TrimLeft(word, "-") + " "
					}
					if !regexp.MustCompile(`(?m)` + want).MatchString(text) {
						t.Errorf("%s: no %s of sbxrun %s", name, word, c.Name)
					}
				}
				if file != "sbxrun.bash" {
					flat := strings.NewReplacer(`\-`, "-", `'\''`, "'", `\`, "").Replace(text)
					if !strings.Contains(flat, strings.ReplaceAll(f.Help(), `\`, "")) {
						t.Errorf("%s: the help of --%s is not there: %s", name, f.Name, f.Help())
					}
				}
			}
		}
	}
}

// TestManSections: each page has the sections people look for, in the usual
// order, and a synopsis from the definition.
func TestManSections(t *testing.T) {
	dir := write(t, "man")
	for name := range pages(t) {
		page := read(t, dir, name)
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^\.SH (.*)$`).FindAllStringSubmatch(page, -1) {
			got = append(got, m[1])
		}
		want := []string{"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"}
		if name == "sbxrun.1" {
			want = []string{"NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXIT STATUS", "SIGNALS",
				"ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: sections (-want +got):\n%s", name, diff)
		}
		if strings.Contains(page, "{{") {
			t.Errorf("%s: a template action was left in the page", name)
		}
	}
}

// TestManPages: every command but run and doctor, which sbxrun.1 is about, has a
// page, which begins as pages do; no page is left of a command that is gone; and
// pages refer only to pages that exist.
func TestManPages(t *testing.T) {
	all := pages(t)
	want := []string{"sbxrun.1"}
	for _, c := range cli.Commands() {
		if c.Name != "run" && c.Name != "doctor" {
			want = append(want, "sbxrun-"+c.Name+".1")
		}
	}
	slices.Sort(want)
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(all))); diff != "" {
		t.Fatalf("pages (-want +got):\n%s", diff)
	}
	for name, source := range all {
		text := read(t, source)
		title := strings.TrimSuffix(name, ".1")
		if !strings.HasPrefix(text, title+" 1 ") || !strings.Contains(text, "# NAME\n\n"+title+" - ") {
			t.Errorf("%s does not begin as the page of %s", source, title)
		}
		if command, found := strings.CutPrefix(title, "sbxrun-"); found && !strings.Contains(text, `{{synopsis "`+command+`"}}`) {
			t.Errorf("%s: no synopsis of %s", source, command)
		}
		for _, m := range regexp.MustCompile(`\*\*(sbxrun[a-z-]*)\*\*\(1\)`).FindAllStringSubmatch(text, -1) {
			if all[m[1]+".1"] == "" {
				t.Errorf("%s refers to %s(1), which does not exist", source, m[1])
			}
		}
	}
	general := read(t, all["sbxrun.1"])
	for name := range all {
		if title := strings.TrimSuffix(name, ".1"); title != "sbxrun" && !strings.Contains(general, "**"+title+"**(1)") {
			t.Errorf("sbxrun.1 does not refer to %s", title)
		}
	}
}

// TestManIsClean: man(7) as groff understands it, where there is a groff.
func TestManIsClean(t *testing.T) {
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("no groff here: not checked")
		return
	}
	dir := write(t, "man")
	for name := range pages(t) {
		out, err := exec.Command(groff, "-man", "-ww", "-z", "-Tutf8", filepath.Join(dir, name)).CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("groff: %v\n%s", err, out)
		}
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
	path := fakeSbxrun(t)
	for _, tt := range []struct{ line, want string }{
		{"sbxrun --time", "--timeout"},
		{"sbxrun --ro-bind-", "--ro-bind-try"},
		{"sbxrun run --print-c", "--print-command"},
		{"sbxrun --timeout 5 --print-c", "--print-command"},
		{"sbxrun --timeout=5 --print-c", "--print-command"},
		{"sbxrun --ro-bind /a:/b --print-c", "--print-command"},
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
		// Names of sandboxes: of those that run, or of all.
		{"sbxrun kill ", "web worker"},
		{"sbxrun kill we", "web"},
		{"sbxrun kill web --signal KILL w", "web worker"},
		{"sbxrun kill web --signal ", "TERM INT HUP QUIT USR1 USR2 KILL"},
		{"sbxrun kill web --gr", "--grace"},
		{"sbxrun kill -- web --gr", ""},
		{"sbxrun kill -- w", "web worker"},
		{"sbxrun wait ", "ended web worker"},
		{"sbxrun wait --timeout 5 e", "ended"},
		{"sbxrun wait web ", ""},
		{"sbxrun wait web --r", "--ready"},
		{"sbxrun inspect web e", "ended"},
		{"sbxrun logs --stream std", "stdout stderr"},
		{"sbxrun logs --stream=stdo", "stdout"},
		{"sbxrun ps ", ""},
		{"sbxrun ps --status r", "running"},
		{"sbxrun ps w", ""},
		{"sbxrun cleanup --old", "--older-than"},
		{"sbxrun cleanup w", ""},
		{"sbxrun run --ready", ""},
		{"sbxrun start --ready-t", "--ready-tcp --ready-timeout"},
		{"sbxrun start --name x doctor-of-nothing", ""},
		{"sbxrun start cat --time", ""},
		{"sbxrun start -- --time", ""},
		// exec has a sandbox first, and then the command.
		{"sbxrun exec --det", "--detach"},
		{"sbxrun exec w", "web worker"},
		{"sbxrun exec --timeout 5 -q w", "web worker"},
		{"sbxrun exec -- w", "web worker"},
		{"sbxrun exec web -", "--"},
		{"sbxrun exec web sbxrun-of-no", ""},
		{"sbxrun exec web sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec web -- sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec -- web sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec web cat --time", ""},
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
			cmd.Env = append(os.Environ(), "SBXRUN_TEST_VARIABLE=1", path)
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

// fakeSbxrun is a PATH with an sbxrun that knows some sandboxes, and with a
// program to complete.
func fakeSbxrun(t *testing.T) (path string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"sbxrun": `#!/bin/sh
			case $* in
			"ps --names") printf 'web\nworker\n' ;;
			"ps --all --names") printf 'ended\nweb\nworker\n' ;;
			*) echo "sbxrun $*: unexpected"; exit 125 ;;
			esac`,
		"sbxrun-of-test": "#!/bin/sh",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return "PATH=" + dir + ":" + os.Getenv("PATH")
}

// TestFish completes command lines with a real fish, where there is one.
func TestFish(t *testing.T) {
	fish, err := exec.LookPath("fish")
	if err != nil {
		t.Log("no fish here: not checked")
		return
	}
	script := filepath.Join(write(t, "completions"), "sbxrun.fish")
	path := fakeSbxrun(t)
	for _, tt := range []struct{ line, want string }{
		{"sbxrun --time", "--timeout"},
		{"sbxrun doct", "doctor"},
		{"sbxrun --net ", "none host"},
		{"sbxrun -q sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun --timeout 5 -- sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun cat --no-such", ""},
		{"sbxrun doctor ", ""},
		{"sbxrun kill ", "web worker"},
		{"sbxrun kill web --signal KILL w", "web worker"},
		{"sbxrun kill web --gr", "--grace"},
		{"sbxrun kill -- web --gr", ""},
		{"sbxrun wait ", "ended web worker"},
		{"sbxrun wait web ", ""},
		{"sbxrun wait web --r", "--ready"},
		{"sbxrun inspect web e", "ended"},
		{"sbxrun ps --status r", "running"},
		{"sbxrun ps w", ""},
		{"sbxrun start --ready-t", "--ready-tcp --ready-timeout"},
		{"sbxrun start sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun start -- sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec --det", "--detach"},
		{"sbxrun exec w", "web worker"},
		{"sbxrun exec --timeout 5 -q w", "web worker"},
		{"sbxrun exec -- w", "web worker"},
		{"sbxrun exec web sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec web -- sbxrun-of-t", "sbxrun-of-test"},
		{"sbxrun exec -- web sbxrun-of-t", "sbxrun-of-test"},
	} {
		cmd := exec.Command(fish, "--no-config", "-c", `source $argv[1]; complete -C "$argv[2]"`, script, tt.line)
		cmd.Env = append(os.Environ(), path)
		cmd.Dir = t.TempDir()
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: fish: %v\n%s", tt.line, err, out)
		}
		described := regexp.MustCompile(`(?m)\t.*$`).ReplaceAllString(strings.TrimSuffix(string(out), "\n"), "")
		if diff := cmp.Diff(sorted(tt.want, " "), sorted(described, "\n")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.line, diff)
		}
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

// TestReadme: README's table has every command and what it does.
func TestReadme(t *testing.T) {
	want := "| command | |\n|---|---|\n"
	for _, c := range cli.Commands() {
		want += "| `" + c.Name + "` | " + c.Help() + " |\n"
	}
	if readme := read(t, "../../README.md"); !strings.Contains(readme, want+"\n") {
		t.Errorf("README.md lacks the table\n%s", want)
	}
}

// TestTables: the flags that tables of docs are about exist.
func TestTables(t *testing.T) {
	known := map[string]bool{}
	for _, c := range cli.Commands() {
		for _, f := range c.Flags {
			known["--"+f.Name] = true
		}
	}
	sources, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	rows := 0
	for _, source := range sources {
		for _, row := range regexp.MustCompile("(?m)^\\| `--.*").FindAllString(read(t, source), -1) {
			rows++
			cell, _, _ := strings.Cut(row[2:], "|")
			for _, flag := range regexp.MustCompile("--[a-z-]+").FindAllString(cell, -1) {
				if !known[flag] {
					t.Errorf("%s: no flag %s: %s", source, flag, row)
				}
			}
		}
	}
	if rows == 0 {
		t.Error("no table of flags was found")
	}
}

// TestNewPlaceholder: a flag whose value nobody has thought about is an error.
func TestNewPlaceholder(t *testing.T) {
	const known = "DIR"
	was := kinds[known]
	delete(kinds, known)
	defer func() { kinds[known] = was }()
	for name := range shells {
		if _, err := completion(shells[name]); err == nil || !strings.Contains(err.Error(), `"DIR"`) {
			t.Errorf("%s: error %v, want one that names the placeholder", name, err)
		}
	}
}

// TestCommandLines: the command lines that the documents show are right.
func TestCommandLines(t *testing.T) {
	sources, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	blocks := regexp.MustCompile("(?ms)^```(?:sh|console|ini|yaml|crontab)\n(.*?)^```$")
	calls := regexp.MustCompile(`(?m)(?:^|[\s/=(])(sbxrun .*)$`)
	tried := 0
	for _, source := range append(sources, "../../README.md") {
		for _, block := range blocks.FindAllStringSubmatch(read(t, source), -1) {
			text := strings.ReplaceAll(block[1], "\\\n", "")
			for _, call := range calls.FindAllStringSubmatch(text, -1) {
				if strings.HasPrefix(call[1], "sbxrun: ") { // a message
					continue
				}
				for _, args := range shellWords(t, call[1]) {
					tried++
					if err := parse(args); err != nil {
						t.Errorf("%s: %s: %v", filepath.Base(source), call[1], err)
					}
				}
			}
		}
	}
	if tried < 50 {
		t.Errorf("%d command lines were found, want at least 50", tried)
	}
}

// shellWords returns the arguments of each sbxrun of a shell's command line, in which
// nothing else is executed.
func shellWords(t *testing.T, line string) (calls [][]string) {
	t.Helper()
	cmd := exec.Command("bash", "-c", `sbxrun() { printf '%s\0' "$@" $'\1' >&3; }; exec 3>&1 >/dev/null 2>&1; PATH=; eval "$0"`, line)
	out, _ := cmd.Output() // its exit code is that of whatever follows
	for _, call := range strings.Split(strings.TrimSuffix(string(out), "\x01\x00"), "\x01\x00") {
		calls = append(calls, strings.Split(strings.TrimSuffix(call, "\x00"), "\x00"))
	}
	return calls
}

// parse judges a command line, the name of the command first.
func parse(args []string) error {
	commands := reflect.TypeFor[cli.CLI]()
	at := 0
	for i, c := range cli.Commands() {
		if c.Name == args[0] {
			at, args = i, args[1:]
			break
		}
	}
	_, err := cli.Parse(reflect.New(commands.Field(at).Type).Interface(), args)
	if errors.Is(err, cli.ErrHelp) {
		return nil
	}
	return err
}
