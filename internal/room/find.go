package room

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Program is the bubblewrap that is used.
type Program struct {
	Path    string // absolute
	Version string // "0.8.0"
}

// Find looks for bwrap in the absolute directories of PATH and tells its version. It
// starts nothing: the version is a string inside the program, and reading those 70 kB is
// twenty times quicker than asking it, which happens only where it is not found, until ctx is done.
func Find(ctx context.Context, searchPath string) (Program, error) {
	name := lookHost("bwrap", searchPath)
	if name == "" && searchPath == "" {
		return Program{}, &result.Error{Code: "bwrap-missing", Message: "cannot look for bubblewrap: PATH is empty or not set", Hint: "set it: PATH=/usr/bin:/bin"}
	}
	if name == "" {
		return Program{}, &result.Error{
			Code:    "bwrap-missing",
			Message: fmt.Sprintf("bubblewrap is not installed: no bwrap in PATH %s", searchPath),
			Hint:    "install it: " + installHint(),
		}
	}
	st, err := os.Stat(name)
	if err != nil {
		return Program{}, &result.Error{Code: "bwrap-missing", Message: fmt.Sprintf("cannot use bubblewrap: %v", err), Err: err}
	}
	if st.Mode()&(os.ModeSetuid|os.ModeSetgid) != 0 {
		// It would run as root where neither the keeper nor we may signal it.
		return Program{}, &result.Error{
			Code:    "bwrap-setuid",
			Message: fmt.Sprintf("%s is setuid: sbxrun could not end what it starts", name),
			Hint:    "chmod u-s,g-s " + shellQuote(name) + ", and allow user namespaces (sbxrun doctor tells how)",
		}
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && os.Geteuid() == 0 && (!rootOwns(name, sys.Uid) || st.Mode().Perm()&0o022 != 0 || !othersKeepOut(filepath.Dir(name))) {
		// Somebody else's program, in a directory of root's PATH.
		return Program{}, &result.Error{
			Code:    "bwrap-untrusted",
			Message: fmt.Sprintf("%s could have been written by others than root, who would run it", name),
			Hint:    "take its directory out of PATH, or chown root and chmod go-w it",
		}
	}
	p, err := inspect(ctx, name)
	if err != nil {
		return Program{}, &result.Error{Code: "bwrap-unusable", Message: fmt.Sprintf("cannot use %s: %v", name, err), Err: err}
	}
	if p.older(leastMinor) {
		return Program{}, &result.Error{
			Code:    "bwrap-too-old",
			Message: fmt.Sprintf("bubblewrap %s at %s is too old: 0.%d or later is needed", p.Version, name, leastMinor),
			Hint:    "install a newer one: " + installHint(),
		}
	}
	return p, nil
}

// maxProgram bounds what is read of a bwrap: the real one has 70 to 100 kB.
const maxProgram = 8 << 20

// rootOwns says whether a file belongs to root, or to the overflow uid in a user
// namespace where the real root has no name and we are not its equal.
func rootOwns(name string, uid uint32) bool {
	return uid == 0 || uid == Nobody && unix.Access(name, unix.W_OK) != nil
}

// othersKeepOut says whether nobody but its owner can change the names in dir.
func othersKeepOut(dir string) bool {
	st, err := os.Stat(dir)
	return err == nil && (st.Mode().Perm()&0o022 == 0 || st.Mode()&os.ModeSticky != 0)
}

// askBound is how long a bwrap may take to tell its version: long beside what it needs, as a
// busy machine may leave it without a CPU for seconds.
const askBound = 10 * time.Second

// inspect reads the version out of the program's text, or asks the program.
func inspect(ctx context.Context, name string) (p Program, err error) {
	p.Path = name
	if p.Version = readVersion(name); p.Version != "" {
		return p, nil
	}
	// A wrapper script, or a build we do not know.
	out, err := ask(ctx, name, "--version")
	if err != nil {
		return p, err
	}
	version, ok := strings.CutPrefix(strings.TrimSpace(string(out)), "bubblewrap ")
	if !ok {
		return p, fmt.Errorf("%s --version printed %.60q", name, out)
	}
	p.Version = version
	return p, nil
}

// readVersion reads the version out of the text of a program that knows --as-pid-1; "" if it
// cannot. In pieces, by the same memory: to touch that of the whole for the first time takes
// longer than to read it.
func readVersion(name string) (version string) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = unix.Close(fd) }() // only read from
	const longest = 64                    // more than what is looked for is long
	buf := make([]byte, 16<<10)
	kept, known := 0, false
	for range maxProgram / (len(buf) - longest) {
		n, err := unix.Read(fd, buf[kept:])
		if err != nil || n == 0 {
			return ""
		}
		text := buf[:kept+n]
		known = known || bytes.Contains(text, []byte("--as-pid-1"))
		version = cmp.Or(version, embeddedVersion(text))
		if known && version != "" {
			return version
		}
		kept = copy(buf, text[max(0, len(text)-longest):])
	}
	return ""
}

// ask runs bwrap with one option and returns what it prints, up to a bound, in
// bounded time. It is a process group of its own, and ended as such.
func ask(ctx context.Context, name, option string) ([]byte, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(ctx, askBound)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, option)
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond // for a pipe that a grandchild holds
	var out limited
	cmd.Stdout = &out
	// The signal comes when the thread that forked ends (prctl(2)).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("no answer within %v", time.Since(begin).Round(time.Second))
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", name, option, err)
	}
	return out.text, nil
}

// limited keeps the first 64 KiB; more is an error, and ends the program.
type limited struct{ text []byte }

func (l *limited) Write(b []byte) (int, error) {
	if len(l.text)+len(b) > 64<<10 {
		return 0, errors.New("says too much")
	}
	l.text = append(l.text, b...)
	return len(b), nil
}

// embeddedVersion finds the string that --version prints, "bubblewrap 0.8.0".
func embeddedVersion(text []byte) string {
	const name = "bubblewrap "
	for {
		i := bytes.Index(text, []byte(name))
		if i < 0 {
			return ""
		}
		text = text[i+len(name):]
		end := bytes.IndexByte(text, 0)
		if end < 0 || end > 20 {
			continue
		}
		if version := string(text[:end]); strings.Count(version, ".") >= 1 && strings.Trim(version, "0123456789.") == "" {
			return version
		}
	}
}

// The least versions 0.N.
const (
	leastMinor = 4  // to build a room with: 0.4.0 is the oldest that tests run with
	wholeMinor = 8  // to do so without sbxrun: that has --disable-userns
	linksMinor = 12 // not to follow links on the way to a mount point
)

// older reports whether the version is below 0.minor, or not understood.
func (p Program) older(minor int) bool {
	first, rest, _ := strings.Cut(p.Version, ".")
	second, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(first)
	b, err2 := strconv.Atoi(second)
	return err1 != nil || err2 != nil || a == 0 && b < minor
}

// FollowsLinks reports whether it may follow symbolic links on the way to a mount point
// (CVE-2026-87766). Distributions may have the fix in an older version.
func (p Program) FollowsLinks() bool { return p.older(linksMinor) }

// Whole returns nil if this bubblewrap can build a room without sbxrun's help, as the
// command that [Plan.ShellCommand] prints has to; or a *[result.Error].
func (p Program) Whole() error {
	if !p.older(wholeMinor) {
		return nil
	}
	return &result.Error{
		Code: "bwrap-too-old",
		Message: fmt.Sprintf("bubblewrap %s at %s has no options for the size and mode of a tmpfs, or against user namespaces, which sbxrun sees to itself: "+
			"a command without sbxrun takes bubblewrap 0.%d", p.Version, p.Path, wholeMinor),
		Hint: "install a newer one: " + installHint(),
	}
}

// installHint is the command that installs bubblewrap on this distribution.
func installHint() string {
	for _, m := range []struct{ program, command string }{
		{"apt-get", "apt-get install bubblewrap"},
		{"dnf", "dnf install bubblewrap"},
		{"apk", "apk add bubblewrap"},
		{"pacman", "pacman -S bubblewrap"},
		{"zypper", "zypper install bubblewrap"},
	} {
		if _, err := exec.LookPath(m.program); err == nil {
			return m.command
		}
	}
	return "your distribution's package bubblewrap"
}
