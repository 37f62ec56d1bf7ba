// Package harness runs the built sbxrun for the tests and asserts, after every
// single run, that nothing of it is left.
//
// How a run's processes are known, never by their names:
//
//   - a marker in the environment, unique to the run. sbxrun and its keeper have
//     it from us; the payload and all it starts get it by --env;
//   - the inode of the sandbox's PID namespace, looked up while the run lives;
//   - the test process is a child subreaper (prctl(2)) that reaps nothing but
//     what it has started itself. Whatever sbxrun abandons becomes its child and
//     stays there, as a zombie at the least: so the tests are themselves the
//     PID 1 that never reaps.
//
// Every test package calls [Main] from its TestMain.
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
)

// T is what the harness needs of a test; *testing.T has it, and so has the
// adapter for scripts.
type T interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
}

// slow is the variable that says how many times slower than usual the machine
// is: an emulated one, say. All of the harness's bounds are multiplied by it.
const slow = "SBXRUN_TESTS_SLOW"

var (
	// Bound is how long a run may take unless its Options say otherwise. It is
	// far above what any run needs: who exceeds it hangs.
	Bound = Scaled(60 * time.Second)

	// Slack is what is added to every upper bound of a measured time, because
	// the machine may be busy with something else, such as the other tests.
	Slack = Scaled(time.Second)

	// settle is how long something may take that happens by itself, after an
	// sbxrun that was killed and so could not wait for it.
	settle = Scaled(10 * time.Second)

	// reap is how long an orphan may be there: what ends by itself does so in
	// milliseconds, and a zombie never.
	reap = Scaled(2 * time.Second)
)

// Scaled is a bound as it is on this machine.
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

// Deadline returns how long a command is given that has to get ready before its
// deadline. On a slow machine that is longer too, though by a sixth of what bounds
// are: it is waited for. [InTime] finds what is long enough.
func Deadline(d time.Duration) time.Duration { return d + (Scaled(d)-d)/6 }

// Proof are the flags of a run on this machine. Where bounds are wider, as on a busy machine, so
// is that of the proof: what was killed needs the processor once more to end. Linux before 6.18.45
// may leave it without for seconds (docs/guides/deploy.md, "A busy machine").
func Proof() []string {
	const byDefault = 5 * time.Second // --proof-timeout's
	if d := Scaled(byDefault); d > byDefault {
		return []string{"--proof-timeout", d.String()}
	}
	return nil
}

// Main runs a package's tests. Afterwards the test process must have no
// children at all.
func Main(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	// Tests wait for deadlines most of the time, so more of them may run at
	// once than there are processors, unless the caller has said how many.
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if !asked {
		_ = flag.Set("test.parallel", "6") // a number is always accepted
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

// ownTerms sees to it that what the tests start has what the tests give it, and not
// what they were started with: no descriptor above 2 (flock(1) leaves its own open),
// and no signal ignored (nohup(1) ignores SIGHUP, a shell ignores SIGINT and SIGQUIT in
// the background, and execve(2) keeps that). Go sets every signal but these two to its default.
func ownTerms() error {
	for _, s := range []os.Signal{unix.SIGHUP, unix.SIGINT} {
		if signal.Ignored(s) {
			// Nobody receives from the channel: the tests themselves go on ignoring it.
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	return unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
}

// Soak returns how many repetitions a test makes that looks for what happens
// rarely: SBXRUN_SOAK, or few.
func Soak(t T) int {
	t.Helper()
	text := os.Getenv("SBXRUN_SOAK")
	if text == "" {
		return 10
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("SBXRUN_SOAK=%q: want a number of runs", text)
	}
	return n
}

// noSkip is set where a skipped test would hide a failure, as in CI.
const noSkip = "SBXRUN_TESTS_NO_SKIP"

// Skip is the only way to skip a test. With SBXRUN_TESTS_NO_SKIP=1 it fails
// the test instead.
func Skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv(noSkip) == "1" {
		t.Fatalf("%s=1, but this test cannot run here: %s", noSkip, why)
	}
	t.Skip(why)
}

var (
	buildDir string
	built    = sync.OnceValues(build)
)

// Binary is the sbxrun under test: $SBXRUN_BIN, or one that is built once in a
// test run, static and in a place that every user can read.
func Binary(t T) string {
	t.Helper()
	binary, err := built()
	if err != nil {
		t.Fatalf("no sbxrun to test: %v", err)
	}
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

// repository is the directory that has the fixtures, at or above the current one: a test starts in its
// package's directory, and some of these are modules of their own.
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

// FixturesDir is the repository's fixtures directory, which every run shows
// as /fixtures.
func FixturesDir(t T) string {
	t.Helper()
	root, err := repository()
	if err != nil {
		t.Fatalf("fixtures: %v", err)
	}
	return filepath.Join(root, "fixtures")
}

// Dir makes a directory that everybody can search and nobody else can write to,
// and removes it after the test. Unlike testing.T.TempDir all that leads to it
// can be searched too, as far as TMPDIR allows.
func Dir(t T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbxrun-test-")
	Must(t, err)
	t.Cleanup(func() {
		if err := removeAll(dir); err != nil {
			t.Errorf("remove what the test made: %v", err)
		}
	})
	Must(t, os.Chmod(dir, 0o755))
	return dir
}

// SharedDir is a Dir that the payload can write to, whoever it runs as: started by root it
// is nobody. To nobody it belongs then, so that it is bound as it is, not idmapped.
func SharedDir(t T) string {
	t.Helper()
	dir := Dir(t)
	Must(t, os.Chmod(dir, 0o777))
	if os.Geteuid() == 0 {
		const nobody = 65534
		Must(t, os.Chown(dir, nobody, nobody))
	}
	return dir
}

// removeAll also removes directories that a test has closed to itself.
func removeAll(dir string) error {
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(path, 0o700) // RemoveAll will tell
		}
		return nil
	})
	return os.RemoveAll(dir)
}

func newMarker() string {
	var b [8]byte
	rand.Read(b[:]) // never fails: crypto/rand
	return hex.EncodeToString(b[:])
}

// Until polls a condition until it holds, and fails the test if it does not
// within the bound. what completes "waited in vain for".
func Until(t T, bound time.Duration, what string, holds func() bool) {
	t.Helper()
	if !holdsBy(time.Now().Add(bound), holds) {
		t.Fatalf("waited %v in vain for %s", bound, what)
	}
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

// Lines splits output into its lines, without the last line break.
func Lines(out []byte) []string {
	s := strings.TrimSuffix(string(out), "\n")
	if s == "" {
		return nil
	}
	return strings.Split(s, "\n")
}

// EngineRoot starts a command as container engines start that of an image: as root, if
// the tests are, but without the capabilities to look into other processes
// (CAP_SYS_PTRACE), to mount (CAP_SYS_ADMIN) and others.
func EngineRoot() []string {
	if !Root() {
		return nil // who has none at all
	}
	const usual = "-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap"
	return []string{"setpriv", "--inh-caps", "-all", "--bounding-set", usual}
}
