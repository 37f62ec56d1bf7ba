// Package cluster tests servers behind a gateway, connected by NATS. It is a separate module, because only
// these tests need the NATS server, which takes longer to compile than all of sbxrun.
package cluster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// natsRole makes this program a NATS server, in a process that can be killed.
const natsRole = "nats-server"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == natsRole {
		fmt.Fprintln(os.Stderr, "NATS:", serveNATS(os.Args[2]))
		os.Exit(1)
	}
	harness.Main(m)
}

// serveNATS runs until it is killed.
func serveNATS(file string) error {
	o, err := server.ProcessConfigFile(file)
	if err != nil {
		return err
	}
	o.NoLog = true
	s, err := server.NewServer(o)
	if err != nil {
		return err
	}
	s.Start()
	s.WaitForShutdown()
	return nil
}

// natsProcess starts one of [threeNATS] in a separate process.
func natsProcess(t *testing.T, o *server.Options) *process {
	t.Helper()
	var routes []string
	for _, r := range o.Routes {
		routes = append(routes, r.String())
	}
	file := filepath.Join(o.StoreDir, "nats.conf")
	text := fmt.Sprintf("server_name: %s\nlisten: \"127.0.0.1:%d\"\njetstream {store_dir: %q}\ncluster {name: %s, listen: \"127.0.0.1:%d\", routes: [%s]}\n",
		o.ServerName, o.Port, o.StoreDir, o.Cluster.Name, o.Cluster.Port, strings.Join(routes, ", "))
	harness.Must(t, os.WriteFile(file, []byte(text), 0o600))
	self, err := os.Executable()
	harness.Must(t, err)
	p := &process{t: t, program: self, args: []string{natsRole, file}, log: &harness.Log{}}
	p.start()
	t.Cleanup(p.kill)
	return p
}

// options returns the options of a NATS server on the loopback interface.
func options(t *testing.T) *server.Options {
	return &server.Options{Host: "127.0.0.1", Port: freePort(), NoLog: true, NoSigs: true, JetStream: true, StoreDir: t.TempDir()}
}

// freePort returns an unused port. A killed server must be able to use it again, so it is below the range of
// ports for outgoing connections (ip(7), ip_local_port_range).
func freePort() int {
	const first, end = 10_000, 32_768
	for {
		port := first + rand.IntN(end-first)
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
}

// startNATS starts a NATS server in this process.
// runNATS starts a NATS server until the end of the test.
func runNATS(t *testing.T) *server.Options {
	t.Helper()
	o := options(t)
	startNATS(t, o)
	return o
}

func startNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(o)
	harness.Must(t, err)
	s.Start()
	t.Cleanup(s.Shutdown)
	check.Require(t, s.ReadyForConnections(harness.Bound), "NATS is not ready")
	return s
}

// oldest is the version of Debian 12, and the oldest in docs/guides/cluster.md.
const oldest = "v2.9.10"

// oldestNATS starts a single server of that version with the file of the options, until the end of the test.
func oldestNATS(t *testing.T, o *server.Options) {
	t.Helper()
	dir := harness.Dir(t)
	install := exec.Command("go", "install", "github.com/nats-io/nats-server/v2@"+oldest)
	install.Env = append(os.Environ(), "GOBIN="+dir)
	out, err := install.CombinedOutput()
	check.Require(t, err == nil, "%v: %s", err, out)
	text, err := os.ReadFile(o.ConfigFile)
	harness.Must(t, err)
	alone := regexp.MustCompile(`(?ms)^cluster \{.*?^\}$`).ReplaceAll(text, nil)
	file := filepath.Join(dir, "alone.conf")
	harness.Must(t, os.WriteFile(file, alone, 0o600))
	p := &process{t: t, program: filepath.Join(dir, "nats-server"), args: []string{"-c", file, "-a", o.Host, "-p", strconv.Itoa(o.Port)}, log: &harness.Log{}}
	p.start()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("NATS: %s", p.log)
		}
	})
	harness.Until(t, harness.Bound, "NATS "+oldest, func() bool { return strings.Contains(p.log.String(), "Server is ready") })
}

func url(o *server.Options) string { return fmt.Sprintf("nats://127.0.0.1:%d", o.Port) }
