package room

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	// DisableUserns: --disable-userns, bubblewrap 0.8.
	DisableUserns bool
}

// Find looks for bwrap in the absolute directories of PATH and tells what it
// can do. It starts nothing: the version and the options are strings inside the
// program, and reading those 70 kB is twenty times quicker than asking it, which
// happens only where they are not found.
func Find(searchPath string) (Program, error) {
	name := lookup(searchPath)
	if name == "" && searchPath == "" {
		return Program{}, &result.Error{Code: "bwrap-missing", Message: "bubblewrap cannot be looked for: PATH is empty or not set", Hint: "set it: PATH=/usr/bin:/bin"}
	}
	if name == "" {
		return Program{}, &result.Error{
			Code:    "bwrap-missing",
			Message: fmt.Sprintf("bubblewrap is not installed: no bwrap in PATH %s", searchPath),
			Hint:    "install it: " + InstallHint(),
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
	p, text, err := inspect(name)
	if err != nil {
		return Program{}, &result.Error{Code: "bwrap-unusable", Message: fmt.Sprintf("cannot use %s: %v", name, err), Err: err}
	}
	if tooOld(p.Version) {
		return Program{}, &result.Error{
			Code:    "bwrap-too-old",
			Message: fmt.Sprintf("bubblewrap %s at %s is too old: 0.7 is the least, and 0.8 what sbxrun is tested with", p.Version, name),
			Hint:    "install a newer one: " + InstallHint(),
		}
	}
	if !bytes.Contains(text, []byte("--size")) {
		return Program{}, &result.Error{
			Code:    "bwrap-too-old",
			Message: fmt.Sprintf("bubblewrap %s at %s cannot bound the size of /tmp (--size, bubblewrap 0.7)", p.Version, name),
			Hint:    "install a newer one: " + InstallHint(),
		}
	}
	p.DisableUserns = bytes.Contains(text, []byte("--disable-userns"))
	return p, nil
}

func lookup(searchPath string) string {
	for _, dir := range filepath.SplitList(searchPath) {
		if !filepath.IsAbs(dir) {
			continue // never a bwrap out of the current directory
		}
		name := filepath.Join(dir, "bwrap")
		if st, err := os.Stat(name); err == nil && st.Mode().IsRegular() && unix.Access(name, unix.X_OK) == nil {
			return name
		}
	}
	return ""
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

// askBound is how long a bwrap may take to tell its version.
const askBound = 2 * time.Second

// inspect reads the version out of the program's text, or asks the program.
func inspect(name string) (p Program, text []byte, err error) {
	p.Path = name
	if st, err := os.Stat(name); err == nil && st.Size() <= maxProgram {
		if text, err = os.ReadFile(name); err == nil {
			if p.Version = embeddedVersion(text); p.Version != "" && bytes.Contains(text, []byte("--json-status-fd")) {
				return p, text, nil
			}
		}
	}
	// A wrapper script, or a build we do not know.
	out, err := ask(name, "--version")
	if err != nil {
		return p, nil, err
	}
	version, ok := strings.CutPrefix(strings.TrimSpace(string(out)), "bubblewrap ")
	if !ok {
		return p, nil, fmt.Errorf("%s --version printed %.60q", name, out)
	}
	if p.Version = version; tooOld(version) {
		return p, nil, nil // and may not know the question
	}
	text, err = ask(name, "--help")
	return p, text, err
}

// ask runs bwrap with one option and returns what it prints, up to a bound, in
// bounded time. It is a process group of its own, and ended as such.
func ask(name, option string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), askBound)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, option)
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond // for a pipe that a grandchild holds
	var out limited
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
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

// tooOld reports whether a version is below 0.7, which has --size.
func tooOld(version string) bool {
	major, rest, _ := strings.Cut(version, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	return err1 != nil || err2 != nil || a == 0 && b < 7
}

// InstallHint is the command that installs bubblewrap on this distribution.
func InstallHint() string {
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
