package files

import (
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestOther(t *testing.T) {
	const mounts = `1 0 0:1 / / rw - tmpfs tmpfs rw
2 1 0:2 / /tmp rw,nosuid - tmpfs tmpfs rw
3 1 0:3 /x /home/sandbox rw - ext4 /dev/a rw
4 1 0:3 /x /data/with\040space rw - ext4 /dev/a rw
5 1 0:3 /x /.layers rw - ext4 /dev/a rw
damaged`
	for _, tt := range []struct{ pattern, begin, want string }{
		{"/tmp", "/tmp", ""}, {"/tmp/*", "/tmp", ""}, {"/tmp/d", "/tmp", ""}, {"/home", "/", "/home/sandbox"}, {"/*", "/", "/tmp"}, {"/h*", "/", "/home/sandbox"},
		{"/home/*", "/", "/home/sandbox"}, {"/home/sandbox/a*", "/home/sandbox", ""}, {"/data/with space", "/data/with space", ""}, {"/data", "/", "/data/with space"}, {"/etc", "/", ""}, {"/.l*", "/", "/.layers"},
	} {
		check.Equal(t, other(mounts, tt.pattern, tt.begin), tt.want, "%s", tt.pattern)
	}
}
