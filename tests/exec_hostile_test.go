package tests

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// The command line and environment of sbxrun exec are never visible in the sandbox, however fast
// its command looks while 50 execs enter.
func TestExecSecrets(t *testing.T) {
	t.Parallel()
	const scanner = `
import os, sys
key, token = sys.argv[1][::-1].encode(), sys.argv[2][::-1].encode()
me, seen, rounds = str(os.getpid()), set(), 0
while not os.path.exists("/tmp/stop"):
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == me:
            continue
        for name in ("cmdline", "environ"):
            try:
                data = open(f"/proc/{pid}/{name}", "rb").read()
            except OSError:
                continue
            if key in data or token in data and name == "cmdline":
                print("found in", name, "of", pid, repr(data[:300]), flush=True)
            if token in data and name == "environ":
                seen.add(pid)
    rounds += 1
    if rounds == 1:
        print("looking", flush=True)
print("saw", len(seen), flush=True)
`
	// The token is in command lines, where TestSecretNotInCommandLines looks for secret.
	key, token := "k3y"+secret, "t0ken"+reversed(secret)
	s := harness.NewState(t)
	b := s.Sandbox(harness.Options{Env: []string{"API_KEY=" + key}}, "--max-output", "64K", "python3", "-c", scanner, reversed(key), reversed(token))
	s.Run("wait", "--log", "looking", b.ID)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			for range 10 {
				p := b.StartExec(harness.Options{Env: []string{"API_KEY=" + key}}, []string{"--env", "TOKEN=" + token}, "true")
				p.Wait().Expect(t, 0, "exited")
			}
		})
	}
	wg.Wait()
	b.Dying = true
	b.Exec(harness.Options{}, nil, "touch", "/tmp/stop")
	b.Ended()
	out := string(s.Run("logs", b.ID).Stdout)
	// It does not even see the execs.
	check.That(t, out == "looking\nsaw 0\n", "%.2000s", out)
	// Nor are they in the sandbox's own processes or the supervisor's.
	for _, file := range b.Files("cmdline", "environ") {
		check.That(t, !strings.Contains(file, key), "%.500q", file)
	}
}

func reversed(s string) string {
	b := []byte(s)
	for i, j := 0, len(b)-1; i < j; i, j = i+1, j-1 {
		b[i], b[j] = b[j], b[i]
	}
	return string(b)
}

// Execs of one sandbox neither see nor reach each other's processes, although they have the same
// user.
func TestExecsApart(t *testing.T) {
	t.Parallel()
	b := harness.NewState(t).Sandbox(harness.Options{}, "sleep", "60")
	w := newWitness(b)
	r := b.Exec(harness.Options{}, nil, "python3", "-c", `
import os
for pid in range(1, 3000):
    if pid not in (1, os.getpid()):
        try:
            os.kill(pid, 9)
            print("could signal", pid)
        except ProcessLookupError:
            pass
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))`)
	r.Expect(t, 0, "exited")
	check.That(t, string(r.Stdout) == "[1, 2]\n", "%q", r.Stdout)
	// kill(-1) reaches only itself.
	b.Exec(harness.Options{}, []string{"--timeout", "1"}, "/fixtures/signal-all", "kill-all").Expect(t, 124, "timeout")
	w.end(t)
	b.Alive()
}

// hostileMain attacks every process that appears in the sandbox, as fast as it can.
const hostileMain = `
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
what, me = sys.argv[1], os.getpid()
PTRACE_ATTACH, PTRACE_SEIZE, PTRACE_DETACH = 16, 0x4206, 17
print("at it", flush=True)
known = set()
while True:
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, me):
            continue
        pid = int(name)
        try:
            if what == "kill":
                os.kill(pid, 9)
            elif what == "stop":
                os.kill(pid, 19)
            elif what == "trace-wait":
                if libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0:
                    os.waitpid(pid, 0x40000000)
            elif what == "trace" and libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0:
                print("traces", pid, flush=True)
        except OSError:
            pass
    if what == "trace-wait":
        try:
            while os.waitpid(-1, 1 | 0x40000000)[0]:
                pass
        except OSError:
            pass
`

// A sandbox whose own command attacks every visible process does not see the execs, although it
// has the same user.
func TestExecHostileMain(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"kill", "stop", "trace-wait"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := harness.NewState(t)
			b := s.Sandbox(harness.Options{}, "python3", "-c", hostileMain, what)
			s.Run("wait", "--log", "at it", b.ID)
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					for range 2 {
						p := b.StartExec(harness.Options{}, []string{"--timeout", harness.Deadline(500 * time.Millisecond).String()}, "/fixtures/tree-setsid")
						r := p.Wait() // asserts the proof, and that all processes have exited
						harness.Within(t, "the exec", r.Elapsed, 500*time.Millisecond, time.Second)
						r.Expect(t, 124, "timeout")
					}
				})
			}
			wg.Wait()
			k, took := timedKill(t, s, 0, "--grace", "0", b.ID)
			harness.Within(t, "kill", took, 0, 300*time.Millisecond)
			check.That(t, k[0].Verdict == "proven", "%+v", k)
		})
	}
}
