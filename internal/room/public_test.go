package room

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// An entry is public if only root can change it, everybody can read it, and it does not look like a credential.
func TestPublicAdd(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		name = filepath.Join(dir, name)
		harness.Must(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o600), os.Chmod(name, mode)))
	}
	for name, mode := range map[string]os.FileMode{
		"public.conf": 0o644, "closed.conf": 0o640, "open.conf": 0o646, "shadow": 0o644, "shadow-": 0o644, "npmrc": 0o644, "x.key": 0o644, "auth.conf": 0o644, "tokenizer.ini": 0o644,
		"perl/Net/libnet.cfg": 0o644, "dpkg/origins": 0o644, "dpkg/lock": 0o640, "unknown-program/x": 0o644, "ssh/ssh_config": 0o644, "cron.d/job": 0o644, "env/x": 0o644, "bash.d/x": 0o644, "perl.d/x": 0o640, "ssh.d/x": 0o644, "xargs.d": 0o644,
	} {
		write(name, "# text\n", mode)
	}
	write("token.conf", "api-key = x\n", 0o644)
	write("gitconfig", "[http]\n\textraHeader = Authorization: Basic eA==\n", 0o644)
	write("proxy.conf", "url = https://me:x@example.org/\n", 0o644)
	write("url.conf", "url = https://example.org/@x\n", 0o644)
	write("large.conf", strings.Repeat("#", maxPublic+1), 0o644)
	harness.Must(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
	harness.Must(t, os.Symlink("/usr/share/zoneinfo/UTC", filepath.Join(dir, "time")))
	harness.Must(t, os.Symlink("../root/x", filepath.Join(dir, "elsewhere")))
	places := func(s public) (names []string) {
		s.root, s.left, s.buf = uint32(os.Geteuid()), manyPublic, make([]byte, maxPublic)
		s.add(dir, denied, true)
		for _, o := range s.ops {
			names = append(names, strings.TrimPrefix(o.dst, dir+"/"))
		}
		slices.Sort(names)
		return names
	}
	want := []string{"bash.d", "dpkg", "env", "perl", "perl.d", "public.conf", "time", "tokenizer.ini", "url.conf"}
	if diff := cmp.Diff(want, places(public{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	t.Run("groups", func(t *testing.T) {
		want := []string{"bash.d", "dpkg/origins", "env", "perl", "public.conf", "time", "tokenizer.ini", "url.conf"}
		if diff := cmp.Diff(want, places(public{uid: 1000, groups: []int{os.Getegid()}})); diff != "" {
			t.Errorf("for a member of the group of dpkg/lock (-want +got):\n%s", diff)
		}
	})
	t.Run("a mount of the user's", func(t *testing.T) {
		want := []string{"bash.d", "dpkg", "env", "perl.d", "public.conf", "time", "tokenizer.ini"}
		if diff := cmp.Diff(want, places(public{dests: []string{dir + "/perl/Net", dir + "/url.conf"}})); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}
