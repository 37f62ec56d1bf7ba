package tests

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// recipe is how to try a line of the cookbook: commands that prepare the directory, and commands that check the result.
// needs is a program without which it cannot run; online recipes need a network.
type recipe struct {
	prepare, check, needs string
	online                bool
}

const (
	pythonJob = `echo 'print(6 * 7)' >job.py`
	committed = `git init -q -b main && echo text >file && git add file && git -c user.name=n -c user.email=e commit -q -m first`
	goModule  = `printf 'module example.org/x\ngo 1.21\n' >go.mod; printf 'package main\nfunc main() { println(42) }\n' >main.go; printf 'package main\nimport "testing"\nfunc TestX(*testing.T) {}\n' >x_test.go`
	wheel     = `python3 -c 'import zipfile
z = zipfile.ZipFile("lab-1.0-py3-none-any.whl", "w")
for name, text in ("lab.py", ""), ("lab-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n"), ("lab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"), ("lab-1.0.dist-info/RECORD", ""): z.writestr(name, text)
z.close()'`
	gnuMake = `printf 'all:\n\techo built >out\n' >Makefile`
	answer  = `grep -qx 42 "$OUT"`
)

// recipes has every command of the cookbook's shell blocks. A recipe without prepare and check is not tried.
var recipes = map[string]recipe{
	`sbxrun --timeout 60 python3 job.py`: {prepare: pythonJob, check: answer},
	`sbxrun --tools python3 job.py`:      {prepare: pythonJob, check: answer},
	`sbxrun --tools .venv/bin/python job.py`: {
		prepare: pythonJob + `; python3 -m venv --without-pip .venv`, check: answer},
	`sbxrun -w --tools python3 -m pytest`:     {}, // not a package of every distribution
	`sbxrun -w --tools python3 -m venv .venv`: {prepare: `python3 -c 'import ensurepip'`, check: `.venv/bin/python -m pip --version`, needs: "pip3"},
	`sbxrun -w --tools --net host pip install -r requirements.txt`: {
		prepare: `python3 -m venv .venv && export PATH=$PWD/.venv/bin:$PATH && echo ./lab-1.0-py3-none-any.whl >requirements.txt && ` + wheel, check: `.venv/bin/python -c 'import lab'`, needs: "pip3"},
	`sbxrun node app.js`:                            {prepare: `echo 'console.log(6 * 7)' >app.js`, check: answer, needs: "node"},
	`sbxrun --tools node app.js`:                    {prepare: `echo 'console.log(6 * 7)' >app.js`, check: answer, needs: "node"},
	`sbxrun -w --net host npm ci`:                   {prepare: `echo '{"dependencies": {"minimist": "1.2.8"}}' >package.json && npm install --package-lock-only`, check: `test -d node_modules/minimist`, needs: "npm", online: true},
	`sbxrun -w --tools npm test`:                    {prepare: `echo '{"scripts": {"test": "node -p 6*7"}}' >package.json`, check: answer, needs: "npm"},
	`sbxrun --memory 1G --fake-meminfo node app.js`: {}, // needs limits
	`sbxrun -w --tools go build ./...`:              {prepare: goModule, check: `echo built`, needs: "go"},
	`sbxrun --tools go test ./...`:                  {prepare: goModule, check: `grep -q ^ok "$OUT"`, needs: "go"},
	`sbxrun -w --net host --env GOPROXY --env GOMODCACHE="$PWD/.modcache" --tools go mod download`: {
		prepare: `printf 'module x\ngo 1.21\nrequire github.com/google/go-cmp v0.6.0\n' >go.mod && export GOPROXY="$(go env GOPROXY)"`, check: `test -d .modcache/github.com/google/go-cmp@v0.6.0; chmod -R u+w .modcache`, needs: "go", online: true},
	`sbxrun -w --tools cargo build --offline`:                                                  {prepare: `cargo init -q --vcs none --name x`, check: `test -e target/debug/x`, needs: "cargo"},
	`sbxrun -w --tools --net host --env CARGO_HOME="$PWD/.cargo-home" cargo fetch`:             {}, // crates.io
	`sbxrun java Main.java`:                                                                    {prepare: `echo 'class Main { public static void main(String[] a) { System.out.println(42); } }' >Main.java`, check: answer, needs: "javac"},
	`sbxrun --memory 1G java -Xmx700m -jar app.jar`:                                            {}, // needs limits
	`sbxrun -w --bind "$HOME/.m2-untrusted:/m2" --net host mvn -Dmaven.repo.local=/m2 package`: {}, // Maven Central
	`sbxrun -w --timeout 600 make -j4`:                                                         {prepare: gnuMake, check: `grep -q built out`, needs: "make"},
	`sbxrun -w --memory 4G --pids 256 --cpus 2 make -j4`:                                       {}, // needs limits
	`sbxrun --bind "$PWD/build" cmake --build build`:                                           {prepare: `printf 'cmake_minimum_required(VERSION 3.10)\nproject(a NONE)\nadd_custom_target(x ALL COMMAND echo done >out)\n' >CMakeLists.txt && cmake -B build`, check: `test -e build/out`, needs: "cmake"},
	`sbxrun git log`: {prepare: committed, check: `grep -q first "$OUT"`, needs: "git"},
	`sbxrun --cwd-root "$(git rev-parse --show-toplevel)" git log`: {prepare: committed + ` && mkdir d && cd d`, check: `grep -q first "$OUT"`, needs: "git"},
	`sbxrun -w --ro-bind "$HOME/.gitconfig:/home/sandbox/.gitconfig" git commit -m message`: {
		prepare: committed + ` && echo more >>file && git add file && git config --global user.name n && git config --global user.email e`, check: `git log | grep -q message`, needs: "git"},
	`sbxrun -w --net host git clone https://example.org/x.git`: {},
	`sbxrun ./script.sh arg`:                                   {prepare: `printf '#!/bin/sh\necho "$1"\n' >script.sh && chmod +x script.sh`, check: `grep -qx arg "$OUT"`},
	`sbxrun sh -c 'sort input | uniq -c'`:                      {prepare: `printf 'a\nb\na\n' >input`, check: `grep -q '2 a' "$OUT"`},
	`cat data | sbxrun ./filter | wc -l`:                       {prepare: `printf 'a\nb\n' >data && printf '#!/bin/sh\ncat\n' >filter && chmod +x filter`, check: `grep -qx 2 "$OUT"`},
	`sbxrun -t bash`:                                           {prepare: `true`, check: `grep -q exit "$OUT"`},
	`sudo sbxrun --timeout 60 make check`:                      {}, // sudo
	`sudo sbxrun -w make install DESTDIR="$PWD/out"`:           {},
	`sudo sbxrun --user 1000:1000 --bind /srv/data ./job`:      {},
	`sbxrun start --name web --ready-tcp 8000 --wait-ready python3 -m http.server`: {prepare: `true`, check: `echo 'import urllib.request as r; print(r.urlopen("http://localhost:8000").status)' >client.py
sbxrun exec --timeout 10 web python3 client.py | grep -qx 200 && sbxrun kill web`},
	`sbxrun exec --timeout 10 web python3 client.py`: {}, // with the one before
	`sbxrun kill web`: {},
}

var (
	shellFence    = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")
	shellComments = regexp.MustCompile(` +# .*`)
)

// Every command of the cookbook's shell blocks works as printed, unless recipes says why it is not tried. With
// SBXRUN_TESTS_ONLINE=1 that includes those that download packages.
func TestCookbook(t *testing.T) {
	t.Parallel()
	documented := map[string]bool{}
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
			if how.check == "" || how.online && os.Getenv("SBXRUN_TESTS_ONLINE") != "1" {
				continue
			}
			t.Run(line, func(t *testing.T) {
				t.Parallel()
				if how.needs != "" {
					how.prepare = "command -v " + how.needs + " || exit 0\n" + how.prepare
				}
				follow(t, how.prepare, line, how.check)
			})
		}
	}
	for line := range recipes {
		check.That(t, documented[line], "not in the cookbook: %s", line)
	}
}

// follow runs shell commands in a directory of their own; OUT is a file with the output of the documented ones.
func follow(t *testing.T, prepare, documented, check string) {
	t.Helper()
	dir := harness.Dir(t)
	harness.Must(t, os.MkdirAll(dir+"/home/project", 0o755))
	script := "set -e\n{ " + prepare + "\n} >&2\nset +e\n{ " + documented + "\n} >\"$OUT\"\nset -e\n" + check + "\n"
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

// The grader in the guide to CI gives each submission its verdict.
func TestGrader(t *testing.T) {
	t.Parallel()
	_, text, _ := strings.Cut(readFile(t, "../docs/guides/ci.md"), "## Grading a submission")
	block := shellFence.FindStringSubmatch(text)
	const limited = "--memory 256M --pids 64 "
	check.Require(t, block != nil && strings.Contains(block[1], limited), "no grader in ci.md: %q", block)
	grader := strings.Replace(block[1], "--timeout 5", "--timeout "+strings.TrimSuffix(harness.Deadline(harness.Scaled(1e9)).String(), "s"), 1)
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
