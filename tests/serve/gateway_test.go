package serve

import (
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// behindGateway puts a gateway on the server's socket, and returns another socket for the server.
// tests/cluster runs the tests of this package this way: a gateway must answer as the server does.
func (s *server) behindGateway(url, config string, flags []string) (own string) {
	s.t.Helper()
	s.cluster = "t" + itoa(os.Getpid()) + "-" + itoa(int(time.Now().UnixNano()%1e12))
	file := filepath.Join(s.dir, "gateway.toml")
	config = "listen = [\"unix:" + s.socket() + "\"]\n" + config + "\n[nats]\nnode = \"gateway\"\nurl = \"" + url + "\"\ncluster = \"" + s.cluster + "\"\n"
	harness.Must(s.t, os.WriteFile(file, []byte(config), 0o600))
	log := &harness.Log{}
	c := exec.Command(harness.Binary(s.t), append([]string{"gateway", "--config", file}, flags...)...)
	c.Stderr = log
	ended := harness.Serve(s.t, c)
	s.t.Cleanup(func() {
		_ = c.Process.Signal(unix.SIGTERM) // fails only if it has exited
		code := harness.Ended(s.t, c, ended, log)
		check.That(s.t, code == 0, "the gateway has ended with %d: %s", code, log)
		if s.t.Failed() {
			s.t.Logf("the gateway: %s", log)
		}
	})
	return s.socket() + ".node"
}
