package setup

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

const (
	passes = "=== RUN   TestGood\\n    good.go:1: all is well\\n--- PASS: TestGood (0.00s)\\nPASS\\nok  \\tx/good\\t0.1s\\n"
	fails  = passes + "=== RUN   TestBad\\n    bad.go:1: the reason\\n--- FAIL: TestBad (0.00s)\\nFAIL\\nFAIL\\tx/bad\\t0.1s\\n"
	skips  = passes + "=== RUN   TestShy\\n    shy.go:1: not today\\n--- SKIP: TestShy (0.00s)\\nPASS\\nok  \\tx/shy\\t0.1s\\n"
)

// fakes is a directory of programs, first in PATH, and a copy of the scripts without packages and virtual machine.
type fakes struct {
	t         *testing.T
	dir, path string
	env       []string
}

func newFakes(t *testing.T, goTest string) *fakes {
	f := &fakes{t: t, dir: t.TempDir()}
	f.path = filepath.Join(f.dir, "path")
	scripts, err := filepath.Glob("*.sh")
	check.Must(t, err)
	for _, name := range append(scripts, "failures.awk", "../../setup.sh") {
		text, err := os.ReadFile(name)
		check.Must(t, err)
		put(t, filepath.Join(f.dir, "tree/internal/setup", name), string(text))
	}
	for _, name := range []string{"vm/test.sh", "dist/test.sh", "bwraps/test.sh", "mcp.sh", "agents.sh", "openapi.sh", "helper.sh", "distribution.sh", "podman.sh", "projects.sh", "images.sh"} {
		put(t, filepath.Join(f.dir, "tree/internal/setup", name), "#!/bin/sh\n")
	}
	put(t, filepath.Join(f.dir, "tree/internal/clidoc/completions/sbxrun.bash"), "")
	put(t, filepath.Join(f.dir, "tree/tests/manifests/go.mod"), "")
	put(t, filepath.Join(f.dir, "tree/tests/bench/go.mod"), "")
	put(t, filepath.Join(f.dir, "tree/tests/cluster/go.mod"), "")
	put(t, filepath.Join(f.dir, "tree/internal/fuzz_test.go"), "func FuzzSome(f *testing.F) {\n")
	fails := ""
	if strings.Contains(goTest, "--- FAIL") {
		fails = "exit 1"
	}
	f.program("gofmt", "")
	f.program("go", `case "$1 $2" in
		"env CC") echo "$FAKE_CC" ;;
		"env CGO_ENABLED") echo 1 ;;
		"list ./...") printf 'x/good\nx/tests\nx/tests/faults\n' ;;
		test*) echo "$SBXRUN_SOAK: $*" >>`+f.dir+`/log; printf '`+goTest+`'; `+fails+` ;;
		vet* | run*) ;;
		"-C tests/manifests" | "-C tests/cluster") `+fails+` ;;
		*) exit 2 ;;
		esac`)
	return f
}

func (f *fakes) program(name, script string) {
	put(f.t, filepath.Join(f.path, name), "#!/bin/sh\n"+script+"\n")
}

// run runs a script and returns all its output.
func (f *fakes) run(script string, args ...string) (code int, out string) {
	f.t.Helper()
	cmd := exec.Command("/bin/sh", append([]string{filepath.Join(f.dir, "tree/internal/setup", script)}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+f.path+":/usr/bin:/bin", "TMPDIR="+f.dir, "SBXRUN_TESTS_NO_SKIP=", "SBXRUN_TESTS_SLOW=", "SBXRUN_SOAK=", "SBXRUN_TESTS_MACHINE=1")
	cmd.Env = append(cmd.Env, f.env...)
	text, err := cmd.CombinedOutput()
	check.Require(f.t, cmd.ProcessState != nil, "%v", err)
	left, _ := filepath.Glob(filepath.Join(f.dir, "sbxrun-*"))
	check.That(f.t, len(left) == 0, "left behind: %q", left)
	return cmd.ProcessState.ExitCode(), string(text)
}

// log returns the calls of go test.
func (f *fakes) log() string {
	text, _ := os.ReadFile(filepath.Join(f.dir, "log")) // none if it was not called
	return string(text)
}

// suite.sh summarises the output of go test and finds failures and skipped tests.
func TestSuite(t *testing.T) {
	const ok = "ok  \tx/good\t0.1s\n"
	for _, tt := range []struct {
		name   string
		output string
		strict bool
		code   int
		want   string
	}{
		{name: "all pass", output: passes, want: ok + "test: ok here: 1 passed, 0 failed, 0 skipped\n"},
		{name: "failure", output: fails, code: 1,
			want: ok + "FAIL\tx/bad\t0.1s\n    bad.go:1: the reason\n--- FAIL: TestBad (0.00s)\nFAIL\tx/bad\t0.1s\ntest: FAILED here: 1 passed, 1 failed, 0 skipped\n"},
		{name: "skip", output: skips,
			want: ok + "ok  \tx/shy\t0.1s\n    shy.go:1: not today\n--- SKIP: TestShy (0.00s)\ntest: ok here: 1 passed, 0 failed, 1 skipped\n"},
		{name: "skip in CI", output: skips, strict: true, code: 1,
			want: ok + "ok  \tx/shy\t0.1s\n    shy.go:1: not today\n--- SKIP: TestShy (0.00s)\ntest: FAILED here: 1 passed, 0 failed, 1 skipped\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFakes(t, tt.output)
			if tt.strict {
				f.env = append(f.env, "SBXRUN_TESTS_NO_SKIP=1")
			}
			code, out := f.run("suite.sh", "here", "-p", "3", "x/some")
			// grep may show a passed test's line before a skipped one.
			out = strings.ReplaceAll(out, "ok  \tx/good\t0.1s\n    shy", "    shy")
			diff := cmp.Diff(tt.want, out)
			check.That(t, code == tt.code && diff == "", "exit code %d, want %d (-want +got):\n%s", code, tt.code, diff)
			got, want := f.log(), ": test -v -count=1 -timeout 30m -p 3 x/some\n"
			check.That(t, got == want, "go %q, want %q", got, want)
		})
	}
}

// test.sh runs the quick tests of all packages at once, with few repetitions.
func TestQuick(t *testing.T) {
	f := newFakes(t, passes)
	f.program("id", "echo 1000")
	code, out := f.run("test.sh")
	want := "ok  \tx/good\t0.1s\ntest: ok as uid 1000: 1 passed, 0 failed, 0 skipped\n"
	check.That(t, code == 0 && out == want, "exit code %d: %s", code, out)
	called := regexp.MustCompile(`^: test -v -count=1 -timeout 30m -trimpath -ldflags=-s -w -vet=off -p 3 -parallel 6 -short -skip \^Test\(([\w|]+)\)\$ \./tests/faults \./tests \./\.\.\.\n$`)
	later := called.FindStringSubmatch(f.log())
	check.Require(t, later != nil, "go %q, want %q", f.log(), called)
	sources := sources(t)
	for _, name := range strings.Split(later[1], "|") {
		check.That(t, strings.Contains(sources, "\nfunc Test"+name+"("), "test.sh leaves out Test%s, which no test is called", name)
	}
	f = newFakes(t, fails)
	code, out = f.run("test.sh")
	check.That(t, code == 1, "exit code %d when tests fail: %s", code, out)
}

// check.sh repeats what test.sh tries seldom: every test that calls harness.Soak, directly or not.
func TestRare(t *testing.T) {
	lists, err := os.ReadFile("later.sh")
	check.Must(t, err)
	names := func(list string) (all []string) {
		for _, m := range regexp.MustCompile(`(?m)^`+list+`=["'](?:\$\w+\|)?([\w|]+)["']$`).FindAllSubmatch(lists, -1) {
			all = append(all, strings.Split(string(m[1]), "|")...)
		}
		return all
	}
	for _, name := range names("longest") {
		check.That(t, slices.Contains(names("later"), name), "Test%s is left to nightly.sh, but not left out by test.sh", name)
	}
	sources := sources(t)
	for _, name := range names("anyone") {
		check.That(t, strings.Contains(sources, "\nfunc Test"+name+"("), "check.sh leaves out Test%s, which no test is called", name)
	}
	var want []string
	for _, dir := range []string{"", "faults", "network", "serve"} {
		calls := calls(t, filepath.Join("../../tests", dir))
		for name := range calls {
			test, is := strings.CutPrefix(name, "Test")
			if is && reaches(calls, name, "Soak", map[string]bool{}) && !slices.Contains(names("later"), test) {
				want = append(want, test)
			}
		}
	}
	got := names("rare")
	slices.Sort(got)
	slices.Sort(want)
	check.NoDiff(t, cmp.Diff(want, got), "rare in later.sh (-want +got)")
}

// The virtual machine leaves out tests that exist.
func TestWithoutInMachine(t *testing.T) {
	text, err := os.ReadFile("vm/without.txt")
	check.Must(t, err)
	functions := map[string]map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		words := strings.Fields(line)
		dir := filepath.Join("../..", words[0])
		if functions[dir] == nil {
			functions[dir] = calls(t, dir)
		}
		name, _, _ := strings.Cut(words[1], "/")
		of := slices.Collect(maps.Keys(functions[dir]))
		check.That(t, slices.ContainsFunc(of, regexp.MustCompile("^"+name+"$").MatchString), "%s has no test %s", words[0], name)
	}
}

// calls maps the functions of a directory to the names that they use.
func calls(t *testing.T, dir string) map[string][]string {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	check.Require(t, err == nil && len(files) != 0, "%s has no tests, %v", dir, err)
	calls := map[string][]string{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		check.Must(t, err)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				ast.Inspect(f, func(n ast.Node) bool {
					if id, ok := n.(*ast.Ident); ok {
						calls[f.Name.Name] = append(calls[f.Name.Name], id.Name)
					}
					return true
				})
			}
		}
	}
	return calls
}

func reaches(calls map[string][]string, from, to string, seen map[string]bool) bool {
	if seen[from] {
		return false
	}
	seen[from] = true
	return from == to || slices.ContainsFunc(calls[from], func(name string) bool { return reaches(calls, name, to, seen) })
}

// check.sh and nightly.sh report what failed and what could not run.
func TestCheck(t *testing.T) {
	const (
		first  = "ok: lint\nok: the helper, built again\nok: man pages\nok: completions\nok: manifests of the examples\nok: a cluster\n"
		root   = "ok: unit tests as uid 0\nok: tests of the command as uid 0\n"
		nobody = "ok: unit tests as uid 61002\nok: tests of the command as uid 61002\n"
		user   = "ok: unit tests as uid 1000\nok: tests of the command as uid 1000\n"
		mcp    = "ok: official MCP clients\nok: agents with a stub model\nok: OpenAPI documents\n"
		noSudo = "NOT RUN: the tests as root: sudo is not here, or asks for a password\n"
		noCC   = "NOT RUN: the race detector, there is no C compiler\n"

		bwraps   = "ok: other versions of bubblewrap\n"
		noApt    = "NOT RUN: other versions of bubblewrap, which a C compiler and Debian's apt are needed for\n"
		noRoot   = "NOT RUN: packages, programs of the distribution, and a container of podman, which root installs: sudo is not here, or asks for a password\n"
		signals  = "ok: 10,000 signals\n"
		longest  = "ok: the longest tests\n"
		rare     = "ok: rare events as uid 61002\n"
		noRare   = "NOT RUN: rare events as root: sudo is not here, or asks for a password\n"
		others   = "ok: test suites of other projects\nok: images of other programs\n"
		fuzz     = "ok: other architectures\nok: fuzzing\n"
		vm       = "ok: the virtual machine\nok: the virtual machine with Linux 6.12\n"
		packages = "ok: packages\nok: programs of the distribution\nok: a container of podman\n"
		nightly  = bwraps + packages + signals + longest + rare + others + fuzz + vm
	)
	failed := func(summary string) string { return strings.ReplaceAll(summary, "ok: ", "FAILED: ") }
	passed := func(summary string, names ...string) string { // these steps run no go test
		for _, name := range names {
			summary = strings.ReplaceAll(summary, "FAILED: "+name, "ok: "+name)
		}
		return summary
	}
	for _, tt := range []struct {
		script   string
		name     string
		uid      string
		output   string // of every go test
		compiler string
		sudo     bool
		foreign  bool // not Debian
		strict   bool
		code     int
		want     string // the last lines
	}{
		{script: "check.sh", name: "root", uid: "0", output: passes, want: first + root + mcp + nobody},
		{script: "check.sh", name: "failure", uid: "0", output: fails, code: 1,
			want: passed(failed(first+root+mcp+nobody), "lint", "the helper", "man pages", "completions", "official", "agents", "OpenAPI")},
		{script: "check.sh", name: "skip in CI", uid: "0", output: skips, strict: true, code: 1,
			want: first + failed(root) + mcp + failed(nobody)},
		{script: "check.sh", name: "user with sudo", uid: "1000", output: passes, sudo: true, want: first + user + mcp + root},
		{script: "check.sh", name: "user without sudo", uid: "1000", output: passes, want: first + user + mcp + noSudo},
		{script: "check.sh", name: "user without sudo in CI", uid: "1000", output: passes, strict: true, code: 1, want: first + user + mcp + noSudo},
		{script: "check.sh", name: "no compiler", uid: "0", output: passes, compiler: "no-such-compiler", want: noCC + first + root + mcp + nobody},

		{script: "nightly.sh", name: "root", uid: "0", output: passes, want: nightly},
		{script: "nightly.sh", name: "failure", uid: "0", output: fails, code: 1,
			want: passed(failed(nightly), "other versions", "packages", "programs", "a container", "test suites", "images of", "the virtual machine")},
		{script: "nightly.sh", name: "skip in CI", uid: "0", output: skips, strict: true, code: 1,
			want: strings.Replace(nightly, signals+longest+rare, failed(signals+longest+rare), 1)},
		{script: "nightly.sh", name: "user without sudo", uid: "1000", output: passes, want: bwraps + noRoot + signals + longest + noRare + others + fuzz + vm},
		{script: "nightly.sh", name: "no compiler", uid: "0", output: passes, compiler: "no-such-compiler", want: noApt + packages + signals + longest + rare + others + fuzz + vm},
		{script: "nightly.sh", name: "elsewhere", uid: "0", output: passes, foreign: true,
			want: noApt + "NOT RUN: packages, programs of the distribution, and a container of podman, which Debian's own programs install\n" + signals + longest + rare + "NOT RUN: test suites of other projects, which npm and Debian's apt fetch\nNOT RUN: images of other programs, which Debian's apt fetches\n" + fuzz + "NOT RUN: the virtual machine, which comes from Debian for amd64\n"},
	} {
		t.Run(tt.script+" "+tt.name, func(t *testing.T) {
			t.Parallel()
			f := newFakes(t, tt.output)
			compiler := tt.compiler
			if compiler == "" {
				compiler = "a-compiler -with-a-flag"
			}
			f.env = append(f.env, "FAKE_CC="+compiler)
			if tt.strict {
				f.env = append(f.env, "SBXRUN_TESTS_NO_SKIP=1")
			}
			f.program("a-compiler", "")
			f.program("x86_64-linux-gnu-gcc", "")
			f.program("aarch64-linux-gnu-gcc", "")
			f.program("id", "echo "+tt.uid)
			f.program("getent", `case $2 in 61000|61001) exit 0 ;; esac; exit 2`)
			f.program("chown", "")
			f.program("tar", "cat >/dev/null </dev/null")
			f.program("npm", "")
			f.program("sudo", map[bool]string{true: "exit 0", false: "exit 1"}[tt.sudo])
			f.program("dpkg", map[bool]string{true: "exit 1", false: "echo amd64"}[tt.foreign])

			code, out := f.run(tt.script)
			check.That(t, code == tt.code, "exit code %d, want %d", code, tt.code)
			i := max(0, strings.LastIndex(out, "\n\n"))
			before, summary := out[:i], strings.TrimLeft(out[i:], "\n")
			summary = regexp.MustCompile(`, \d+ s\n`).ReplaceAllString(summary, "\n")
			check.NoDiff(t, cmp.Diff(tt.want, strings.ReplaceAll(summary, "check: ", "")), "summary (-want +got)")
			check.Equal(t, strings.Contains(before, "\n    bad.go:1: the reason\n--- FAIL: TestBad (0.00s)\n"), (tt.output == fails), "shown is %q", before)
			check.Equal(t, strings.Contains(before, " printed last:\n"), strings.Contains(summary, "FAILED: "), "shown again is %q", before)
			if tt.script != "check.sh" {
				return
			}
			log := f.log()
			got, race := strings.Count(log, " -race "), tt.compiler == ""
			check.That(t, got > 0 == race, "-race was given %d times: %s", got, log)
			one, other := strings.Count(log, "50: test -v -count=1 -timeout 30m -ldflags=-s -vet=off -tags=check -p 3 -parallel 6 -run ^Test(ServeSoak"), strings.Count(log, "10: test -v -count=1 -timeout 30m -ldflags=-s -vet=off -tags=check -p 3 -parallel 6 -exec")
			halves := strings.Count(tt.want, ": tests of the command")
			check.That(t, one == 1 && one+other == halves, "the command was tested %d and %d times, want %d in all: %s", one, other, halves, log)
		})
	}
}

// On a slow machine there are fewer tries of rare events, except for the signals, and wider
// bounds, and the summary says so.
func TestSlowMachine(t *testing.T) {
	f := newFakes(t, passes)
	f.program("go", `case "$1 $2" in
		"list ./...") printf 'x/good\nx/tests\n' ;;
		test*) echo "$SBXRUN_SOAK $SBXRUN_TESTS_SLOW: $*" >>`+f.dir+`/log; printf '`+passes+`' ;;
		esac`)
	for _, name := range []string{"sudo", "dpkg"} {
		f.program(name, "exit 1")
	}
	f.program("id", "echo 1000")
	f.env = append(f.env, "SBXRUN_TESTS_MACHINE=3")
	_, out := f.run("check.sh")
	const tests = "test -v -count=1 -timeout 30m -ldflags=-s -vet=off -tags=check "
	for _, want := range []string{"\n10 18: " + tests + "-p 3 -parallel 6 -run ^Test(ServeSoak", "\n100 18: " + tests + "-run ^TestSoak$ ./tests/faults\n"} {
		check.That(t, strings.Contains(f.log(), want), "no %s in %s", want, f.log())
	}
	check.That(t, strings.Contains(out, "\ncheck: NOT ALL: this machine is 3 times slower than usual"), "it is not said: %s", out)
}

// The packages depend on the oldest bubblewrap that sbxrun supports.
func TestPackages(t *testing.T) {
	find, err := os.ReadFile("../room/find.go")
	check.Must(t, err)
	packages, err := os.ReadFile("dist/nfpm.yaml")
	check.Must(t, err)
	least := regexp.MustCompile(`leastMinor = (\d+)`).FindSubmatch(find)
	needs := regexp.MustCompile(`"bubblewrap ?\(?>= ?0\.(\d+)\)?"`).FindAllSubmatch(packages, -1)
	check.Require(t, least != nil && len(needs) == 3, "find.go: %q, nfpm.yaml: %q", least, needs)
	for _, need := range needs {
		check.That(t, bytes.Equal(need[1], least[1]), "nfpm.yaml: %s, but find.go: %s", need[0], least[0])
	}
}

// The commands of setup.sh that README, Taskfile.yml and CI call exist.
func TestCommands(t *testing.T) {
	read := func(name string) []byte {
		text, err := os.ReadFile("../../" + name)
		check.Must(t, err)
		return text
	}
	usage := read("setup.sh")
	for _, name := range []string{"README.md", "Taskfile.yml", ".ci/run", "tests/README.md"} {
		text := read(name)
		for _, m := range regexp.MustCompile(`\./setup\.sh ([a-z0-9-]+)`).FindAllSubmatch(text, -1) {
			check.That(t, regexp.MustCompile(`(?m)^#   `+string(m[1])+`\b`).Match(usage), "%s has %s, which setup.sh does not tell of", name, m[0])
		}
	}
	check.That(t, bytes.Contains(read("README.md"), []byte("\n    ./setup.sh demo\n")) && bytes.Contains(read("README.md"), []byte("\n    ./setup.sh test\n")),
		"README.md lacks one of the two commands")
}

// Scripts that begin with #! are executable, except for those that packages pass to dpkg, rpm and apk.
func TestExecutable(t *testing.T) {
	for _, pattern := range []string{"*.sh", "*/*.sh", "../../*.sh", "../../.ci/*"} {
		names, err := filepath.Glob(pattern)
		check.Must(t, err)
		check.That(t, len(names) > 0, "%s: no scripts", pattern)
		for _, name := range names {
			text, err := os.ReadFile(name)
			check.Must(t, err)
			info, err := os.Stat(name)
			check.Must(t, err)
			ofPackage := strings.HasPrefix(name, "dist/p")
			check.Equal(t, info.Mode()&0o111 != 0, bytes.HasPrefix(text, []byte("#!")) && !ofPackage, "%s: whether it is executable", name)
		}
	}
}

// The tests that tests/README.md names exist. A name that ends with … is a prefix.
func TestNamesInReadme(t *testing.T) {
	text, err := os.ReadFile("../../tests/README.md")
	check.Must(t, err)
	sources := sources(t)
	for _, name := range regexp.MustCompile(`\b(Test[A-Z]\w+)(…?)`).FindAllStringSubmatch(string(text), -1) {
		begin := "\nfunc " + name[1]
		if name[2] == "" {
			begin += "("
		}
		check.That(t, strings.Contains(sources, begin), "tests/README.md names %s, which no test is called", name[0])
	}
}

// sources returns the text of all tests.
func sources(t *testing.T) string {
	var text strings.Builder
	err := filepath.WalkDir("../..", func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return nil // not a test, or just removed
		}
		source, err := os.ReadFile(path)
		text.Write(source)
		return err
	})
	check.Must(t, err)
	return text.String()
}
