// Package harness runs the built sbxrun for the tests and asserts, after every run, that all its processes have exited.
//
// The harness knows a run's processes by
//
//   - a marker in the environment, unique to the run. sbxrun and its keeper inherit it; the
//     payload and its descendants get it by --env;
//   - the inode of the sandbox's PID namespace, which it looks up while the run is alive;
//   - their parent: the test process is a child subreaper (prctl(2)) and reaps only what it has
//     started itself. A process that sbxrun abandons becomes its child and stays, at least as a
//     zombie. So the test process acts as a PID 1 that never reaps.
//
// It never compares names. Every test package calls [Main] from its TestMain.
package harness

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// T is the part of *testing.T that the harness needs. Scripts have an adapter for it.
type T interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// slow names the variable that says how many times slower than usual the machine is, for example
// because it is emulated. The harness multiplies its time limits by it.
const slow = "SBXRUN_TESTS_SLOW"

var (
	// Bound is the time limit of a run unless its Options have another. It is far above what any run needs.
	Bound = Scaled(60 * time.Second)

	// Slack is added to every upper bound of a measured time, because the machine may be busy.
	Slack = Scaled(time.Second)

	// settle is how long what a killed sbxrun could not wait for may take to end.
	settle = Scaled(10 * time.Second)

	// reap is how long an orphan may exist. Those that end by themselves take milliseconds, and zombies stay for ever.
	reap = Scaled(2 * time.Second)
)

// Scaled returns a time limit for this machine.
func Scaled(d time.Duration) time.Duration {
	value := os.Getenv(slow)
	if value == "" {
		return d
	}
	factor, err := strconv.ParseFloat(value, 64)
	if err != nil || factor < 1 || factor > 1000 {
		fmt.Fprintf(os.Stderr, "tests: %s=%q is not a number from 1 to 1000\n", slow, value)
		os.Exit(2)
	}
	return time.Duration(factor * float64(d))
}

// Deadline returns a --timeout for a command that needs some time before its deadline. On a slow machine it grows by a
// sixth as much as time limits do, because tests wait for it. [InTime] finds a sufficient one.
func Deadline(d time.Duration) time.Duration { return d + (Scaled(d)-d)/6 }

// Proof returns flags that raise the proof timeout on a slow or busy machine: a killed process needs the CPU once more
// to exit, and Linux before 6.18.45 may delay it for seconds (docs/concepts/lifecycle.md, "A busy machine").
func Proof() []string {
	if d := ProofTimeout(); d > byDefault {
		return []string{"--proof-timeout", d.String()}
	}
	return nil
}

const byDefault = 5 * time.Second // default of --proof-timeout

// ProofTimeout is [Proof] for the configuration of a server.
func ProofTimeout() time.Duration { return Scaled(byDefault) }

// Main runs a package's tests. Afterwards the test process must have no children.
func Main(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	// Most tests wait for deadlines, so by default more of them run in parallel than there are processors.
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if !asked {
		_ = flag.Set("test.parallel", "6") // cannot fail: a number is valid
	}
	if err := ownTerms(); err != nil {
		fmt.Fprintln(os.Stderr, "tests: descriptors:", err)
		return 1
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, "tests: become a subreaper:", err)
		return 1
	}
	defer func() {
		if buildDir != "" {
			os.RemoveAll(buildDir)
		}
	}()
	code = m.Run()
	if left := orphansBy("", time.Now().Add(reap)); len(left) > 0 {
		fmt.Fprintf(os.Stderr, "tests: left behind when all tests were over:\n%s", List(left))
		code = max(code, 1)
	}
	return code
}

// ownTerms removes inherited state that sbxrun would inherit in turn: descriptors above 2 (flock(1) leaves its own
// open) and ignored signals (nohup(1) ignores SIGHUP; a shell ignores SIGINT and SIGQUIT in
// the background). Go resets all signals but SIGHUP and SIGINT itself.
func ownTerms() error {
	for _, s := range []os.Signal{unix.SIGHUP, unix.SIGINT} {
		if signal.Ignored(s) {
			// No one receives from the channel, so the test process still ignores the signal.
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	return unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
}

// Soak returns the number of repetitions of tests that look for rare events: SBXRUN_SOAK, or 4.
func Soak(t T) int {
	t.Helper()
	text := os.Getenv("SBXRUN_SOAK")
	if text == "" {
		return 4
	}
	n, err := strconv.Atoi(text)
	check.Require(t, err == nil && n >= 1, "SBXRUN_SOAK=%q: want a number of runs", text)
	return n
}

// noSkip names the variable that makes skipped tests fail, as in CI.
const noSkip = "SBXRUN_TESTS_NO_SKIP"

// Skip is the only way to skip a test. With SBXRUN_TESTS_NO_SKIP=1 it fails the test.
func Skip(t testing.TB, why string) {
	t.Helper()
	check.Require(t, os.Getenv(noSkip) != "1", "%s=1, but this test cannot run here: %s", noSkip, why)
	t.Skip(why)
}

var (
	buildDir string
	built    = sync.OnceValues(build)
)

// Binary returns the sbxrun under test: $SBXRUN_BIN, or one that is built once per test run,
// static and readable by every user.
func Binary(t T) string {
	t.Helper()
	binary, err := built()
	check.Require(t, err == nil, "no sbxrun to test: %v", err)
	return binary
}

func build() (string, error) {
	if name := os.Getenv("SBXRUN_BIN"); name != "" {
		name, err := filepath.Abs(name)
		if err != nil {
			return "", err
		}
		_, err = os.Stat(name)
		return name, err
	}
	root, err := repository()
	if err != nil {
		return "", err
	}
	if buildDir, err = os.MkdirTemp("", "sbxrun-tests-"); err != nil {
		return "", err
	}
	if err := os.Chmod(buildDir, 0o755); err != nil {
		return "", err
	}
	name := filepath.Join(buildDir, "sbxrun")
	cmd := exec.Command("go", "build", "-ldflags=-E=sbxrun_entry", "-o", buildDir+"/", "./cmd/sbxrun", "./cmd/sbxrund")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return name, errors.Join(os.Chmod(name, 0o755), os.Chmod(name+"d", 0o755))
}

// repository returns the directory that contains the fixtures, at or above the current one. Tests
// start in their package's directory, and some packages are modules of their own.
func repository() (string, error) {
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "fixtures")); err == nil {
			return dir, nil
		}
		if dir == "/" {
			return "", errors.New("no fixtures above the current directory")
		}
	}
	return "", err
}

// FixturesDir returns the repository's fixtures, which every run shows as /fixtures.
func FixturesDir(t T) string {
	t.Helper()
	root, err := repository()
	check.Require(t, err == nil, "fixtures: %v", err)
	return filepath.Join(root, "fixtures")
}

// Dir creates a directory for the test that every user can enter and only the caller can write to.
// Its parents can be entered too, unlike those of testing.T.TempDir, unless TMPDIR is closed.
func Dir(t T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbxrun-test-")
	check.Must(t, err)
	t.Cleanup(func() {
		check.OK(t, removeAll(dir), "remove what the test made")
	})
	check.Must(t, os.Chmod(dir, 0o755))
	return dir
}

// SharedDir creates a Dir that the payload can write to. Started by root, the payload runs as
// nobody; the directory belongs to nobody then, so that sbxrun binds it without an ID map.
func SharedDir(t T) string {
	t.Helper()
	dir := Dir(t)
	check.Must(t, os.Chmod(dir, 0o777))
	if os.Geteuid() == 0 {
		const nobody = 65534
		check.Must(t, os.Chown(dir, nobody, nobody))
	}
	return dir
}

// removeAll also removes directories that a test has made inaccessible.
func removeAll(dir string) error {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(path, 0o700) // RemoveAll reports it
		}
		return nil
	})
	return os.RemoveAll(dir)
}

func newMarker() string {
	var b [8]byte
	rand.Read(b[:]) // crypto/rand never fails
	return hex.EncodeToString(b[:])
}

// Until polls until a condition holds, and fails the test after a time limit. what completes "waited in vain for".
func Until(t T, bound time.Duration, what string, holds func() bool) {
	t.Helper()
	check.Require(t, holdsBy(time.Now().Add(bound), holds), "waited %v in vain for %s", bound, what)
}

func holdsBy(deadline time.Time, holds func() bool) bool {
	for pause := time.Millisecond; ; pause = min(2*pause, 20*time.Millisecond) {
		if holds() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(pause)
	}
}

// Lines splits output into lines.
func Lines(out []byte) []string {
	s := strings.TrimSuffix(string(out), "\n")
	if s == "" {
		return nil
	}
	return strings.Split(s, "\n")
}

// EngineRoot returns a command that runs another as container engines do: as root if the tests
// are, but without capabilities such as CAP_SYS_PTRACE and CAP_SYS_ADMIN.
func EngineRoot() []string {
	if !Root() {
		return nil // an ordinary user has no capabilities anyway
	}
	const usual = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap"
	return []string{"setpriv", "--inh-caps", "-all", "--bounding-set", usual}
}
