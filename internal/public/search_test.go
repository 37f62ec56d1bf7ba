package public

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A directory is public if it belongs to a program, and a file if its name is on the list, only root can change them, and
// everybody can read them. The text of some files must not look like a credential.
func TestPublicAdd(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		name = filepath.Join(dir, name)
		check.Must(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o600), os.Chmod(name, mode)))
	}
	for name, mode := range map[string]os.FileMode{
		"protocols": 0o644, "shells": 0o640, "magic": 0o646, "inputrc": 0o640, "bashrc": 0o646, "zshrc": 0o644, "suse-release": 0o644,
		"public.conf": 0o644, "shadow": 0o644, "shadow-": 0o644, "npmrc": 0o644, "x.key": 0o644, "tokenizer.ini": 0o644,
		"perl/Net/libnet.cfg": 0o644, "java-99-openjdk/security/java.policy": 0o644, "java-99-other/x": 0o644, "dpkg/origins": 0o644, "dpkg/lock": 0o640, "unknown-program/x": 0o644, "ssh/ssh_config": 0o644, "cron.d/job": 0o644, "env/x": 0o644, "bash.d/x": 0o644, "perl.d/x": 0o640, "ssh.d/x": 0o644, "xargs.d": 0o644,
	} {
		write(name, "# text\n", mode)
	}
	write("rpc", "yppasswdd 100009\n", 0o644)
	write("profile", "export API_TOKEN=x\n", 0o644)
	write("gitconfig", "[http]\n\textraHeader = Authorization: Basic eA==\n", 0o644)
	write("mailcap", "url = https://me:x@example.org/\n", 0o644)
	write("gitattributes", "url = https://example.org/@x\n", 0o644)
	write("vimrc", strings.Repeat("#", maxPublic), 0o644)
	check.Must(t, unix.Mkfifo(filepath.Join(dir, "locale.alias"), 0o644))
	check.Must(t, os.Symlink("/usr/share/zoneinfo/UTC", filepath.Join(dir, "time")))
	check.Must(t, os.Symlink("../root/x", filepath.Join(dir, "elsewhere")))
	places := func(s search) (names []string) {
		s.root, s.left, s.buf = uint32(os.Geteuid()), manyPublic, make([]byte, maxPublic)
		s.add(dir, denied, true)
		for _, o := range s.parts {
			names = append(names, strings.TrimPrefix(o.Name, dir+"/"))
		}
		slices.Sort(names)
		return names
	}
	want := []string{"bash.d", "dpkg", "env", "gitattributes", "java-99-openjdk", "perl", "perl.d", "protocols", "rpc", "suse-release", "time", "zshrc"}
	check.NoDiff(t, cmp.Diff(want, places(search{})), "(-want +got)")
	t.Run("groups", func(t *testing.T) {
		want := []string{"bash.d", "dpkg/origins", "env", "gitattributes", "java-99-openjdk", "perl", "protocols", "rpc", "suse-release", "time", "zshrc"}
		check.NoDiff(t, cmp.Diff(want, places(search{uid: 1000, groups: []int{os.Getegid()}})), "for a member of the group of dpkg/lock (-want +got)")
	})
	t.Run("a mount of the user's", func(t *testing.T) {
		want := []string{"bash.d", "dpkg", "env", "gitattributes", "java-99-openjdk", "perl.d", "protocols", "suse-release", "time"}
		check.NoDiff(t, cmp.Diff(want, places(search{dests: []string{dir + "/perl/Net", dir + "/zshrc", dir + "/rpc"}})), "(-want +got)")
	})
}

// No file is both on the list of public names and on the one of names that are never shown.
func TestPublicFileDenied(t *testing.T) {
	for _, name := range []string{"passwd", "shadow", "hostname", "machine-id", "netrc", "npmrc", "pip.conf", "wgetrc", "my.cnf", "environment", "krb5.conf", "fstab", "odbc.ini"} {
		public, _ := publicFile(name)
		check.That(t, !public, "%s is public", name)
	}
}
