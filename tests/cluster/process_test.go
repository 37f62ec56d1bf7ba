// Package cluster tests servers behind a gateway, connected by NATS. It is a separate module, because only
// these tests need the NATS server, which takes longer to compile than all of sbxrun.
package cluster

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// process is a node, a gateway or a NATS server. It can be started again after kill.
type process struct {
	t       *testing.T
	program string
	args    []string
	log     *harness.Log
	cmd     *exec.Cmd
	ended   <-chan struct{}
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.Command(p.program, p.args...)
	p.cmd.Stderr = p.log
	p.ended = harness.Serve(p.t, p.cmd)
}

// end ends a process regularly.
func (p *process) end() {
	_ = p.cmd.Process.Signal(unix.SIGTERM) // it may have exited
	if code := harness.Ended(p.t, p.cmd, p.ended, p.log); code != 0 && code != -1 {
		p.t.Errorf("ended with %d: %s", code, p.log)
	}
}

// kill kills a process, and returns when all its descendants have exited.
func (p *process) kill() { harness.KillServer(p.t, p.cmd, p.ended, unix.SIGKILL) }

// gateway is a gateway with a client.
type gateway struct {
	*process
	socket string
	client *http.Client
}

// kill also closes the client's connections: a POST on one that the gateway has closed may fail.
func (g *gateway) kill() {
	g.process.kill()
	g.client.CloseIdleConnections()
}

// cluster has nodes and gateways on the same NATS.
type cluster struct {
	t        *testing.T
	dir      string
	nats     string // additional lines of that section
	nodes    []*process
	gateways []*gateway
}

func newCluster(t *testing.T, url string, nodes, gateways int, config string) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: harness.Dir(t)}
	for i := range nodes {
		name := fmt.Sprintf("n%d", i)
		c.nodes = append(c.nodes, c.process("serve", name, url, "state_dir = \""+filepath.Join(c.dir, name)+"\"\n"+config))
	}
	for i := range gateways {
		c.gateways = append(c.gateways, c.gateway(fmt.Sprintf("g%d", i), url, config))
	}
	for _, g := range c.gateways {
		c.ready(g, nodes)
	}
	return c
}

func (c *cluster) gateway(name, url, config string) *gateway {
	c.t.Helper()
	return c.listener("gateway", name, url, config)
}

// listener starts a gateway, or a node that listens itself.
func (c *cluster) listener(command, name, url, config string) *gateway {
	c.t.Helper()
	socket := filepath.Join(c.dir, name+".sock")
	config = fmt.Sprintf("listen = [\"unix:%s\"]\nstate_dir = %q\n%s", socket, filepath.Join(c.dir, name), config)
	return &gateway{socket: socket, client: unixClient(socket), process: c.process(command, name, url, config)}
}

// unixClient returns a client with a timeout, so that a test fails with details instead of hanging.
func unixClient(socket string) *http.Client {
	return &http.Client{Timeout: 2 * harness.Bound, Transport: &http.Transport{
		MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
}

// sum returns the ID of a file.
func sum(text string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text))) }

func (c *cluster) process(command, name, url, config string) *process {
	c.t.Helper()
	file := filepath.Join(c.dir, name+".toml")
	if !strings.Contains(config, "[nats]") {
		config += "\n[nats]\n"
	}
	config = fmt.Sprintf("proof_timeout = %q\n%s", harness.ProofTimeout(), config)
	config += "url = \"" + url + "\"\nnode = \"" + name + "\"\n" + c.nats
	err := os.WriteFile(file, []byte(config), 0o600)
	check.Require(c.t, err == nil, "%v", err)
	p := &process{t: c.t, program: harness.Binary(c.t), args: []string{command, "--config", file}, log: &harness.Log{}}
	p.start()
	c.t.Cleanup(func() {
		p.end()
		if c.t.Failed() {
			c.t.Logf("%s: %s", name, last(p.log.String(), 20))
		}
	})
	return p
}

func last(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// ready waits until a gateway is ready and knows that many nodes. A gateway with tokens does not report the number.
func (c *cluster) ready(g *gateway, nodes int) {
	c.t.Helper()
	get := func(path string) (int, string) {
		status, text, err := g.raw(c.t.Context(), http.MethodGet, path, "")
		if err != nil {
			return 0, ""
		}
		return status, text
	}
	harness.Until(c.t, harness.Bound, "a gateway: "+g.log.String(), func() bool {
		ready, _ := get("/readyz")
		told, text := get("/metrics")
		return ready == http.StatusOK && (told != http.StatusOK || strings.Count(text, "\nsbxrun_node_ready{") >= nodes)
	})
}

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
	check.Must(t, os.WriteFile(file, []byte(text), 0o600))
	self, err := os.Executable()
	check.Must(t, err)
	p := &process{t: t, program: self, args: []string{natsRole, file}, log: &harness.Log{}}
	p.start()
	t.Cleanup(p.kill)
	return p
}

// options returns the options of a NATS server on the loopback interface.
func options(t *testing.T) *server.Options {
	return &server.Options{Host: "127.0.0.1", Port: freePort(), NoLog: true, NoSigs: true, JetStream: true, StoreDir: t.TempDir()}
}

// ports are those that freePort has returned.
var ports sync.Map

// freePort returns an unused port. A killed server must be able to use it again, so it is below the range of
// ports for outgoing connections (ip(7), ip_local_port_range), and no other test gets it.
func freePort() int {
	const first, end = 10_000, 32_768
	for {
		port := first + rand.IntN(end-first)
		if _, given := ports.LoadOrStore(port, true); given {
			continue
		}
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
}

// runNATS starts a NATS server until the end of the test.
func runNATS(t *testing.T) *server.Options {
	t.Helper()
	o := options(t)
	startNATS(t, o)
	return o
}

// startNATS starts a NATS server in this process.
func startNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(o)
	check.Must(t, err)
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
	text := harness.ReadFile(t, o.ConfigFile)
	alone := regexp.MustCompile(`(?ms)^cluster \{.*?^\}$`).ReplaceAll(text, nil)
	file := filepath.Join(dir, "alone.conf")
	check.Must(t, os.WriteFile(file, alone, 0o600))
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
