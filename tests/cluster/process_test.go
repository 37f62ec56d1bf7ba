package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// process is a node or a gateway. After kill it can be started again.
type process struct {
	t     *testing.T
	args  []string
	log   *lockedBuffer
	cmd   *exec.Cmd
	ended chan struct{}
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.Command(harness.Binary(p.t), p.args...)
	p.cmd.Stderr = p.log
	done, err := harness.Register(func() (int, error) {
		if err := p.cmd.Start(); err != nil {
			return 0, err
		}
		return p.cmd.Process.Pid, nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
	ended, cmd := make(chan struct{}), p.cmd
	p.ended = ended
	go func() {
		_ = cmd.Wait() // its exit code is looked at
		done()
		close(ended)
	}()
}

// end ends a process as its operator does.
func (p *process) end() {
	_ = p.cmd.Process.Signal(unix.SIGTERM) // it may have ended
	select {
	case <-p.ended:
	case <-time.After(harness.Bound):
		p.t.Errorf("it does not end: %s", p.log)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 && code != -1 {
		p.t.Errorf("ended with %d: %s", code, p.log)
	}
}

// kill kills a process, and comes back when nothing of it is left. It is stopped before, as a child that
// it has made since they were counted would not be among them.
func (p *process) kill() {
	pid := p.cmd.Process.Pid
	_ = p.cmd.Process.Signal(unix.SIGSTOP) // fails only if it has ended
	harness.Until(p.t, harness.Bound, "the process to stop", func() bool {
		states, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		return err == nil && !slices.ContainsFunc(states, func(path string) bool {
			data, err := os.ReadFile(path) // an error: the thread has ended
			return err == nil && !bytes.Contains(data, []byte(") T "))
		})
	})
	var below []harness.Proc
	for _, pid := range harness.Descendants(pid) {
		if x, ok := harness.ReadProc(pid); ok {
			below = append(below, x)
		}
	}
	_ = p.cmd.Process.Kill()
	<-p.ended
	for _, x := range below {
		harness.Until(p.t, harness.Bound, "the end of all that a killed node ran", func() bool {
			_, _ = unix.Wait4(x.PID, nil, unix.WNOHANG, nil) // ECHILD: it is another's
			now, there := harness.ReadProc(x.PID)
			return !there || now.Start != x.Start
		})
	}
}

// gateway is one, with a client.
type gateway struct {
	*process
	socket string
	client *http.Client
}

// cluster is nodes and gateways, on the same NATS.
type cluster struct {
	t        *testing.T
	dir      string
	nats     string // more of that part of the configuration
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
		name := fmt.Sprintf("g%d", i)
		socket := filepath.Join(c.dir, name+".sock")
		g := &gateway{socket: socket, process: c.process("gateway", name, url, "listen = [\"unix:"+socket+"\"]\n"+config)}
		g.client = unixClient(socket)
		c.gateways = append(c.gateways, g)
	}
	for _, g := range c.gateways {
		c.ready(g, nodes)
	}
	return c
}

func unixClient(socket string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
}

// sum is the id of a file.
func sum(text string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text))) }

func (c *cluster) process(command, name, url, config string) *process {
	c.t.Helper()
	file := filepath.Join(c.dir, name+".toml")
	if !strings.Contains(config, "[nats]") {
		config += "\n[nats]\n"
	}
	config += "url = \"" + url + "\"\nnode = \"" + name + "\"\n" + c.nats
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		c.t.Fatal(err)
	}
	p := &process{t: c.t, args: []string{command, "--config", file}, log: &lockedBuffer{}}
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

// ready waits until a gateway is, and gives it the time to hear of so many nodes.
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
