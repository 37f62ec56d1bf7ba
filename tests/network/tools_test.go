package network

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Each package manager works when only its hosts are listed. Otherwise it fails, and one line
// names the refused host.
func TestPackageManagers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ tool, hosts, refused, script, want string }{
		{"python3", "index.example.org,files.example.org", "index.example.org:443",
			`/usr/bin/python3 -m pip install -q --no-cache-dir --disable-pip-version-check --retries 0 --cert $CA --index-url https://index.example.org/simple --target . lab && /usr/bin/python3 lab.py`, "lab\n"},
		{"npm", "registry.example.org", "registry.example.org:443",
			`npm install --no-audit --no-fund --fetch-retries 0 --cafile $CA --registry https://registry.example.org lab >&2 && cat node_modules/lab/package.json`, `{"name":"lab","version":"1.0.0"}`},
		{"git", "git.example.org", "git.example.org:443",
			`GIT_SSL_CAINFO=$CA git clone -q https://git.example.org/repository.git c && git -C c log --format=%s`, "hello from the lab\n"},
		{"go", "proxy.example.org", "proxy.example.org:443",
			`export SSL_CERT_FILE=$CA GOPROXY=https://proxy.example.org GOSUMDB=off GOFLAGS=-modcacherw GOMODCACHE=$PWD/m GOCACHE=$PWD/b GOPATH=$PWD/p GOTOOLCHAIN=local
			echo 'module x' >go.mod; go mod download example.org/lab@v1.0.0 && cat m/example.org/lab@v1.0.0/lab.go`, "package lab\n"},
	} {
		t.Run(tt.tool, func(t *testing.T) {
			t.Parallel()
			program, err := exec.LookPath(tt.tool)
			if err != nil {
				harness.Skip(t, tt.tool+" is missing")
			}
			ca := shared("ca.pem")
			args := []string{"--cwd", "none", "--tmpfs", "/work", "--workdir", "/work", "--ro-bind", ca, "--env", "CA=" + ca, "--timeout", harness.Deadline(time.Minute).String()}
			if tt.tool == "go" { // the one that runs the tests, wherever it is
				program, err = filepath.EvalSymlinks(program)
				harness.Must(t, err)
				dir := filepath.Dir(filepath.Dir(program))
				args = append(args, "--ro-bind-try", dir, "--env", "PATH="+filepath.Join(dir, "bin")+":/usr/bin:/bin")
			}
			r := harness.Run(t, harness.Options{}, append(args, "--net", "allow="+tt.hosts, "sh", "-c", tt.script)...)
			r.Expect(t, 0, "exited")
			check.That(t, strings.HasPrefix(string(r.Stdout), strings.TrimSuffix(tt.want, "\n")), "%q\n%s", r.Stdout, r.Stderr)
			r, text := harness.Said(t, func(o harness.Options) *harness.Process {
				return harness.Start(t, o, append(args, "--env", harness.MarkerName, "--net", "allow=www.example.org", "sh", "-c", tt.script)...)
			})
			want := "hint: the list of --net does not have " + tt.refused + "; --net allow=" + tt.refused + " has"
			lines := harness.Ours(text)
			check.That(t, r.ExitCode != 0 && len(lines) == 1 && lines[0] == want, "without its hosts: exit code %d, %q, want %q\n%s", r.ExitCode, lines, want, text)
		})
	}
}
