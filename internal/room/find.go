package room

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Program is a bubblewrap executable.
type Program struct {
	Path    string // absolute, without links
	Version string // for example "0.8.0"; "" if unknown, for example of a wrapper script
}

// ProgramVariable is an environment variable with the absolute path of the bubblewrap to use.
const ProgramVariable = "SBXRUN_BWRAP"

// programPlaces are the paths where distributions install bubblewrap. PATH is not searched, because it often contains
// project directories, which sandboxed commands can write to.
var programPlaces = []string{"/usr/bin/bwrap", "/bin/bwrap", "/usr/local/bin/bwrap", "/run/current-system/sw/bin/bwrap", "/run/current-system/profile/bin/bwrap"}

// Find returns the bubblewrap that c names, or else the first in programPlaces. Only root and the caller may be able
// to change it: in a user namespace with a single uid, all files belong to the caller. It must not lie where mounts
// let the sandbox write, and a named one must not lie below cwd, the current directory if the sandbox shows it. Find
// executes nothing: the version is a string inside the program.
func Find(c Caller, cwd string, mounts []Mount) (p Program, err error) {
	places, own := programPlaces, c.UID != 0
	if c.Bwrap != "" {
		places = []string{c.Bwrap}
		if cwd != "" && holds(cwd, c.Bwrap) {
			return p, untrustedProgram("%s names %q in the current directory, where anyone could have put it", ProgramVariable, c.Bwrap)
		}
	}
	exposed := func(file string) error {
		for _, m := range mounts {
			if m.Kind != ReadWrite || !holds(m.Source, file) {
				continue
			}
			// An ordinary user's sandbox cannot write to root's directories, whatever is bound.
			if _, err := safeopen.Program(file, false); err != nil || !own {
				return untrustedProgram("the sandbox may write to %q, and so change %s", m.Source, file)
			}
		}
		return nil
	}
	var missing error
	var untrusted *safeopen.UntrustedError
	for _, place := range places {
		if err := exposed(place); err != nil {
			return p, err // or the next sbxrun would execute a file planted there
		}
		if p.Path, err = safeopen.Program(place, own); err == nil {
			break
		}
		missing = cmp.Or(missing, err)
		if untrusted == nil {
			errors.As(err, &untrusted)
		}
	}
	switch {
	case p.Path != "":
		if err := exposed(p.Path); err != nil {
			return p, err
		}
	case untrusted != nil:
		return p, untrustedProgram("%v", untrusted)
	case c.Bwrap != "":
		return p, &result.Error{Code: "bwrap-missing", Message: fmt.Sprintf("cannot use the bubblewrap that %s names: %v", ProgramVariable, missing),
			Hint: "unset the variable, or name the program by its absolute path", Err: missing}
	default:
		return p, &result.Error{
			Code:    "bwrap-missing",
			Message: "bubblewrap is not installed: no " + strings.Join(places, ", ") + ", and " + ProgramVariable + " names none",
			Hint:    "install it: " + installHint(),
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(p.Path, &st); err != nil {
		return Program{}, &result.Error{Code: "bwrap-missing", Message: fmt.Sprintf("cannot use bubblewrap: %s: %v", p.Path, err), Err: err}
	}
	if st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 {
		// It would run as root where neither the keeper nor we may signal it.
		return Program{}, &result.Error{
			Code:    "bwrap-setuid",
			Message: fmt.Sprintf("%s is setuid: sbxrun could not end its processes", p.Path),
			Hint:    "chmod u-s,g-s " + values.ShellQuote(p.Path) + ", and allow user namespaces (see sbxrun doctor)",
		}
	}
	p.Version = readVersion(p.Path)
	if p.Version != "" && p.older(leastMinor) {
		return Program{}, &result.Error{
			Code:    "bwrap-too-old",
			Message: fmt.Sprintf("bubblewrap %s at %s is too old: 0.%d or later is needed", p.Version, p.Path, leastMinor),
			Hint:    "install a newer one: " + installHint(),
		}
	}
	return p, nil
}

// untrustedProgram is the error for a bwrap that others could have changed.
func untrustedProgram(format string, args ...any) error {
	return &result.Error{
		Code:    "bwrap-untrusted",
		Message: "bubblewrap cannot be trusted: " + fmt.Sprintf(format, args...),
		Hint:    "install it in a directory that only root can write to, such as /usr/bin",
	}
}

// maxProgram limits how much of a bwrap is read: the real one has 70 to 100 kB.
const maxProgram = 8 << 20

// holds reports whether file is top or lies below it. It compares inodes instead of paths, so links and bind mounts
// make no difference.
func holds(top, file string) bool {
	var want, st unix.Stat_t
	if unix.Stat(top, &want) != nil {
		return false
	}
	for ; ; file = path.Dir(file) {
		if unix.Stat(file, &st) == nil && st.Dev == want.Dev && st.Ino == want.Ino {
			return true
		}
		if file == "/" || !path.IsAbs(file) {
			return false
		}
	}
}

// readVersion finds the version in the text of a program that knows --as-pid-1; "" if there is none. It reads pieces
// into one buffer, because page faults for the whole file would take longer than reading it.
func readVersion(name string) (version string) {
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer func() { _ = unix.Close(fd) }() // only read from
	const longest = 64                    // longer than any search string
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

// Minimum versions 0.N.
const (
	leastMinor = 4  // for building a room; the tests run with 0.4.0 and later
	wholeMinor = 8  // for building a room without sbxrun; has --disable-userns
	linksMinor = 12 // for not following links on the way to a mount point
)

// older reports whether the version is below 0.minor or cannot be parsed.
func (p Program) older(minor int) bool {
	first, rest, _ := strings.Cut(p.Version, ".")
	second, _, _ := strings.Cut(rest, ".")
	a, err1 := strconv.Atoi(first)
	b, err2 := strconv.Atoi(second)
	return err1 != nil || err2 != nil || a == 0 && b < minor
}

// FollowsLinks reports whether this bubblewrap may follow symbolic links on the way to a mount point
// (CVE-2026-87766). Distributions may have the fix in an older version.
func (p Program) FollowsLinks() bool { return p.older(linksMinor) }

// Whole returns nil if this bubblewrap can build a room without sbxrun's help, as for [Plan.Plain]. Otherwise it returns
// a *[result.Error].
func (p Program) Whole() error {
	if !p.older(wholeMinor) {
		return nil
	}
	if p.Version == "" {
		return &result.Error{
			Code:    "bwrap-unusable",
			Message: fmt.Sprintf("the version of %s is unknown: a command without sbxrun requires bubblewrap 0.%d", p.Path, wholeMinor),
			Hint:    "name the program itself, and not a script around it, in " + ProgramVariable,
		}
	}
	return &result.Error{
		Code: "bwrap-too-old",
		Message: fmt.Sprintf("bubblewrap %s at %s has no options for the size and mode of a tmpfs, or against user namespaces, which sbxrun sees to itself: "+
			"a command without sbxrun requires bubblewrap 0.%d", p.Version, p.Path, wholeMinor),
		Hint: "install a newer one: " + installHint(),
	}
}

// installHint returns the command that installs bubblewrap on this distribution.
func installHint() string {
	for _, m := range []struct{ program, command string }{
		{"apt-get", "apt-get install bubblewrap"},
		{"dnf", "dnf install bubblewrap"},
		{"apk", "apk add bubblewrap"},
		{"pacman", "pacman -S bubblewrap"},
		{"zypper", "zypper install bubblewrap"},
	} {
		if _, err := exec.LookPath(m.program); err == nil {
			if os.Geteuid() != 0 {
				return "sudo " + m.command
			}
			return m.command
		}
	}
	return "your distribution's package bubblewrap"
}
