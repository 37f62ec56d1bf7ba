package faults

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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
		if *o.report.StdoutBytes <= 1<<20 {
			t.Errorf("only %d bytes of output", *o.report.StdoutBytes)
		}
	}
}
