package serve

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// inMounts returns a command in its own mount namespace, after a line of sh.
func inMounts(line string, argv ...string) *exec.Cmd {
	wrap := []string{"--mount"}
	if !harness.Root() {
		wrap = append(wrap, "--user", "--map-root-user")
	}
	return exec.Command("unshare", append(append(wrap, "sh", "-c", line+` && exec "$@"`, "-"), argv...)...)
}

// With a /proc of another PID namespace, or on a full disk, the server fails with one line and a
// distinct exit code, and leaves nothing.
func TestRefusedStart(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		cmd  func(dir string, serve ...string) *exec.Cmd
		code int
		word string
	}{
		{"foreign /proc", func(_ string, serve ...string) *exec.Cmd {
			c := inMounts("true", serve...)
			c.Args = append([]string{"unshare", "--pid", "--fork"}, c.Args[1:]...)
			return c
		}, 125, "--mount-proc"},
		{"full disk", func(dir string, serve ...string) *exec.Cmd {
			return inMounts("mount -t tmpfs -o nr_inodes=2 none "+dir+"/disk", serve...)
		}, 125, "no space left on device"},
		{"full output", func(_ string, serve ...string) *exec.Cmd {
			return exec.Command("sh", append([]string{"-c", `exec "$@" --check-config >/dev/full`, "-"}, serve...)...)
		}, 74, "no space left on device"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			for _, args := range [][]string{{"serve", "--listen", "unix:SOCKET"}, {"mcp"}} {
				dir := harness.Dir(t)
				check.Must(t, os.Mkdir(filepath.Join(dir, "disk"), 0o700))
				config := filepath.Join(dir, "config.toml")
				check.Must(t, os.WriteFile(config, []byte(fmt.Sprintf("state_dir = %q\n", filepath.Join(dir, "disk/sub/state"))), 0o600))
				argv := append([]string{harness.Binary(t)}, args...)
				for i := range argv {
					argv[i] = strings.ReplaceAll(argv[i], "SOCKET", filepath.Join(dir, "socket"))
				}
				c := test.cmd(dir, append(argv, "--config", config)...)
				stderr, err := c.StderrPipe()
				check.Must(t, err)
				done, err := harness.StartCommand(c)
				check.Must(t, err)
				said := harness.ReadAll(t, stderr)
				_ = c.Wait() // the test checks ProcessState
				done()
				log := regexp.MustCompile(`(?m)^\{.*\n`) // of sandboxes that were being started
				text := log.ReplaceAllString(string(said), "")
				check.That(t, c.ProcessState.ExitCode() == test.code && strings.Count(text, "\n") == 1 && strings.HasPrefix(text, "sbxrun: error: ") && strings.Contains(text, test.word),
					"%q: exit code %d: %s", args, c.ProcessState.ExitCode(), text)
				_, err = os.Lstat(filepath.Join(dir, "socket"))
				check.That(t, err != nil, "a socket is left")
			}
		})
	}
}

// When the disk fills up, requests that need it fail with that reason, and the server keeps serving.
func TestDiskGetsFull(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	disk := filepath.Join(dir, "disk")
	check.Must(t, os.Mkdir(disk, 0o700))
	s := &server{t: t, dir: dir, log: &harness.Log{}}
	config := filepath.Join(dir, "config.toml")
	check.Must(t, os.WriteFile(config, []byte(fmt.Sprintf("listen = [\"unix:%s\"]\nstate_dir = %q\n[rooms]\nmin = 0\nmax = 0\n", s.socket(), filepath.Join(disk, "state"))), 0o600))
	s.cmd = inMounts("mount -t tmpfs -o size=1M,nr_inodes=8 none "+disk, harness.Binary(t), "serve", "--config", config)
	s.cmd.Stderr = s.log
	s.start()
	t.Cleanup(s.end)
	harness.Until(t, harness.Bound, "the server", func() bool {
		status, _, _, err := s.try(t.Context(), http.MethodGet, "/readyz", nil)
		return err == nil && status == 200
	})
	status, e := s.refused(http.MethodPost, "/v1/files", strings.Repeat("x", 2<<20))
	check.That(t, status == 507 && e.Failure.Code == api.QuotaDisk && !strings.Contains(e.Failure.Message, dir), "%d %+v", status, e)
	for n := 0; ; n++ { // empty files, until there is no inode
		if status, b := s.ask(http.MethodPost, "/v1/files", fmt.Sprint(n)); status == 507 && strings.Contains(string(b), `"quota-disk"`) {
			break
		} else if status != 201 || n > 8 {
			t.Fatalf("file %d: %d %s", n, status, b)
		}
	}
	collected := sh("echo x >f")
	collected.Collect = []string{"f"}
	if os.Geteuid() == 0 { // in an ordinary user's namespace with its own disk, there can be no sandbox
		a := s.run(collected)
		check.That(t, len(a.Files) == 1 && strings.Contains(a.Files[0].Error, "full") && !strings.Contains(a.Files[0].Error, dir), "%+v", a.Files)
	}
	s.refuses(api.QuotaDisk, http.MethodPost, "/v1/calls", sh("true"))
	status, b := s.ask(http.MethodGet, "/v1/calls", nil)
	check.That(t, status == 200 && string(b) == "{\"calls\":[]}\n", "%d %s", status, b)
}
