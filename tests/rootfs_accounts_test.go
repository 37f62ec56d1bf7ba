package tests

import (
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// In a writable root directory, programs such as groupadd(8) can write to the list of groups in place.
func TestRootfsAccounts(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, layer(t, "--cwd", "none", "--user", "0:0", "--rootfs", rootTree(t), "--overlay", "/", "sh", "-c", "echo new:x:9: >>/etc/group && cat /etc/group")...)
	r.Expect(t, 0, "exited")
	got := string(r.Stdout)
	check.That(t, strings.HasSuffix(got, "\nnew:x:9:\n"), "printed %q", got)
}
