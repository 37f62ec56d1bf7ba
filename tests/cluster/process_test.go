package cluster

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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
	socket := filepath.Join(c.dir, name+".sock")
	return &gateway{socket: socket, client: unixClient(socket), process: c.process("gateway", name, url, "listen = [\"unix:"+socket+"\"]\n"+config)}
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

// ready waits until a gateway is ready and knows a number of nodes.
func (c *cluster) ready(g *gateway, nodes int) {
	c.t.Helper()
	harness.Until(c.t, harness.Bound, "a gateway: "+g.log.String(), func() bool {
		res, err := g.client.Get("http://sbxrun/readyz")
		if err != nil {
			return false
		}
		res.Body.Close()
		return res.StatusCode == http.StatusOK
	})
}
