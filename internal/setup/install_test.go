package setup

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// machine is a fake machine: its /etc/os-release, its programs and its user. Its package managers
// record how they are called.
type machine struct {
	release  string   // contents of /etc/os-release
	has      []string // programs in /usr/bin
	busybox  []string // programs in /usr/bin that are links to busybox
	commands []string // in PATH, in addition to the basic ones
	lists    bool     // apt-get has package lists
	stale    bool     // the first apt-get install fails
	user     bool     // not root
}

const (
	debian = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\nVERSION_ID=\"12\"\n"
	ubuntu = "NAME=\"Ubuntu\"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID=\"24.04\"\n"
	mint   = "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n"
	fedora = "NAME=\"Fedora Linux\"\nID=fedora\nVERSION_ID=41\n"
	alpine = "NAME=\"Alpine Linux\"\nID=alpine\nVERSION_ID=3.20.3\n"
	arch   = "ID=arch\n"

	apt = "env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "
	dnf = "dnf install --assumeyes --setopt=install_weak_deps=False "
	apk = "apk add --no-cache "
)

var all = []string{"bwrap", "python3", "node", "bash", "setpriv", "unshare", "setsid", "jq", "pgrep"}

func but(names ...string) (rest []string) {
	for _, name := range all {
		if !strings.Contains(" "+strings.Join(names, " ")+" ", " "+name+" ") {
			rest = append(rest, name)
		}
	}
	return rest
}

func TestInstall(t *testing.T) {
	for _, tt := range []struct {
		name string
		machine
		flags  []string
		code   int
		ran    []string // the command lines, in order
		stderr string   // part of it
	}{
		{name: "nothing is missing", machine: machine{release: debian, has: all, commands: []string{"apt-get"}}},

		{name: "Debian without lists", machine: machine{release: debian, has: but("bwrap"), commands: []string{"apt-get"}},
			ran: []string{"apt-get update", apt + "bubblewrap"}},
		{name: "Debian with old lists", machine: machine{release: debian, has: but("bwrap"), commands: []string{"apt-get"}, lists: true, stale: true},
			ran: []string{apt + "bubblewrap", "apt-get update", apt + "bubblewrap"}},
		{name: "Debian without anything", machine: machine{release: debian, commands: []string{"apt-get"}, lists: true},
			ran: []string{apt + "bubblewrap python3 nodejs bash util-linux jq procps"}},
		{name: "Debian without what check needs", machine: machine{release: debian, has: all, commands: []string{"apt-get"}, lists: true}, flags: []string{"--check"},
			ran: []string{apt + "curl npm python3-pip python3-setuptools python3-wheel zsh fish bash-completion chromium-headless-shell gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross"}},
		{name: "Debian without what test needs", machine: machine{release: debian, has: all, commands: []string{"apt-get"}, lists: true}, flags: []string{"--test"},
			ran: []string{apt + "curl npm"}},
		{name: "Ubuntu without what check needs", machine: machine{release: ubuntu, has: all, commands: []string{"apt-get"}, lists: true}, flags: []string{"--check"},
			ran: []string{apt + "curl npm python3-pip python3-setuptools python3-wheel zsh fish bash-completion"}},
		{name: "Debian with what check needs", machine: machine{release: debian, has: append(all, "curl", "zsh", "fish", "../share/bash-completion/bash_completion", "npm", "pip3", "chromium-headless-shell", "gcc", "aarch64-linux-gnu-gcc"), commands: []string{"apt-get"}}, flags: []string{"--check"}},
		{name: "Ubuntu by sudo", machine: machine{release: ubuntu, has: but("bwrap", "node"), commands: []string{"apt-get", "sudo"}, user: true},
			ran: []string{"sudo apt-get update", "sudo " + apt + "bubblewrap nodejs"}},
		{name: "made from Ubuntu", machine: machine{release: mint, has: but("bwrap"), commands: []string{"apt-get"}, lists: true},
			ran: []string{apt + "bubblewrap"}},

		{name: "Fedora without anything", machine: machine{release: fedora, commands: []string{"dnf"}},
			ran: []string{dnf + "bubblewrap python3 nodejs bash util-linux jq procps-ng"}},
		{name: "Fedora without what check needs", machine: machine{release: fedora, has: append(all, "curl", "zsh", "fish", "../share/bash-completion/bash_completion"), commands: []string{"dnf"}}, flags: []string{"--check"},
			ran: []string{dnf + "nodejs-npm python3-pip python3-setuptools python3-wheel"}},

		{name: "Alpine with busybox alone", machine: machine{release: alpine, busybox: []string{"setpriv", "unshare", "setsid"}, commands: []string{"apk"}},
			ran: []string{apk + "bubblewrap python3 nodejs bash setpriv util-linux jq procps"}},
		{name: "Alpine by doas", machine: machine{release: alpine, has: but("bwrap"), commands: []string{"apk", "doas"}, user: true},
			ran: []string{"doas " + apk + "bubblewrap"}},

		{name: "neither root nor sudo", machine: machine{release: debian, has: but("bwrap"), commands: []string{"apt-get"}, user: true},
			code: 1, stderr: "only root can install packages, and neither sudo nor doas is here\nsetup: hint: as root, let apt-get install: bubblewrap\n"},
		{name: "unknown distribution", machine: machine{release: arch, has: but("bwrap", "node"), commands: []string{"pacman"}},
			code: 1, stderr: "setup: hint: install with its package manager: bubblewrap nodejs\n"},
		{name: "no package manager", machine: machine{release: fedora, has: but("bwrap")},
			code: 1, stderr: "no dnf here\nsetup: hint: install: bubblewrap\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := tt.build(t)
			code, stdout, stderr, ran := m.install(t, tt.flags...)
			check.That(t, code == tt.code && strings.Contains(stderr, tt.stderr) && (tt.stderr != "" || stderr == ""),
				"exit code %d and stderr %q, want %d and %q", code, stderr, tt.code, tt.stderr)
			check.NoDiff(t, cmp.Diff(tt.ran, ran), "commands (-want +got)")
			var want string
			for _, line := range tt.ran {
				want += "setup: " + line + "\n"
			}
			if want == "" && code == 0 {
				want = "setup: nothing is missing\n"
			}
			check.NoDiff(t, cmp.Diff(want, stdout), "stdout (-want +got)")

			// A dry run prints the same and does nothing. It cannot know that the lists are old.
			dryCode, dry, _, dryRan := m.install(t, append(tt.flags, "--dry-run")...)
			if tt.stale {
				stdout, _, _ = strings.Cut(stdout, "setup: apt-get update")
			}
			check.That(t, dryCode == code && dry == stdout && dryRan == nil, "--dry-run: exit code %d, stdout %q, and it ran %q", dryCode, dry, dryRan)
		})
	}
}

// built is a machine on disk.
type built struct{ root, path, log string }

func (m machine) build(t *testing.T) built {
	t.Helper()
	dir := t.TempDir()
	b := built{root: filepath.Join(dir, "root"), path: filepath.Join(dir, "path"), log: filepath.Join(dir, "log")}
	if m.release != "" {
		put(t, filepath.Join(b.root, "etc/os-release"), m.release)
	}
	for _, name := range m.has {
		put(t, filepath.Join(b.root, "usr/bin", name), "")
	}
	for i, name := range m.busybox {
		if i == 0 {
			put(t, filepath.Join(b.root, "bin/busybox"), "")
			check.Must(t, os.MkdirAll(filepath.Join(b.root, "usr/bin"), 0o755))
		}
		check.Must(t, os.Symlink("../../bin/busybox", filepath.Join(b.root, "usr/bin", name)))
	}
	if m.lists {
		put(t, filepath.Join(b.root, "var/lib/apt/lists/somewhere_Packages.lz4"), "")
	}

	uid := 0
	if m.user {
		uid = 1000
	}
	put(t, filepath.Join(b.path, "id"), fmt.Sprintf("#!/bin/sh\necho %d\n", uid))
	for _, name := range []string{"readlink", "ls", "grep"} {
		real, err := exec.LookPath(name)
		check.Must(t, err)
		check.Must(t, os.Symlink(real, filepath.Join(b.path, name)))
	}
	for _, name := range append([]string{"env"}, m.commands...) {
		fails := ""
		if m.stale {
			fails = `case "$(wc -l <` + b.log + `) $*" in "1 "*install*) exit 100 ;; esac` + "\n"
		}
		put(t, filepath.Join(b.path, name), "#!/bin/sh\nPATH=/usr/bin:/bin\necho "+name+` "$@" >>`+b.log+"\n"+fails)
	}
	return b
}

func put(t *testing.T, name, text string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755))
	check.Must(t, os.WriteFile(name, []byte(text), 0o755))
}

// install runs the script on the machine, and returns what it did.
func (b built) install(t *testing.T, args ...string) (code int, stdout, stderr string, ran []string) {
	t.Helper()
	check.Must(t, os.RemoveAll(b.log))
	cmd := exec.Command("/bin/sh", append([]string{"install.sh"}, args...)...)
	cmd.Env = []string{"PATH=" + b.path, "SETUP_ROOT=" + b.root}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	check.Require(t, err == nil || cmd.ProcessState != nil, "%v", err)
	log, err := os.ReadFile(b.log)
	check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
	if text := strings.TrimSuffix(string(log), "\n"); text != "" {
		ran = strings.Split(text, "\n")
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String(), ran
}
