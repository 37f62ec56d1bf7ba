package tests

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A sandbox reaches neither the host's loopback nor its sockets, abstract or by path.
func TestNoNetwork(t *testing.T) {
	t.Parallel()
	listen := func(network, address string) net.Listener {
		l, err := net.Listen(network, address)
		harness.Must(t, err)
		t.Cleanup(func() { l.Close() })
		return l
	}
	tcp := listen("tcp4", "127.0.0.1:0").Addr().(*net.TCPAddr)
	abstract := fmt.Sprintf("@sbxrun-test-%d", os.Getpid())
	listen("unix", abstract)
	// The usual place of docker.sock, where only root can create one.
	dir := harness.Dir(t)
	if harness.Root() {
		var err error
		dir, err = os.MkdirTemp("/run", "sbxrun-test-")
		harness.Must(t, err)
		t.Cleanup(func() { os.RemoveAll(dir) })
		harness.Must(t, os.Chmod(dir, 0o755))
	}
	socket := filepath.Join(dir, "docker.sock")
	listen("unix", socket)
	harness.Must(t, os.Chmod(socket, 0o777))

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

// The sandbox has only its own loopback, which is up.
func TestOwnLoopback(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "python3", "-c", `
import os, socket
print(os.listdir("/sys/class/net") if os.path.exists("/sys/class/net") else "", [n for _, n in socket.if_nameindex()])
s = socket.create_server(("127.0.0.1", 0))
c = socket.create_connection(s.getsockname())
print("connected", os.listdir("/run"))`)
	r.Expect(t, 0, "exited")
	check.Equal(t, string(r.Stdout), " ['lo']\nconnected []\n")
}
