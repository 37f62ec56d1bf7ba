package cells

import (
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Hostile cells end in bounded time with one clear answer, and the next cell works.
func TestHostileCells(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	const loop = "\nwhile True: pass"
	// token finds the driver's token from inside a cell.
	const token = "import gc, os, time, types\nmine = [o.token.encode() for o in gc.get_objects() if isinstance(o, types.SimpleNamespace) and hasattr(o, 'token')][0]\n"
	type test struct {
		name, code string
		cause      result.Cause
		state      State
		look       func(*testing.T, *Answer)
	}
	lost := func(name, code string, cause result.Cause) test { return test{name, code, cause, Lost, nil} }
	kept := func(name, code string) test { return test{name, code, Done, Kept, nil} }
	kept_ := func(name, code string, look func(*testing.T, *Answer)) test {
		return test{name, code, Done, Kept, look}
	}
	interrupted := func(name, code string) test { return test{name, code, result.Timeout, Kept, nil} }
	raises := func(name string) func(*testing.T, *Answer) {
		return func(t *testing.T, a *Answer) {
			check.That(t, a.Error != nil && a.Error.Name == name, "%+v", a.Error)
		}
	}
	// lingering leaves a socket with SO_LINGER among the descriptors sent: whoever closes it last waits for
	// ten minutes.
	const lingering = `import os, socket, struct
l = socket.create_server(("127.0.0.1", 0))
c = socket.create_connection(l.getsockname())
peer, _ = l.accept()
c.setblocking(False)
try:
    while c.send(b"x" * 65536): pass
except BlockingIOError: pass
c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
print(*struct.unpack("ii", c.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)))
u = socket.socket(fileno=os.dup(3))
try: socket.send_fds(u, [b"\n"], [c.fileno()])
except PermissionError: pass # the server takes none (Linux 6.16)
c.close()`
	tests := map[string][]test{
		"python": {
			kept_("sends a socket whose close would wait", lingering, func(t *testing.T, a *Answer) {
				check.That(t, a.Stdout.Text == "0 0\n" && a.Error == nil, "%+v", a)
			}),
			lost("closes all descriptors", "import os; os.closerange(0, 256)", result.Exited),
			lost("closes all descriptors, and goes on", "import os; os.closerange(0, 256)"+loop, result.Lost),
			lost("forks and exits", "import os\nif os.fork(): os._exit(0)"+loop, result.Exited),
			lost("exits with a stray that has the descriptors", "import os, time\nif not os.fork(): time.sleep(1000)\nos._exit(0)", result.Exited),
			kept("forks, and both go on", "import os; os.fork()"),
			kept("leaves a process with all descriptors", "import subprocess; subprocess.Popen(['sleep', '1000'], close_fds=False)"),
			{"os._exit", "import os; print('last'); os._exit(3)", result.Exited, Lost, func(t *testing.T, a *Answer) {
				check.That(t, a.Ended.ExitCode() == 3 && a.Stdout.Text == "last\n", "%+v", a)
			}},
			{"kills itself", "import os; os.kill(os.getpid(), 9)", result.Signaled, Lost, func(t *testing.T, a *Answer) {
				check.That(t, signalOf(a) == unix.SIGKILL, "%+v", a.Ended)
			}},
			lost("crashes", "import ctypes; ctypes.string_at(0)", result.Signaled),
			lost("another program in its place", "import os; os.execvp('sleep', ['sleep', '1000'])", result.Lost),
			lost("stops itself", "import os; os.kill(os.getpid(), 19)", result.Timeout),
			kept_("100 MB of output", "import sys\nfor _ in range(1600): sys.stdout.write('x' * 65536)", func(t *testing.T, a *Answer) {
				check.That(t, a.Stdout.Bytes == 1600<<16 && a.Stdout.Truncated && len(a.Stdout.Text) <= maxOutput+100,
					"%d bytes, %v, %d kept", a.Stdout.Bytes, a.Stdout.Truncated, len(a.Stdout.Text))
			}),
			interrupted("output without an end", "while True: print('x' * 65536)"),
			kept("garbage in the socket", "import os; os.write(3, os.urandom(1 << 20))"),
			kept("half a line in the socket", "import os; os.write(3, b'x')"),
			lost("garbage without an end", "import os\nwhile True: os.write(3, b'x' * 65536)", result.Lost),
			kept("answers with another token", `import os; os.write(3, b'\nAAAAAAAAAAAAAAAAAAAAAAAAAA {"end":true}\n'); x = 1`),
			kept_("output that looks like an answer", `import os; os.write(1, b'\nAAAAAAAAAAAAAAAAAAAAAAAAAA {"end":true}\n'); os.write(2, b'{"end":true}\n')`, func(t *testing.T, a *Answer) {
				check.That(t, strings.Contains(a.Stdout.Text, "AAAA") && a.Stderr.Text == "{\"end\":true}\n", "%+v", a)
			}),
			kept_("results that are none", token+`for x in (b'{', b'[]', b'{"result": 5}', b'{"result": {"kind": "x"}}', b'{"result": {"kind": "value", "media": [{"type": "a\\nb"}]}}', b'null', b'{"end": 5}'): os.write(3, b'\n' + mine + b' ' + x + b'\n')`, func(t *testing.T, a *Answer) {
				check.That(t, len(a.Results) == 0, "%+v", a.Results)
			}),
			kept("tells its own end, and goes on", token+`os.write(3, b'\n' + mine + b' {"end": true}\n'); time.sleep(0.2); print('late')`),
			lost("lines of its own without an end", token+"line = (b'\\n' + mine + b' {}\\n') * 8192\nos.fork()\nwhile True:\n  try: os.write(3, line)\n  except BaseException: pass", result.Timeout),
			lost("takes the socket away from the driver", "import os, socket; s = socket.socket(fileno=os.dup(3)); s.shutdown(0); os.close(3)"+loop, result.Timeout),
			lost("blocks SIGINT", "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"+loop, result.Timeout),
			lost("ignores SIGINT", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"+loop, result.Timeout),
			kept("ignores SIGINT, and ends", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"),
			interrupted("a loop after that", loop),
			lost("catches KeyboardInterrupt", "import time\nwhile True:\n  try: time.sleep(1000)\n  except BaseException: pass", result.Timeout),
			interrupted("sends itself SIGINT", "import os\ntry:\n  os.kill(os.getpid(), 2)\n  os.getpid()\nexcept KeyboardInterrupt: pass\nimport time; time.sleep(0.7)"),
			interrupted("a loop", loop),
			interrupted("sleeps", "import time; time.sleep(1000)"),
			interrupted("waits for a process", "import subprocess; subprocess.run(['sleep', '1000'])"),
			interrupted("awaits", "import asyncio; await asyncio.sleep(1000)"),
			interrupted("an endless repr", "class R:\n  def __repr__(self):\n    while True: pass\nR()"),
			interrupted("a loop in C that looks for signals", "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')"),
			lost("a loop in C", "sum(range(10**12))", result.Timeout),
			lost("holds SIGINT in a process that it waits for", "import os; os.system('sleep 1000')", result.Timeout),
			kept("threads that go on", "import threading, time\ndef f():\n  while True: print('late' * 100)\nthreading.Thread(target=f, daemon=True).start()"),
			kept("a thread that displays", "def g():\n  while True: display(1); time.sleep(0.01)\nthreading.Thread(target=g, daemon=True).start()"),
			lost("exits, to end the threads", "import os; os._exit(0)", result.Exited),
			kept("no stdout", "import sys; sys.stdout = sys.stderr = sys.stdin = sys.__stdout__ = None"),
			kept("a closed stdout", "import sys; sys.stdout.close(); sys.stderr.close(); sys.stdin.close()"),
			kept("a stdout that fails", "class S:\n  def write(self, s): 1/0\n  flush = write\nimport sys; sys.stdout = sys.stderr = S()"),
			kept("no builtins", "import builtins\nfor n in list(vars(builtins)):\n  if n != 'vars' and n != 'list': setattr(builtins, n, None) if False else vars(builtins).__setitem__(n, None)"),
			kept("no modules", "import sys; sys.modules.clear()"),
			kept("another __main__", "import sys; sys.modules['__main__'] = None; del sys.path[:]"),
			kept_("a huge value", "'x' * 50_000_000", func(t *testing.T, a *Answer) {
				check.That(t, len(a.Results) == 1 && a.Results[0].Truncated && !a.Truncated && len(a.Results[0].Media[0].Text) == MaxResults/8, "%d results, %v", len(a.Results), a.Truncated)
			}),
			kept_("many values", "for n in range(20_000): display(n)", func(t *testing.T, a *Answer) {
				check.That(t, len(a.Results) == maxCount && a.Truncated, "%d results, %v", len(a.Results), a.Truncated)
			}),
			kept_("large values", "for n in range(30): display('\\0' * 100_000)", func(t *testing.T, a *Answer) {
				n := len(a.Results)
				check.That(t, n >= 5 && n <= 20 && a.Truncated, "%d results, %v", n, a.Truncated)
			}),
			kept_("a huge exception", "raise ValueError('x' * 50_000_000)", func(t *testing.T, a *Answer) {
				e := a.Error
				check.That(t, e != nil && len(e.Message) == 32<<10 && len(e.Traceback) == 32<<10, "%+v", e)
			}),
			kept_("no UTF-8", "import os; os.write(1, b'\\xff\\xfe'); print('\\udcff'); '\\udcff'", func(t *testing.T, a *Answer) {
				check.That(t, !a.Stdout.UTF8 && a.Stdout.Text == "\xff\xfe\\udcff\n" && a.Results[0].Media[0].Text == `'\udcff'`, "%+v", a)
			}),
			kept_("surrogates in a result", "class R:\n  def __repr__(self): return '\\udcff'\nR()", func(t *testing.T, a *Answer) {
				check.That(t, a.Results[0].Media[0].Text == "\uFFFD", "%+v", a)
			}),
			kept_("recursion", "def f(): f()\nf()", raises("RecursionError")),
			kept_("no address space", "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 30)", raises("MemoryError")),
			lost("exits", "import os; os._exit(0)", result.Exited),
			kept_("no descriptors left", "import os\nwhile True: os.dup(0)", raises("OSError")),
		},
		"node": {
			{"process.exit", "console.log('last'); process.exit(3)", result.Exited, Lost, func(t *testing.T, a *Answer) {
				check.That(t, a.Ended.ExitCode() == 3 && a.Stdout.Text == "last\n", "%+v", a)
			}},
			lost("kills itself", "process.kill(process.pid, 9)", result.Signaled),
			lost("aborts", "process.abort()", result.Signaled),
			lost("closes all descriptors, and goes on", "for (let i = 0; i < 256; i++) try { require('fs').closeSync(i) } catch {}\nwhile (true);", result.Lost),
			interrupted("a loop", "while (true);"),
			interrupted("awaits", "await new Promise(() => {})"),
			lost("awaits, and leaves no turn to SIGINT", "while (true) await null", result.Timeout),
			interrupted("awaits timers", "while (true) await new Promise(r => setTimeout(r, 1))"),
			lost("waits for a process", "require('child_process').execSync('sleep 1000')", result.Timeout),
			interrupted("a regular expression", "/(a+)+$/.test('a'.repeat(64) + 'b')"),
			interrupted("an endless inspect", "({[require('util').inspect.custom]() { while (true); }})"),
			kept_("100 MB of output", "for (let i = 0; i < 1600; i++) process.stdout.write('x'.repeat(65536))", func(t *testing.T, a *Answer) {
				check.That(t, a.Stdout.Bytes == 1600<<16 && a.Stdout.Truncated, "%d bytes, %v", a.Stdout.Bytes, a.Stdout.Truncated)
			}),
			kept("garbage in the socket", "for (let i = 0; i < 10; i++) try { require('fs').writeSync(3, 'x'.repeat(1000)) } catch {}"),
			kept("no globals", "for (const n of ['JSON', 'Buffer', 'Symbol', 'Object', 'Promise', 'console', 'process']) globalThis[n] = null"),
			lost("no such process", "process = null; require('process').exit(0)", result.Exited),
			kept("a timer that goes on", "setInterval(() => console.log('late'), 1); setInterval(() => display(1), 1)"),
			kept_("a huge value", "display('x'.repeat(50_000_000))", func(t *testing.T, a *Answer) {
				n := len(a.Results)
				check.That(t, n != 0 && a.Results[n-1].Truncated && len(a.Results[n-1].Media[0].Text) == MaxResults/8, "%d results", n)
			}),
			kept_("recursion", "(function f() { f() })()", raises("RangeError")),
		},
	}
	next := map[string]string{"python": "print('so', 1 + 1); 1 + 1", "node": "require('fs').writeSync(1, 'so 2\\n'); 1 + 1"}
	for _, language := range installed(t, room) {
		t.Run(language, func(t *testing.T) {
			t.Parallel()
			k := open(t, Spec{Room: In(room), Language: Languages()[language]})
			for _, test := range tests[language] {
				timeout := bound
				if test.cause == result.Timeout {
					timeout = 200 * time.Millisecond
				}
				begin := time.Now()
				a := within(t, k, test.code, timeout)
				// A busy machine may be late once, and node may lose a signal.
				for tries := 3; tries > 0 && test.cause == result.Timeout && test.state == Kept && a.State == Lost; tries-- {
					a = within(t, k, test.code, bound/100<<(3-tries))
				}
				check.That(t, a.Cause == test.cause && a.State == test.state,
					"%s: %s: %s and %s after %v; %+v, %q, %+v", language, test.name, a.Cause, a.State, time.Since(begin), a.Error, a.Stderr.Text, a.Ended)
				check.That(t, !strings.HasPrefix(test.code, token) || a.Error == nil || a.Error.Name != "IndexError",
					"%s: it has not found the token: %+v", test.name, a.Error)
				if test.look != nil {
					t.Run(test.name, func(t *testing.T) { test.look(t, a) })
				}
				b := do(t, k, next[language])
				var values []string
				for _, r := range b.Results {
					values = append(values, r.Media[0].Text)
				}
				check.That(t, b.Cause == Done && b.Error == nil && strings.Contains(b.Stdout.Text, "so 2\n") && strings.Contains(strings.Join(values, " ")+" ", "2 "),
					"%s: the cell after %q: %s %s, %+v, %+v, %q", language, test.name, b.Cause, b.State, b.Error, values, b.Stderr.Text)
				check.That(t, (a.State == Lost) == (b.Number == 1), "%s: the cell after %q is number %d", language, test.name, b.Number)
			}
		})
	}
}

// Output of background threads and processes belongs to the running cell, or to none between two cells.
func TestBetweenCells(t *testing.T) {
	t.Parallel()
	k := python(t)
	a := do(t, k, "import os, subprocess\nbackground = subprocess.Popen(['sh', '-c', 'while [ ! -e go ]; do sleep 0.01; done; echo between; echo between >&2; touch written; while [ ! -e on ]; do sleep 0.01; done; echo in; touch over; sleep 1000'])\nprint('first')")
	check.That(t, a.Stdout.Text == "first\n" && a.Dropped == 0, "%+v", a)
	inside(t, k, "touch go; while [ ! -e written ]; do sleep 0.01; done")
	a = do(t, k, "import time\nprint('second')\nopen('on', 'w').close()\nwhile not os.path.exists('over'): time.sleep(0.01)")
	check.That(t, a.Stdout.Text == "second\nin\n" && a.Stderr.Text == "" && a.Dropped == 2*int64(len("between\n")), "%+v", a)
	// The process is still alive.
	a = do(t, k, "print(background.poll())")
	check.That(t, a.Stdout.Text == "None\n", "%+v", a)
}

// If the interpreter ends between two cells, the next one starts a new one and reports the end.
func TestEndsBetweenCells(t *testing.T) {
	t.Parallel()
	k := python(t)
	do(t, k, "import os, threading, time\ndef f():\n  while not os.path.exists('go'): time.sleep(0.01)\n  os._exit(7)\nthreading.Thread(target=f).start()")
	inside(t, k, "touch go")
	select {
	case <-k.live.ended.Done():
	case <-time.After(bound):
		t.Fatal("it lives")
	}
	a := do(t, k, "1")
	check.That(t, a.Cause == Done && a.Number == 1 && a.Earlier != nil && a.Earlier.ExitCode() == 7, "%+v", a)
	a = do(t, k, "1")
	check.That(t, a.Earlier == nil && a.Number == 2, "%+v", a)
}

// A deadline at the end of a cell leaves no SIGINT for the next one. node may lose one, and is ended then.
func TestDeadlineAtTheEnd(t *testing.T) {
	t.Parallel()
	room := newRoom(t)
	codes := map[string]string{"python": "import time; time.sleep(0.02)", "node": "await new Promise(r => setTimeout(r, 20))"}
	long := map[string]string{"python": "import time; time.sleep(0.05)", "node": "await new Promise(r => setTimeout(r, 50))"}
	for _, language := range installed(t, room) {
		k := open(t, Spec{Room: In(room), Language: Languages()[language]})
		do(t, k, "1") // so that the start is not part of the time
		for n := range 40 {
			a := within(t, k, codes[language], 20*time.Millisecond+time.Duration(n)*50*time.Microsecond)
			b := do(t, k, long[language])
			// On a slow machine, python too may take too long to answer an interrupt.
			kept := a.State == Kept || language != "python" || harness.Scaled(1) > 1
			check.Require(t, kept && b.Cause == Done && b.Error == nil, "%s: %s %s, then %s %+v", language, a.Cause, a.State, b.Cause, b.Error)
		}
	}
}

// An interpreter leaves no descriptors and goroutines behind, however it ends. Must not run in parallel with
// other tests.
func TestNothingLeft(t *testing.T) {
	room := newRoom(t)
	spec := Spec{Room: In(room), Language: Languages()["python"]}
	held := func() [2]int { return [2]int{harness.Descriptors(t), runtime.NumGoroutine()} }
	use := func() {
		k := New(spec)
		do(t, k, "import os; os._exit(1)")
		do(t, k, "if not os.fork(): os.execvp('sleep', ['sleep', '1000'])") // NameError in a new one
		do(t, k, "import os, threading, time\ndef f():\n  while not os.path.exists('go'): time.sleep(0.001)\n  os.remove('go')\n  os._exit(0)\nthreading.Thread(target=f).start()")
		inside(t, k, "touch go")
		<-k.live.ended.Done()
		do(t, k, "1")
		check.OK(t, k.Close())
		broken := spec
		broken.Language.Kept = []string{"false"}
		_, err := New(broken).Run(t.Context(), Cell{})
		check.That(t, err != nil, "no error")
	}
	use()
	before := held()
	for range 3 {
		use()
	}
	for end := time.Now().Add(bound); ; time.Sleep(time.Millisecond) { // the last close is in the background
		after := held()
		if after[0] <= before[0] && after[1] <= before[1] {
			return
		}
		check.Require(t, !time.Now().After(end), "%d descriptors and %d goroutines, %d and %d before", after[0], after[1], before[0], before[1])
	}
}
