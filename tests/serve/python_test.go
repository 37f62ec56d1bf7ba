package serve

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The Python client, with a server of ours and with fakes that fail.
func TestPythonClient(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	root, err := filepath.Abs("../../clients/python")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), "python3", "-B", "-W", "error::ResourceWarning", filepath.Join(root, "tests", "test_client.py"))
	c.Env = append(os.Environ(), "PYTHONPATH="+root, "SBXRUN_SOCKET="+s.socket())
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out, s.log)
	}
	s.idle()
}
