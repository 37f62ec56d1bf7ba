package tests

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestDocs types the console blocks of the documents into a shell and compares the output with that in the documents.
func TestDocs(t *testing.T) {
	t.Parallel()
	documents, err := filepath.Glob("../docs/[^m]*/*.md")
	check.Must(t, err)
	// On a slow machine, commands with deadlines of two seconds, and those that sleep for as long, get more time.
	two := fmt.Sprint(harness.Scaled(2 * time.Second).Seconds())
	longer := strings.NewReplacer("timeout 2 ", "timeout "+two+" ", "after 2s;", "after "+two+"s;", "sleep 2;", "sleep "+two+";")
	for _, document := range append(documents, "../README.md") {
		blocks := consoleBlocks(longer.Replace(readFile(t, document)))
		if len(blocks) == 0 {
			continue
		}
		t.Run(filepath.Base(document), func(t *testing.T) {
			t.Parallel()
			sh := newConsole(t)
			if os.Getuid() == 0 { // hide the state of a server that root runs
				sh.try(t, consoleStep{command: "mount -t tmpfs tmpfs /run"})
			}
			for _, block := range blocks {
				if _, err := exec.LookPath("cc"); err != nil && strings.Contains(fmt.Sprint(block), " cc ") {
					continue
				}
				for _, step := range block {
					sh.try(t, step)
				}
			}
		})
	}
}

// consoleStep is a command of a console block, with the output lines below it.
type consoleStep struct {
	command string
	want    []string
}

var consoleFence = regexp.MustCompile("(?ms)^```console\n(.*?)^```$")

func consoleBlocks(text string) (blocks [][]consoleStep) {
	for _, match := range consoleFence.FindAllStringSubmatch(text, -1) {
		var block []consoleStep
		for line := range strings.Lines(match[1]) {
			line = strings.TrimSuffix(line, "\n")
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				block = append(block, consoleStep{command: command})
			} else if len(block) > 0 {
				block[len(block)-1].want = append(block[len(block)-1].want, line)
			}
		}
		blocks = append(blocks, block)
	}
	return blocks
}

// console is a shell in the top directory with its own PID namespace, home and state directory, so all sandboxes and
// processes belong to the document.
type console struct {
	stdin io.Writer
	lines <-chan string
	got   []string // lines not yet compared
}

var removedCgroup = regexp.MustCompile(`^removed +cgroup `)

const consoleMark = "end-of-the-command"

func newConsole(t *testing.T) *console {
	top, err := filepath.Abs("..")
	check.Must(t, err)
	cmd := contained("bash", "--norc", "--noprofile")
	cmd.Dir = top
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "FIXTURE_SECONDS=") }),
		"HOME="+t.TempDir(), "SBXRUN_STATE_DIR="+filepath.Join(t.TempDir(), "state"), "SBXRUN_DATA_DIR="+filepath.Join(t.TempDir(), "data"),
		"XDG_RUNTIME_DIR="+t.TempDir(), "TMPDIR="+t.TempDir(), // for its mktemp
		"PATH="+filepath.Dir(harness.Binary(t))+":"+harness.Path, harness.Bwrap()) // without the caller's python3
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	out, in, err := os.Pipe()
	check.Must(t, err)
	cmd.Stdout, cmd.Stderr = in, in
	reaped, err := harness.StartCommand(cmd)
	check.Must(t, err)
	check.Must(t, in.Close())
	lines := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(lines)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			select {
			case lines <- scanner.Text():
			case <-done:
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(done)
		_ = stdin.Close() // the shell is PID 1, so all remaining processes end with it
		check.Must(t, cmd.Wait())
		reaped()
		_ = out.Close()
	})
	return &console{stdin: stdin, lines: lines}
}

// try types a command and waits for the wanted lines. Some of them may come from a background command after the shell is
// ready for the next one.
func (c *console) try(t *testing.T, step consoleStep) {
	t.Helper()
	// A command that reads stdin must not read the following commands.
	_, err := fmt.Fprintf(c.stdin, "{ %s\n} </dev/null\necho %s\n", step.command, consoleMark)
	check.Must(t, err)
	want := comparable(step.want)
	deadline := time.After(harness.Bound)
	for marked := false; !marked || len(c.got) < len(want); {
		select {
		case line, ok := <-c.lines:
			switch {
			case !ok:
				t.Fatalf("$ %s\nthe shell has ended; before: %q", step.command, c.got)
			case line == consoleMark:
				marked = true
			case removedCgroup.MatchString(line): // root's cleanup also finds cgroups of other packages' tests
			default:
				c.got = append(c.got, line)
			}
		case <-deadline:
			t.Fatalf("$ %s\nprinted only %q, want %q", step.command, c.got, step.want)
		}
	}
	diff := cmp.Diff(want, comparable(c.got))
	check.Require(t, diff == "", "$ %s\nprints another text than the document has (-document +printed):\n%s", step.command, diff)
	c.got = nil
}

// Values that differ between runs.
var consoleVaries = []struct {
	what *regexp.Regexp
	name string
}{
	{regexp.MustCompile(`\b[0-9a-f]{16}\b`), "ID"},
	{regexp.MustCompile(`\b\d+\.\d+ s\b`), "TIME"},
	{regexp.MustCompile(`\b\d+[sm]\b`), "AGE"},
	{regexp.MustCompile(`\[\d\d/\w+/\d{4} [\d:]{8}\]`), "DATE"},
	{regexp.MustCompile(`^ *\d+ `), "PID "},
	{regexp.MustCompile(` +`), " "},
}

func comparable(lines []string) []string {
	same := make([]string, 0, len(lines))
	for _, line := range lines {
		for _, v := range consoleVaries {
			line = v.what.ReplaceAllString(line, v.name)
		}
		same = append(same, line)
	}
	return same
}

// Links between the documents, and the anchors in them, resolve.
func TestDocLinks(t *testing.T) {
	t.Parallel()
	documents := []string{}
	for _, pattern := range []string{"../*.md", "../docs/*.md", "../docs/*/*.md", "../tests/*.md", "../fixtures/*.md", "../clients/*/*.md"} {
		found, err := filepath.Glob(pattern)
		check.Must(t, err)
		documents = append(documents, found...)
	}
	for _, document := range documents {
		for _, link := range links.FindAllStringSubmatch(prose(t, document), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(link[1], "#")
			target := document
			if path != "" {
				target = filepath.Join(filepath.Dir(document), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", document, link[1], err)
			} else if anchor != "" && !slices.Contains(anchors(t, target), anchor) {
				t.Errorf("%s links to %s, which has no such heading", document, link[1])
			}
		}
	}
}

var (
	links      = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	codeBlocks = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	headings   = regexp.MustCompile(`(?m)^#+ (.*)$`)
	dropped    = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// prose returns a document without its code blocks.
func prose(t *testing.T, document string) string {
	text := harness.ReadFile(t, document)
	return codeBlocks.ReplaceAllString(string(text), "")
}

// anchors returns the names by which GitHub links to the headings of a document.
func anchors(t *testing.T, document string) (names []string) {
	for _, heading := range headings.FindAllStringSubmatch(prose(t, document), -1) {
		text := links.ReplaceAllString(heading[1], "") // a link in a heading
		names = append(names, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(text), ""), " ", "-"))
	}
	return names
}

// The Python function in the guide to back ends returns the documented values.
func TestBackendPython(t *testing.T) {
	t.Parallel()
	text := harness.ReadFile(t, "../docs/guides/backend.md")
	_, code, _ := strings.Cut(string(text), "```python\n")
	code, _, found := strings.Cut(code, "```\n")
	const limited = `"--memory", "256M", "--pids", "64", `
	check.Require(t, found && strings.Contains(code, limited), "backend.md has no such block: %s", code)
	run := func(code string) string {
		t.Helper()
		second := fmt.Sprint(harness.Scaled(time.Second).Seconds())
		cmd := exec.Command("python3", "-c", code+`
print(execute_code("print(6 * 7)", timeout=60))
print(execute_code("import time; print('begun', flush=True); time.sleep(600)", timeout=`+second+`))
print(execute_code("import os; print(os.listdir('.')); raise SystemExit(3)", timeout=60)[:3])
print(execute_code("import os; os.write(1, b'a\\xff')", timeout=60))
`)
		cmd.Env = []string{"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + harness.Path, harness.Bwrap(), "SBXRUN_STATE_DIR=" + filepath.Join(t.TempDir(), "state")}
		out, _ := harness.Command(t, cmd, harness.Bound) // an error shows in the output
		return string(out)
	}
	got := run(code)
	if strings.Contains(got, "RuntimeError: {'code': 'limit'") { // this machine cannot enforce limits
		got = run(strings.Replace(code, limited, "", 1))
	}
	want := "('exited', 0, '42\\n', '')\n('timeout', 124, 'begun\\n', '')\n('exited', 3, '[]\\n')\n('exited', 0, 'a\ufffd', '')\n"
	check.That(t, got == want, "got %s, want %s", got, want)
}

// recipe is how to try a line of the cookbook: commands that prepare the directory, and commands that check the result.
// needs is a program without which it cannot run. REGISTRIES is the address of [registries]. Recipes with limited set are
// tried only where limits can be enforced.
type recipe struct {
	prepare, check, needs string
	limited               bool
}

const (
	pythonJob = `echo 'print(6 * 7)' >job.py`
	committed = `git init -q -b main && echo text >file && git add file && git -c user.name=n -c user.email=e commit -q -m first`
	goModule  = `printf 'module example.org/x\ngo 1.21\n' >go.mod; printf 'package main\nfunc main() { println(42) }\n' >main.go; printf 'package main\nimport "testing"\nfunc TestX(*testing.T) {}\n' >x_test.go`
	gnuMake   = `printf 'all:\n\techo built >out\n' >Makefile`
	cargoLab  = `cargo init -q --vcs none --name x && echo 'lab = "1"' >>Cargo.toml && mkdir .cargo && printf "[source.crates-io]\nreplace-with = 'lab'\n[source.lab]\nregistry = 'sparse+$REGISTRIES/cargo/'\n" >.cargo/config.toml`
	answer    = `grep -qx 42 "$OUT"`
	sudo      = `[ "$(id -u)" = 0 ] || exit 0; mkdir "$HOME/bin"; printf '#!/bin/sh\nexec "$@"\n' >"$HOME/bin/sudo"; chmod +x "$HOME/bin/sudo"; PATH=$HOME/bin:$PATH; `
)

// recipes has every command of the cookbook's shell blocks. A recipe without prepare and check is not tried.
var recipes = map[string]recipe{
	`sbxrun --timeout 60 python3 job.py`: {prepare: pythonJob, check: answer},
	`sbxrun --tools python3 job.py`:      {prepare: pythonJob, check: answer},
	`sbxrun --tools .venv/bin/python job.py`: {
		prepare: pythonJob + `; python3 -m venv --without-pip .venv`, check: answer},
	`sbxrun -w --tools python3 -m pytest`: {
		prepare: `python3 -c 'import pytest' || exit 0; echo 'def test(): pass' >test_x.py`, check: `grep -q '1 passed' "$OUT" && test -d .pytest_cache`},
	`sbxrun -w --tools python3 -m venv .venv`: {prepare: `python3 -c 'import ensurepip'`, check: `.venv/bin/python -m pip --version`, needs: "pip3"},
	`sbxrun -w --tools --net host pip install -r requirements.txt`: {
		prepare: `python3 -m venv .venv && export PATH=$PWD/.venv/bin:$PATH && printf -- "--index-url $REGISTRIES/simple/\nlab\n" >requirements.txt`, check: `.venv/bin/python -c 'import lab'`, needs: "pip3"},
	`sbxrun node app.js`:                            {prepare: `echo 'console.log(6 * 7)' >app.js`, check: answer, needs: "node"},
	`sbxrun --tools node app.js`:                    {prepare: `echo 'console.log(6 * 7)' >app.js`, check: answer, needs: "node"},
	`sbxrun -w --net host npm ci`:                   {prepare: `echo '{"dependencies": {"lab": "1.0.0"}}' >package.json && echo "registry=$REGISTRIES/npm/" >.npmrc && npm install --package-lock-only`, check: `test -d node_modules/lab`, needs: "npm"},
	`sbxrun -w --tools npm test`:                    {prepare: `echo '{"scripts": {"test": "node -p 6*7"}}' >package.json`, check: answer, needs: "npm"},
	`sbxrun --memory 1G --fake-meminfo node app.js`: {prepare: `echo 'console.log(6 * 7)' >app.js`, check: answer, needs: "node", limited: true},
	`sbxrun -w --tools go build ./...`:              {prepare: goModule, check: `echo built`, needs: "go"},
	`sbxrun --tools go test ./...`:                  {prepare: goModule, check: `grep -q ^ok "$OUT"`, needs: "go"},
	`sbxrun -w --net host --env GOPROXY --env GOMODCACHE="$PWD/.modcache" --tools go mod download`: {
		prepare: `printf 'module x\ngo 1.21\n' >go.mod && export GOPROXY="$REGISTRIES/go" && GOMODCACHE=$HOME/cache GONOSUMDB='*' GOFLAGS=-modcacherw go get example.org/lab@v1.0.0`, check: `test -d .modcache/example.org/lab@v1.0.0; chmod -R u+w .modcache`, needs: "go"},
	`sbxrun -w --tools cargo build --offline`: {prepare: `cargo init -q --vcs none --name x`, check: `test -e target/debug/x`, needs: "cargo"},
	`sbxrun -w --tools --net host --env CARGO_HOME="$PWD/.cargo-home" cargo fetch`: {
		prepare: cargoLab, check: `CARGO_HOME=$PWD/.cargo-home cargo metadata --offline --format-version 1 | grep -q lab-1.0.0`, needs: "cargo"},
	`sbxrun -w --tools --env CARGO_HOME="$PWD/.cargo-home" cargo build --offline`: {
		prepare: cargoLab + ` && CARGO_HOME=$PWD/.cargo-home cargo fetch`, check: `test -e target/debug/x`, needs: "cargo"},
	`sbxrun java Main.java`: {prepare: `echo 'class Main { public static void main(String[] a) { System.out.println(42); } }' >Main.java`, check: answer, needs: "javac"},
	`sbxrun --memory 1G java -Xmx700m -jar app.jar`: {
		prepare: `echo 'class Main { public static void main(String[] a) { System.out.println(Runtime.getRuntime().maxMemory() >> 20); } }' >Main.java && javac Main.java && echo 'Main-Class: Main' >manifest && jar cfm app.jar manifest Main.class`,
		check:   `grep -qx 700 "$OUT"`, needs: "javac", limited: true},
	`sbxrun -w --bind "$HOME/.m2-untrusted:/m2" --net host mvn -Dmaven.repo.local=/m2 package`: { // without a plugin, which would come from Maven Central
		prepare: `mkdir "$HOME/.m2-untrusted" && echo "<project><modelVersion>4.0.0</modelVersion><parent><groupId>org.example</groupId><artifactId>lab</artifactId><version>1</version></parent><artifactId>a</artifactId>
<packaging>pom</packaging><repositories><repository><id>lab</id><url>$REGISTRIES/maven</url></repository></repositories></project>" >pom.xml`,
		check: `test -e "$HOME/.m2-untrusted/org/example/lab/1/lab-1.pom"`, needs: "mvn"},
	`sbxrun -w --timeout 600 make -j4`:                   {prepare: gnuMake, check: `grep -q built out`, needs: "make"},
	`sbxrun -w --memory 4G --pids 256 --cpus 2 make -j4`: {prepare: gnuMake, check: `grep -q built out`, needs: "make", limited: true},
	`sbxrun --bind "$PWD/build" cmake --build build`:     {prepare: `printf 'cmake_minimum_required(VERSION 3.10)\nproject(a NONE)\nadd_custom_target(x ALL COMMAND echo done >out)\n' >CMakeLists.txt && cmake -B build`, check: `test -e build/out`, needs: "cmake"},
	`sbxrun git log`: {prepare: committed, check: `grep -q first "$OUT"`, needs: "git"},
	`sbxrun --cwd-root "$(git rev-parse --show-toplevel)" git log`: {prepare: committed + ` && mkdir d && cd d`, check: `grep -q first "$OUT"`, needs: "git"},
	`sbxrun -w --ro-bind "$HOME/.gitconfig:/home/sandbox/.gitconfig" git commit -m message`: {
		prepare: committed + ` && echo more >>file && git add file && git config --global user.name n && git config --global user.email e`, check: `git log | grep -q message`, needs: "git"},
	`sbxrun -w --net host git clone https://example.org/x.git`: {}, // with the network tests
	`sbxrun ./script.sh arg`:                                   {prepare: `printf '#!/bin/sh\necho "$1"\n' >script.sh && chmod +x script.sh`, check: `grep -qx arg "$OUT"`},
	`sbxrun sh -c 'sort input | uniq -c'`:                      {prepare: `printf 'a\nb\na\n' >input`, check: `grep -q '2 a' "$OUT"`},
	`cat data | sbxrun ./filter | wc -l`:                       {prepare: `printf 'a\nb\n' >data && printf '#!/bin/sh\ncat\n' >filter && chmod +x filter`, check: `grep -qx 2 "$OUT"`},
	`sbxrun -t bash`:                                           {prepare: `true`, check: `grep -q exit "$OUT"`},
	`sudo sbxrun --timeout 60 make check`:                      {prepare: sudo + `printf 'check:\n\tid -u\n' >Makefile`, check: `grep -qx 65534 "$OUT"`, needs: "make"},
	`sudo sbxrun -w make install DESTDIR="$PWD/out"`:           {prepare: sudo + `printf 'install:\n\tmkdir $(DESTDIR)\n' >Makefile`, check: `test -d out`, needs: "make"},
	`sudo sbxrun --user 1000:1000 --bind /srv/data ./job`:      {}, // would need a directory in /srv
	`sbxrun start --name web --ready-tcp 8000 --wait-ready python3 -m http.server`: {prepare: `true`, check: `echo 'import urllib.request as r; print(r.urlopen("http://localhost:8000").status)' >client.py
sbxrun exec --timeout 10 web python3 client.py | grep -qx 200 && sbxrun kill web`},
	`sbxrun exec --timeout 10 web python3 client.py`: {}, // with the one before
	`sbxrun kill web`: {},
}

var (
	shellFence    = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")
	shellComments = regexp.MustCompile(` +# .*`)
)

// Every command of the cookbook's shell blocks works as printed, unless recipes says why it is not tried.
func TestCookbook(t *testing.T) {
	t.Parallel()
	documented, prepare := map[string]bool{}, "export REGISTRIES="+registries(t)+"\n"
	var text strings.Builder
	for _, section := range strings.SplitAfter(readFile(t, "../docs/guides/cookbook.md"), "\n## ") {
		if !strings.HasPrefix(section, "pandas") && !strings.HasPrefix(section, "CUDA") { // need an image from a registry, or a GPU
			text.WriteString(section)
		}
	}
	for _, block := range shellFence.FindAllStringSubmatch(text.String(), -1) {
		for line := range strings.Lines(block[1]) {
			line = shellComments.ReplaceAllString(strings.TrimSpace(line), "")
			documented[line] = true
			how, ok := recipes[line]
			check.That(t, ok, "no test of: %s", line)
			if how.check == "" {
				continue
			}
			t.Run(line, func(t *testing.T) {
				t.Parallel()
				if how.needs != "" {
					how.prepare = "command -v " + how.needs + " || exit 0\n" + how.prepare
				}
				if how.limited {
					how.prepare = "sbxrun --cwd none --memory 1G --pids 64 --cpus 1 true || exit 0\n" + how.prepare
				}
				follow(t, prepare+how.prepare, line, how.check)
			})
		}
	}
	for line := range recipes {
		check.That(t, documented[line], "not in the cookbook: %s", line)
	}
}

// follow runs shell commands in a directory of their own; OUT is a file with the output of the documented ones.
func follow(t *testing.T, prepare, documented, verify string) {
	t.Helper()
	dir := harness.Dir(t)
	check.Must(t, os.MkdirAll(dir+"/home/project", 0o755))
	script := "set -e\n{ " + prepare + "\n} >&2\nset +e\n{ " + documented + "\n} >\"$OUT\"\nset -e\n" + verify + "\n"
	cmd := contained("bash", "-c", script)
	cmd.Dir = dir + "/home/project"
	cmd.Env = []string{"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + harness.Path, "HOME=" + dir + "/home", "OUT=" + dir + "/out", "SBXRUN_STATE_DIR=" + dir + "/state", "SBXRUN_DATA_DIR=" + dir + "/data", harness.Bwrap()}
	if goTool, err := exec.LookPath("go"); err == nil {
		cmd.Env[0] += ":" + filepath.Dir(goTool)
		cmd.Env = append(cmd.Env, "GOTOOLCHAIN=local", "GOFLAGS=-buildvcs=false")
	}
	text, err := harness.Command(t, cmd, harness.Bound) // succeeds without a program that the recipe needs
	if err != nil {
		out, _ := os.ReadFile(dir + "/out")
		t.Errorf("%v\n%s%s", err, text, out)
	}
}

// The command in the guide to CI runs tests that use the network, and writes a report.
func TestContinuousIntegration(t *testing.T) {
	t.Parallel()
	_, line, ok := strings.Cut(readFile(t, "../docs/guides/ci.md"), "\n- run: ")
	line, _, _ = strings.Cut(line, "\n")
	check.Require(t, ok, "no command in ci.md")
	follow(t, "command -v make || exit 0\nprintf 'test:\\n\\tpython3 -c \"import urllib.request as r; print(r.urlopen(\\047"+registries(t)+"/npm/lab\\047).status)\"\\n' >Makefile", line,
		`grep -qx 200 "$OUT" && [ "$(jq -r .cause report.json)" = exited ]`)
}

// The grader in the guide to CI gives each submission its verdict.
func TestGrader(t *testing.T) {
	t.Parallel()
	_, text, _ := strings.Cut(readFile(t, "../docs/guides/ci.md"), "## Grading a submission")
	block := shellFence.FindStringSubmatch(text)
	const limited = "--memory 256M --pids 64 "
	check.Require(t, block != nil && strings.Contains(block[1], limited), "no grader in ci.md: %q", block)
	grader := strings.Replace(block[1], "--timeout 5", "--timeout "+fmt.Sprint(harness.Scaled(time.Second).Seconds()), 1)
	unlimited := strings.Replace(grader, limited, "", 1)
	for _, tt := range []struct{ submission, verdict string }{
		{`print(int(input()) * 2)`, "passed"},
		{`print(int(input()) * 3)`, "failed: wrong answer"},
		{`raise SystemExit(1)`, "failed: wrong answer"},
		{`raise SystemExit(124)`, "failed: wrong answer"},
		{`while True: pass`, "failed: timeout"},
		{`while True: print("x" * 1000)`, "failed: output-limit"},
		{`import os; os.kill(os.getpid(), 11)`, "failed: signaled"},
		{`print(42); open("out.txt", "w").write("kept")`, "passed"},
	} {
		t.Run(tt.submission, func(t *testing.T) {
			t.Parallel()
			check := `grep -qx '` + tt.verdict + `' "$OUT"`
			if strings.Contains(tt.submission, "kept") {
				check += ` && grep -q kept results/out.txt`
			}
			follow(t, `echo 21 >input; echo 42 >expected; cat >submission.py <<'E'
`+tt.submission+`
E
sbxrun --cwd none `+limited+`true || : >unlimited`, "if [ -e unlimited ]; then\n"+unlimited+"else\n"+grader+"fi", check)
		})
	}
}
