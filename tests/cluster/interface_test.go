package cluster

import (
	"os"
	"os/exec"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// What the interface does, and all clients, through a gateway: the tests of the server itself.
func TestInterface(t *testing.T) {
	o := options(t)
	s := startNATS(t, o)
	defer s.Shutdown()
	run := os.Getenv("SBXRUN_TESTS_RUN")
	if run == "" {
		run = "Client|Driver"
	}
	c := exec.Command("go", "test", "-count=1", "-run", run, "./tests/serve")
	c.Dir = "../.."
	c.Env = append(os.Environ(), "SBXRUN_BIN="+harness.Binary(t), "SBXRUN_TESTS_NATS="+url(o))
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	} else {
		t.Logf("%s", out)
	}
}
