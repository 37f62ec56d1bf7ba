package tests

import (
	stdjson "encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Root without CAP_KILL refuses to run anything, because it could not signal another user's processes.
func TestRootWithoutKill(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		return // an ordinary user's processes are its own
	}
	harness.Start(t, harness.Options{Wrap: []string{"setpriv", "--bounding-set=-kill"}}, "sh", "-c", "echo it runs").Wait().Expect(t, 125, "start-failed").ErrHas(t, "may not kill processes of another uid")
}

// Everything works as an engine's root, which lacks capabilities to inspect other users' processes.
func TestEngineRoot(t *testing.T) {
	t.Parallel()
	second := harness.Deadline(time.Second).String()
	harness.Run(t, harness.Options{Wrap: harness.EngineRoot()}, "sh", "-c", "setsid sleep 600 & exit 7").Expect(t, 7, "exited")
	harness.Run(t, harness.Options{Wrap: harness.EngineRoot()}, "--timeout", second, "--grace", "0.1", "/fixtures/tree-setsid").Expect(t, 124, "timeout")

	// The payload sets its own limits, so sbxrun needs no capability for another user's process,
	// and stays inspectable itself.
	limits := []string{"--nofile", "64", "--fsize", "1M", "--stack", "1M"}
	r := harness.Run(t, harness.Options{Wrap: harness.EngineRoot()}, append(limits, "sh", "-c", "echo $(ulimit -n) $(ulimit -f) $(ulimit -s)")...)
	r.Expect(t, 0, "exited")
	check.Equal(t, string(r.Stdout), "64 2048 1024\n", "limits")

	s := harness.NewState(t)
	s.Wrap = harness.EngineRoot()
	limited := s.Sandbox(harness.Options{}, append(limits, "sh", "-c", "sleep 0.2; exit 3")...)
	s.Run("wait", limited.ID).Exits(t, 3)
	limited.Ended()
	b := s.Sandbox(harness.Options{}, "--name", "box")
	b.Exec(harness.Options{}, []string{"--timeout", second, "--grace", "0.1"}, "/fixtures/tree-setsid").Expect(t, 124, "timeout")
	p := b.StartExec(harness.Options{}, nil, "sh", "-c", "sleep 600 & echo up; wait")
	p.WaitOutput("up\n")
	// PID 1 of the room; the exec's init, shell and sleep.
	got := statsOf(t, s, harness.Options{})
	check.That(t, len(got.Sandboxes) == 1 && got.Sandboxes[0].Tasks == 4, "%+v", got)
	p.Signal(unix.SIGTERM)
	p.Wait().Expect(t, 143, "canceled")
	s.Run("kill", "box").Exits(t, 0)
	rec := b.Ended()
	check.That(t, rec.Status == "killed" && rec.Report.Cause == "killed", "status %q, cause %q, want killed", rec.Status, rec.Report.Cause)
}

// Engines mount cgroups read-only. Limits cannot be enforced then, and the hint names the engine's
// setting, whoever owns the directories.
func TestReadOnlyCgroups(t *testing.T) {
	t.Parallel()
	wrap := []string{"unshare", "--mount"}
	if !harness.Root() {
		wrap = append(wrap, "--user", "--map-current-user", "--keep-caps")
	}
	const readOnly = `awk '$5 ~ "^/sys/fs/cgroup" {print $5}' /proc/self/mountinfo | while read -r dir; do mount -o remount,bind,ro "$dir" || exit 3; done || exit 3; exec setpriv --ambient-caps=-all --inh-caps=-all "$@"`
	o := harness.Options{Bare: true, Wrap: append(wrap, "bash", "-c", readOnly, "-")}
	harness.Run(t, o, "--memory", "64M", "true").Exits(t, 125).ErrHas(t, "read-only file system").ErrHas(t, "give this container writable cgroups")
	harness.Run(t, o, "--memory", "64M", "--limits", "best-effort", "true").Exits(t, 0)
}

// If no one may create a network namespace, run and doctor report that.
func TestNoNetworkNamespaces(t *testing.T) {
	t.Parallel()
	const none = `echo 0 >/proc/sys/user/max_net_namespaces && exec setpriv --ambient-caps=-all --inh-caps=-all "$@"`
	var wrap []string
	if harness.Root() {
		wrap = []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}
	}
	wrap = append(wrap, "unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", none, "sh")
	o := harness.Options{Bare: true, Wrap: wrap, Dir: "/usr"}
	harness.Run(t, o, "true").Exits(t, 125).ErrHas(t, "network namespace: user.max_net_namespaces is 0").ErrHas(t, "sysctl -w user.max_net_namespaces=")
	harness.Run(t, o, "--net", "host", "true").Exits(t, 0)
}

// doctor's check of root's own paths agrees with a run: an engine's root may not bind them.
func TestDoctorRootsPaths(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // the check is for root
	}
	dir := t.TempDir()
	check.Must(t, os.Chmod(dir, 0o700))
	for _, tt := range []struct {
		wrap    []string
		verdict string
		code    int
	}{{nil, "ok", 0}, {harness.EngineRoot(), "warning", 125}} {
		o := harness.Options{Bare: true, Wrap: tt.wrap, Dir: dir}
		harness.Run(t, o, "-w", "true").Exits(t, tt.code)
		o.Dir = "/usr"
		r := harness.Run(t, o, "doctor", "--json")
		var report struct {
			Checks []struct{ Name, Verdict, Fix string }
		}
		err := stdjson.Unmarshal(r.Stdout, &report)
		check.Require(t, err == nil, "%v: %s%s", err, r.Stdout, r.Stderr)
		i := slices.IndexFunc(report.Checks, func(c struct{ Name, Verdict, Fix string }) bool { return c.Name == "root's own paths" })
		check.That(t, i >= 0 && report.Checks[i].Verdict == tt.verdict && (tt.code == 0 || strings.Contains(report.Checks[i].Fix, "as an ordinary user")), "%q: %s", tt.wrap, r.Stdout)
	}
}

// In a container that lacks something, doctor and the error of a run print how to start the container.
func TestDoctorInContainer(t *testing.T) {
	// Not in parallel: a run looks for the cause for a limited time, which other tests would use
	// up on an emulated machine. Other packages may too, so there are several tries.
	const script = `mount -t tmpfs tmpfs /run && : >/run/.containerenv && mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys &&
		exec unshare --user --map-user=1000 --map-group=1000 "$@"`
	container := harness.Options{Bare: true, Wrap: []string{"unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"}}
	const start = "start this container like this: podman run --init --cgroupns private --security-opt seccomp=unconfined --security-opt unmask=ALL …"
	r := harness.Start(t, container, "doctor").Wait()
	want := "\n" + start + "\nor in a compose file: init: true, cgroup: private, security_opt: [seccomp=unconfined, unmask=ALL]\n"
	check.That(t, r.ExitCode == 125 && strings.HasSuffix(string(r.Stdout), want), "doctor: exit code %d: %s%s\nwant %s", r.ExitCode, r.Stdout, r.Stderr, want)
	for deadline := time.Now().Add(harness.Slack * 5); ; {
		r = harness.Start(t, container, "true").Wait()
		if r.ExitCode == 125 && strings.HasSuffix(string(r.Stderr), "; "+start+"\n") {
			return
		}
		check.Require(t, time.Now().Before(deadline), "a run: exit code %d: %s", r.ExitCode, r.Stderr)
	}
}

// A sandbox reaches neither the host's loopback nor its sockets, abstract or by path.
func TestNoNetwork(t *testing.T) {
	t.Parallel()
	listen := func(network, address string) net.Listener {
		l, err := net.Listen(network, address)
		check.Must(t, err)
		t.Cleanup(func() { l.Close() })
		return l
	}
	tcp := listen("tcp4", "127.0.0.1:0").Addr().(*net.TCPAddr)
	abstract := fmt.Sprintf("@sbxrun-test-network-%d", os.Getpid())
	listen("unix", abstract)
	// The usual place of docker.sock, where only root can create one.
	dir := harness.Dir(t)
	if harness.Root() {
		var err error
		dir, err = os.MkdirTemp("/run", "sbxrun-test-")
		check.Must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		check.Must(t, os.Chmod(dir, 0o755))
	}
	socket := filepath.Join(dir, "docker.sock")
	listen("unix", socket)
	check.Must(t, os.Chmod(socket, 0o777))

	targets := []string{strconv.Itoa(tcp.Port), abstract, socket, "/run/docker.sock", "/var/run/docker.sock"}
	probe := append([]string{"/fixtures/probe-net"}, targets...)
	// A run has its own network namespace, and a sandbox shares one with its execs.
	box := harness.NewState(t).Sandbox(harness.Options{})
	for what, r := range map[string]*harness.Result{"run": harness.Run(t, harness.Options{}, probe...), "exec": box.Exec(harness.Options{}, nil, probe...)} {
		r.Expect(t, 0, "exited")
		n := strings.Count(string(r.Stdout), ": unreachable (")
		check.That(t, n == len(targets), "%s: %d of %d unreachable:\n%s", what, n, len(targets), r.Stdout)
	}

	// With --net host the probe finds them, but still no socket below /run.
	r := harness.Run(t, harness.Options{}, append([]string{"--net", "host", "/fixtures/probe-net"}, targets...)...)
	for _, want := range []string{strconv.Itoa(tcp.Port) + ": reachable\n", abstract + ": reachable\n", socket + ": unreachable"} {
		check.That(t, strings.Contains(string(r.Stdout), want), "--net host: no %q in:\n%s", want, r.Stdout)
	}
}

// A container's root, which cannot bind its own directories, learns which one is the cause and what helps.
func TestEngineRootBinds(t *testing.T) {
	t.Parallel()
	if !harness.Root() {
		return // an ordinary user owns the bound directories
	}
	dir := harness.Dir(t)
	place := filepath.Join(dir, "place")
	check.Must(t, os.MkdirAll(place, 0o755))
	o := harness.Options{Wrap: harness.EngineRoot(), Dir: dir, Env: []string{"SBXRUN_DATA_DIR=" + dir + "/data"}}
	harness.Run(t, o, "--bind", place, "true").Expect(t, 125, "start-failed").ErrHas(t, "cannot bind \""+place+"\"").ErrHas(t, "chown 65534:65534 "+place)
	check.Must(t, os.Chown(place, 65534, 65534))
	harness.Run(t, o, "--bind", place, "touch", place+"/file").Expect(t, 0, "exited")
	harness.Run(t, o, "--volume", "v:/v", "true").Expect(t, 125, "start-failed").ErrHas(t, "only root can reach it").ErrHas(t, "run sbxrun as an ordinary user")
}
