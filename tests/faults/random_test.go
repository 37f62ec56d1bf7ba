package faults

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// window is a bit longer than a run takes until its teardown.
const window = 30 * time.Millisecond

// killAfter kills sbxrun some time after its start.
func killAfter(t *testing.T, after time.Duration, o options, flags, payload []string) {
	t.Helper()
	r := start(t, o, slices.Concat(flags, []string{"--timeout", "15"}, payload)...)
	// Wait busily, because sleeping is too coarse. Meanwhile note the namespace, which later
	// identifies the run's processes.
	for time.Since(r.begin) < after && !r.over() {
		r.processes()
	}
	r.signal(unix.SIGKILL)
	r.wait()
}

// When sbxrun is killed at a random moment, the run ends completely.
func TestKilledRandomly(t *testing.T) {
	for range soak(t) {
		killAfter(t, rand.N(window), options{}, nil, busy)
	}
}

// The same for a run that exits by itself, so that some kills hit its end.
func TestKilledRandomlyAtEnd(t *testing.T) {
	for range scaled(t, 40) {
		killAfter(t, rand.N(window), options{}, nil, leaver)
	}
}

// The same with an idmapped mount, for which a helper process exists for a moment.
func TestKilledRandomlyIdmapped(t *testing.T) {
	dir := harness.Dir(t)
	for range scaled(t, 60) {
		killAfter(t, rand.N(window/2), options{}, []string{"--bind", dir + ":/mapped"}, leaver)
	}
}

// The same with both streams captured.
func TestKilledRandomlyCapturing(t *testing.T) {
	for range scaled(t, 30) {
		killAfter(t, rand.N(window), options{}, []string{"--json"}, []string{"sh", "-c", `: >/out/ran; setsid sleep 600 & while :; do echo x; done`})
	}
}

// The same with a terminal, whose state is restored. sbxrun does not lead the terminal's session,
// just as below a shell: when a session leader dies, the kernel hangs up the terminal, and nobody
// can restore it.
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
		// Kill it at a random moment: after its start, or immediately or shortly after the switch to raw mode.
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

// A run survives the end of the threads of sbxrun. The kernel kills bwrap with the thread that has
// started it (PR_SET_PDEATHSIG), and Go ends threads at will. So the test uses few processors, a
// garbage collection for every megabyte of captured output, and a signal every millisecond.
func TestThreadChurn(t *testing.T) {
	seconds := "0.5"
	switch n := soak(t); {
	case n >= 1000:
		seconds = "10"
	case n >= enough:
		seconds = "2"
	}
	for _, procs := range []string{"1", "8"} {
		r := start(t, options{env: []string{
			"GOMAXPROCS=" + procs, "GOGC=1", "GODEBUG=gctrace=1,gcstoptheworld=1,asyncpreemptoff=0",
		}}, "--json", "--timeout", lifetime, "sh", "-c", ": >/out/ran; timeout "+seconds+" yes; yes | head -c 1M; setsid sleep 600 & exit 7")
		for beat := time.NewTicker(time.Millisecond); ; {
			select {
			case <-beat.C:
				// Both only cause work for the runtime.
				r.signal(unix.SIGURG)
				r.signal(unix.SIGWINCH)
				continue
			case <-r.exited:
			}
			beat.Stop()
			break
		}
		o := r.wait()
		if o.code != 7 || o.report == nil || o.report.Cause != "exited" || o.report.Teardown.Verdict != "proven" {
			t.Errorf("GOMAXPROCS=%s: want 7: %v", procs, o)
			continue
		}
		check.That(t, *o.report.StdoutBytes > 1<<20, "only %d bytes of output", *o.report.StdoutBytes)
	}
}
