package faults

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// window is how long a run takes until it is torn down, and a bit more.
const window = 30 * time.Millisecond

// killAfter kills sbxrun a moment after its start.
func killAfter(t *testing.T, after time.Duration, o options, flags, payload []string) {
	t.Helper()
	r := start(t, o, slices.Concat(flags, []string{"--timeout", "15"}, payload)...)
	// A busy wait, because sleeping is too coarse; it also looks for the
	// namespace, by which everything in it can be found later.
	for time.Since(r.begin) < after && !r.over() {
		r.processes()
	}
	r.signal(unix.SIGKILL)
	r.wait()
}

// Sbxrun is killed at random moments between 0 and 30 ms.
func TestKilledRandomly(t *testing.T) {
	for range soak(t) {
		killAfter(t, rand.N(window), options{}, nil, busy)
	}
}

// The same of a run that ends by itself, so that its end is met too.
func TestKilledRandomlyAtEnd(t *testing.T) {
	for range scaled(t, 40) {
		killAfter(t, rand.N(window), options{}, nil, leaver)
	}
}

// The same while a directory of root's is idmapped, for which there is one more
// process for a moment.
func TestKilledRandomlyIdmapped(t *testing.T) {
	dir := harness.Dir(t)
	for range scaled(t, 60) {
		killAfter(t, rand.N(window/2), options{}, []string{"--bind", dir + ":/mapped"}, leaver)
	}
}

// The same while both streams are captured.
func TestKilledRandomlyCapturing(t *testing.T) {
	for range scaled(t, 30) {
		killAfter(t, rand.N(window), options{}, []string{"--json"}, []string{"sh", "-c", `: >/out/ran; setsid sleep 600 & while :; do echo x; done`})
	}
}

// The same with a terminal, which must get its old state back. sbxrun does
// not lead the terminal's session, as it never does below a shell: with the death
// of its leader the kernel hangs the terminal up, and nobody can put it back.
func TestKilledRandomlyTerminal(t *testing.T) {
	ptmx, tty, err := pty.Open()
	harness.Must(t, err)
	defer ptmx.Close()
	defer tty.Close()
	before := termios(t, tty)
	raw := 0
	for i := range scaled(t, 30) {
		o := options{stdin: tty, stdout: tty, attr: &unix.SysProcAttr{}}
		r := start(t, o, append([]string{"--tty", "--timeout", "15"}, busy...)...)
		// At any moment; or at once, or soon, after the switch to raw mode.
		after := rand.N(window)
		if i%3 > 0 {
			for !r.over() && termios(t, tty).Lflag&unix.ICANON != 0 && time.Since(r.begin) < bound {
			}
			raw++
			after *= time.Duration(i%3 - 1)
		}
		for from := time.Now(); time.Since(from) < after && !r.over(); {
			r.processes()
		}
		r.signal(unix.SIGKILL)
		r.wait()
		if now := termios(t, tty); now != before {
			t.Errorf("try %d: the terminal was left as it was not before: flags %#x %#x %#x, were %#x %#x %#x",
				i, now.Iflag, now.Oflag, now.Lflag, before.Iflag, before.Oflag, before.Lflag)
			harness.Must(t, unix.IoctlSetTermios(int(tty.Fd()), unix.TCSETS, &before))
		}
	}
	t.Logf("%d times in raw mode", raw)
}

func termios(t *testing.T, tty *os.File) unix.Termios {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	harness.Must(t, err)
	return *state
}
