package cluster

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The tests of the server and its clients pass through a gateway, too.
func TestInterface(t *testing.T) {
	o := runNATS(t)
	run := os.Getenv("SBXRUN_TESTS_RUN")
	if run == "" {
		run = "Client|MCPTools|MCPSession|MCPLeaves|ProcessStdin|SessionFiles|Streams|SlowReader"
	}
	c := exec.Command("go", "test", "-v", "-count=1", "-run", run, "./tests/serve")
	c.Dir = "../.."
	c.Env = append(os.Environ(), "SBXRUN_BIN="+harness.Binary(t), "SBXRUN_TESTS_NATS="+url(o))
	out, err := c.CombinedOutput()
	check.Require(t, err == nil, "%v\n%s", err, out)
	for word := range strings.SplitSeq(run, "|") {
		check.That(t, regexp.MustCompile(`(?m)^--- PASS: .*`+word).Match(out), "no test of %q has passed: %s", word, out)
	}
	if bytes.Contains(out, []byte("--- SKIP")) {
		harness.Skip(t, string(out))
	}
}
