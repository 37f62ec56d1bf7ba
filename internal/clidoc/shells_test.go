package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/tests/check"
)

// wanted lists the words that every shell proposes at the end of a command line, with … only some of them. [place] has
// the files and programs.
var wanted = []struct{ line, want string }{
	// First word. Without a letter only sbxrun's commands are proposed, not all programs.
	{"sbxrun ", "run serve start exec cp diff apply ps inspect wait logs kill snapshot image cleanup volume stats gateway nodes mcp doctor help version"},
	{"sbxrun he", "help …"},
	{"sbxrun help ", "run serve start exec cp diff apply ps inspect wait logs kill snapshot image cleanup volume stats gateway nodes mcp doctor"},
	{"sbxrun help exec ", ""},
	{"sbxrun version ", ""},
	{"sbxrun sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun doctor-of-nothing", ""},
	{"sbxrun --time", "--timeout"},
	{"sbxrun --ro-bind-", "--ro-bind-try"},

	// Values of flags, and words after them.
	{"sbxrun --timeout ", ""},
	{"sbxrun --timeout 5 --print-c", "--print-command"},
	{"sbxrun --ro-bind /a:/b --print-c", "--print-command"},
	{"sbxrun --timeout 5 sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun --timeout 5 ", "sbxrun-of-test …"},
	{"sbxrun -w ", "sbxrun-of-test …"},
	{"sbxrun --timeout 5 -- ", "sbxrun-of-test …"},
	{"sbxrun --timeout 5 -- sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun --timeout 1 doctor-of-nothing", ""},
	{"sbxrun --net ", "none host"},
	{"sbxrun --net h", "host"},
	{"sbxrun --net host --signal US", "USR1 USR2"},
	{"sbxrun --env-file job", "job.py job.env"},
	{"sbxrun --env-file=job.e", "job.env"},
	{"sbxrun --workdir b", "bin"},
	{"sbxrun --ro-bind job.p", "job.py"},
	{"sbxrun --env SBXRUN_TEST_V", "SBXRUN_TEST_VARIABLE"},
	{"sbxrun start --ready-t", "--ready-tcp --ready-timeout"},
	{"sbxrun start --name x doctor-of-nothing", ""},
	{"sbxrun start -- sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun run --ready", ""},

	// Arguments of the sandboxed command.
	{"sbxrun cat job.e", "job.env"},
	{"sbxrun -- cat job.e", "job.env"},

	// Names of running or all sandboxes.
	{"sbxrun kill ", "web worker"},
	{"sbxrun kill we", "web"},
	{"sbxrun kill web --signal KILL w", "web worker"},
	{"sbxrun kill web --all worker w", "web worker"},
	{"sbxrun kill web --signal U", "USR1 USR2"},
	{"sbxrun kill -- web --gr", ""},
	{"sbxrun kill -- w", "web worker"},
	{"sbxrun wait ", "ended web worker"},
	{"sbxrun wait --timeout 5 e", "ended"},
	{"sbxrun wait web ", ""},
	{"sbxrun inspect web e", "ended"},
	{"sbxrun logs --stream std", "stdout stderr"},
	{"sbxrun logs e", "ended"},
	{"sbxrun logs web/", "web/3f9c web/77aa"},
	{"sbxrun wait --timeout 5 web/7", "web/77aa"},
	{"sbxrun kill worker web/", "web/77aa"},
	{"sbxrun exec web/", ""},
	{"sbxrun ps ", "web worker"},
	{"sbxrun ps --status r", "running"},
	{"sbxrun ps web w", ""},
	{"sbxrun cleanup --old", "--older-than"},
	{"sbxrun cp we", "web:"},
	{"sbxrun cp job.p", "job.py"},
	{"sbxrun cp web:/tmp/x job.e", "job.env"},
	{"sbxrun stats w", ""},
	{"sbxrun snapshot ", "create ls rm export import"},
	{"sbxrun snapshot cr", "create"},
	{"sbxrun snapshot create ", "web worker"},
	{"sbxrun snapshot nosuch --js", ""},
	{"sbxrun volume ", "ls rm export"},
	{"sbxrun doctor ", ""},
	{"sbxrun doctor --json job", ""},

	// exec takes a sandbox and then a command.
	{"sbxrun exec --det", "--detach"},
	{"sbxrun exec ", "web worker"},
	{"sbxrun exec -- w", "web worker"},
	{"sbxrun exec web ", "sbxrun-of-test …"},
	{"sbxrun exec web sbxrun-of-no", ""},
	{"sbxrun exec web sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun exec -- web sbxrun-of-t", "sbxrun-of-test"},
	{"sbxrun exec --timeout 5 web -- cat job.e", "job.env"},
}

// wantedOfBash are proposals of bash only, where : also ends a word.
var wantedOfBash = []struct{ line, want string }{{"sbxrun --ro-bind /x:job.p", "job.py"}, {"sbxrun --ro-bind=/x:b", "bin"}}

// TestShells completes command lines in shells, with the files in their usual directories, and on a terminal if the
// shell needs one.
func TestShells(t *testing.T) {
	for name, proposed := range map[string]func(*testing.T, place, []string) []string{
		"bash": bash, "bash with bash-completion": bashCompletion, "zsh": zsh, "fish": fish,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			wanted := wanted
			if strings.HasPrefix(name, "bash") {
				wanted = slices.Concat(wanted, wantedOfBash)
			}
			var lines []string
			for _, w := range wanted {
				lines = append(lines, w.line)
			}
			got := proposed(t, newPlace(t), lines)
			for i, w := range wanted {
				want, words := set(w.want), set(got[i])
				if some, ok := strings.CutSuffix(w.want, " …"); ok {
					if want = set(some); words[some] {
						words = want
					}
				}
				check.NoDiff(t, cmp.Diff(want, words), "%q (-want +got)", w.line)
			}
		})
	}
}

// set returns the words of a text, each once.
func set(text string) map[string]bool {
	words := map[string]bool{}
	for _, word := range strings.Fields(text) {
		words[word] = true
	}
	return words
}

// asCompletion is a variable that makes the test binary run as sbxrun __complete.
const asCompletion = "SBXRUN_TEST_AS_COMPLETION"

func TestMain(m *testing.M) {
	if os.Getenv(asCompletion) != "" {
		fmt.Println(strings.Join(cli.Complete(os.Args[1:]), "\n"))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// place is the environment of a shell: a home directory, which is the current one, with some files, a PATH with some
// programs, and a variable.
type place struct {
	home, script string
	env          []string
}

func newPlace(t *testing.T) place {
	t.Helper()
	completions, err := filepath.Abs("completions")
	check.Must(t, err)
	p := place{home: t.TempDir(), script: completions}
	self, err := os.Executable()
	check.Must(t, err)
	programs := t.TempDir()
	for _, f := range []struct{ name, text string }{
		{filepath.Join(p.home, "job.py"), ""},
		{filepath.Join(p.home, "job.env"), ""},
		{filepath.Join(p.home, "bin/tool"), ""},
		{filepath.Join(programs, "sbxrun-of-test"), "#!/bin/sh\n"},
		// An sbxrun with some sandboxes.
		{filepath.Join(programs, "sbxrun"), `#!/bin/sh
			[ "$1" != __complete ] || { shift; exec env ` + asCompletion + `=1 ` + self + ` "$@"; }
			case $* in
			"ps --names") printf 'web\nworker\n' ;;
			"ps --names --all") printf 'ended\nweb\nworker\n' ;;
			"ps --names web") echo web/77aa ;;
			"ps --names --all web") printf 'web/3f9c\nweb/77aa\n' ;;
			*) echo "sbxrun $*: unexpected"; exit 125 ;;
			esac`},
	} {
		put(t, f.name, f.text)
	}
	p.env = []string{"PATH=" + programs + ":/usr/bin:/bin", "HOME=" + p.home, "TERM=dumb", "LC_ALL=C", "SBXRUN_TEST_VARIABLE=1"}
	return p
}

func put(t *testing.T, name, text string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	check.Must(t, os.WriteFile(name, []byte(text), 0o755))
}

// bash inserts all proposals into the line and prints it.
const bashrc = `
PS1=
bind 'set bell-style none'
bind 'set enable-bracketed-paste off'
bind 'set completion-query-items 0'
bind '"\C-xa": insert-completions'
_printed() { printf '\n\001%s\002\n' "$READLINE_LINE"; READLINE_LINE= READLINE_POINT=0; }
bind -x '"\C-xp": _printed'
`

func bash(t *testing.T, p place, lines []string) []string {
	return bashWith(t, p, lines, "source "+filepath.Join(p.script, "sbxrun.bash"))
}

func bashCompletion(t *testing.T, p place, lines []string) []string {
	// bash loads the file at the first completion of the command.
	put(t, filepath.Join(p.home, "user/completions/sbxrun"), read(t, p.script, "sbxrun.bash"))
	p.env = append(p.env, "BASH_COMPLETION_USER_DIR="+filepath.Join(p.home, "user"))
	return bashWith(t, p, lines, "source /usr/share/bash-completion/bash_completion")
}

func bashWith(t *testing.T, p place, lines []string, load string) (proposed []string) {
	t.Helper()
	put(t, filepath.Join(p.home, "rc"), load+bashrc)
	s := interactive(t, p, "bash", "--noprofile", "--rcfile", filepath.Join(p.home, "rc"), "-i")
	for _, line := range lines {
		got := s.ask(line + "\x18a\x18p")
		// bash completes the last word, which also begins after = and :.
		cut := strings.LastIndexAny(line, " =:") + 1
		if got == line {
			got = line[:cut] // no proposals
		}
		proposed = append(proposed, strings.TrimPrefix(got, line[:cut]))
	}
	return proposed
}

// zsh records the words added to the list of proposals.
const zshrc = `
PS1=
zstyle ':completion:*' list-max 0
autoload -Uz compinit
compinit -D -u
compadd() {
	if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then # it only stores
		builtin compadd "$@"
		return
	fi
	local -a matching
	builtin compadd -A matching "$@"
	noted+=($matching)
	builtin compadd "$@"
}
_noted() { _main_complete; compstate[insert]= compstate[list]= }
zle -C noted complete-word _noted
_printed() {
	typeset -ga noted=()
	zle noted
	printf '\n\001%s\002\n' "$noted"
	BUFFER=
}
zle -N printed _printed
bindkey '^Xp' printed
`

func zsh(t *testing.T, p place, lines []string) (proposed []string) {
	t.Helper()
	put(t, filepath.Join(p.home, ".zshrc"), "fpath=("+p.script+" $fpath)"+zshrc)
	s := interactive(t, p, "zsh", "-d", "-i")
	for _, line := range lines {
		var words []string
		for _, word := range strings.Fields(s.ask(line + "\x18p")) {
			// zsh proposes flags where only flags can follow.
			if !strings.HasSuffix(line, " ") || !strings.HasPrefix(word, "-") {
				words = append(words, word)
			}
		}
		proposed = append(proposed, strings.Join(words, " "))
	}
	return proposed
}

// fish prints its proposals.
func fish(t *testing.T, p place, lines []string) (proposed []string) {
	t.Helper()
	put(t, filepath.Join(p.home, ".config/fish/completions/sbxrun.fish"), read(t, p.script, "sbxrun.fish"))
	cmd := exec.Command(program(t, "fish"), append([]string{"-c", `for line in $argv; complete -C $line | string replace -r '\t.*' ''; echo =; end`}, lines...)...)
	cmd.Dir, cmd.Env = p.home, p.env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	check.Require(t, err == nil && stderr.Len() <= 0, "fish: %v\n%s", err, &stderr)
	all := strings.Split(string(out), "=\n")
	for i, line := range lines {
		// A proposal is a whole word, which need not begin with the typed text.
		typed := line[strings.LastIndex(line, " ")+1:]
		var words []string
		for _, word := range strings.Fields(all[i]) {
			if strings.HasPrefix(word, typed) {
				_, value, found := strings.Cut(word, "=")
				words = append(words, strings.TrimSuffix(map[bool]string{true: value, false: word}[found], "/"))
			}
		}
		proposed = append(proposed, strings.Join(words, " "))
	}
	return proposed
}

// program returns the path of a shell.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	check.Require(t, err == nil, "%v; ./setup.sh test installs it", err)
	return path
}

// session is a shell on a terminal.
type session struct {
	t       *testing.T
	ptmx    *os.File
	pending []byte
}

func interactive(t *testing.T, p place, shell string, args ...string) *session {
	t.Helper()
	cmd := exec.Command(program(t, shell), args...)
	cmd.Dir, cmd.Env = p.home, p.env
	ptmx, err := pty.Start(cmd)
	check.Must(t, err)
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		ptmx.Close()
	})
	return &session{t: t, ptmx: ptmx}
}

// ask types a text and returns the output between the bytes 1 and 2.
func (s *session) ask(keys string) string {
	s.t.Helper()
	_, err := s.ptmx.WriteString(keys)
	check.Require(s.t, err == nil, "%v", err)
	_ = s.ptmx.SetReadDeadline(time.Now().Add(3 * time.Minute)) // instead of go test's timeout
	for {
		if _, after, ok := bytes.Cut(s.pending, []byte{1}); ok {
			if answer, rest, ok := bytes.Cut(after, []byte{2}); ok {
				s.pending = rest
				return string(answer)
			}
		}
		b := make([]byte, 4096)
		n, err := s.ptmx.Read(b)
		check.Require(s.t, err == nil, "%q: %v after %q", keys, err, s.pending)
		s.pending = append(s.pending, b[:n]...)
	}
}
