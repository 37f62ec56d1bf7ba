package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// server is a server to measure, with its own address and directory.
type server struct {
	dir              string
	network, address string
	cmd              *exec.Cmd
}

// newServer returns a server with a directory and a socket in it.
func newServer() *server {
	dir := got(os.MkdirTemp("", "sbxrun-bench-"))
	return &server{dir: dir, network: "unix", address: filepath.Join(dir, "api.sock")}
}

// serve starts the build's sbxrund with a configuration, and returns when it answers.
func (b *build) serve(config string) *server {
	s := newServer()
	file := filepath.Join(s.dir, "serve.toml")
	must(os.WriteFile(file, fmt.Appendf(nil, "state_dir = %q\n%s", filepath.Join(s.dir, "state"), config), 0o600))
	s.cmd = exec.CommandContext(ctx, b.path+"d", "serve", "--config", file, "--listen", "unix:"+s.address)
	s.cmd.Env = append(os.Environ(), "SBXRUN_STATE_DIR="+s.dir)
	log := got(os.Create(filepath.Join(s.dir, "log")))
	defer log.Close()
	s.cmd.Stderr = log
	if err := caught(s.answers); err != nil {
		fail("%w; it said %s", err, measure.Read(log.Name()))
	}
	return s
}

// answers starts a server's command, and returns when it accepts connections.
func (s *server) answers() {
	must(s.cmd.Start())
	var failed error
	if err := measure.Until(ctx, "an answer of the server", time.Now().Add(time.Minute), func() bool {
		failed = caught(func() { s.dial().Close() })
		return failed == nil
	}); err != nil {
		_ = s.cmd.Process.Kill() // fails only if it has exited
		_ = s.cmd.Wait()         // likewise
		must(errors.Join(err, failed))
	}
}

// heat returns when that many rooms are warm. The first call makes the server create them.
func (s *server) heat(rooms int) {
	c := s.dial()
	defer c.Close()
	got(c.Ask(measure.Post("/v1/run", measure.Object{"argv": []string{"/bin/true"}}, "")))
	must(measure.Until(ctx, "warm rooms", time.Now().Add(time.Minute), func() bool {
		return countBelow(s.cmd.Process.Pid, "sbxrun-maker") >= rooms
	}))
}

// countBelow counts the descendants of a process with a name.
func countBelow(root int, name string) (n int) {
	for _, st := range proc.Descendants(root, 100_000) {
		if st.Comm == name {
			n++
		}
	}
	return n
}

// close ends the server with all its processes.
func (s *server) close() {
	_ = s.cmd.Process.Signal(unix.SIGTERM) // fails only if it has exited
	_ = s.cmd.Wait()                       // likewise
	if err := os.RemoveAll(s.dir); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// cpu returns the CPU time of the server and its descendants. Reaped processes count for their
// parent, and those of a call end up with a keeper.
func (s *server) cpu() time.Duration { return treeCPU(s.cmd.Process.Pid) }

func treeCPU(root int) (total time.Duration) {
	list := proc.Descendants(root, 100_000)
	if st, err := proc.ReadStat(root); err == nil {
		list = append(list, st)
	}
	for _, st := range list {
		total += st.CPU.User + st.CPU.System + st.Waited.User + st.Waited.System
	}
	return total
}

// ownCPU returns the CPU time of this process and its reaped children.
func ownCPU() time.Duration { return measure.CPU(unix.RUSAGE_SELF) + measure.CPU(unix.RUSAGE_CHILDREN) }

func (s *server) dial() *measure.Connection { return got(measure.Dial(ctx, s.network, s.address)) }

// load is a series of calls by several clients.
type load struct {
	letter, name string
	// client returns the call of one client.
	client func() (call, close func())
	cpu    func() time.Duration // of what is measured

	rates, p50s, cpus measure.Sample // of each round
}

// run makes calls from several clients at once, and counts them.
func (l *load) run(clients, calls int) {
	var made atomic.Int64
	var mu sync.Mutex
	var took measure.Sample
	var all sync.WaitGroup
	var failed error
	begun, used := time.Now(), l.cpu()
	for range clients {
		call, close := l.client()
		all.Go(func() {
			defer close()
			var own measure.Sample
			var err error
			for made.Add(1) <= int64(calls) && err == nil && ctx.Err() == nil {
				at := time.Now()
				err = caught(call)
				own = append(own, measure.MS(time.Since(at)))
			}
			mu.Lock()
			defer mu.Unlock()
			took = append(took, own...)
			failed = errors.Join(failed, err)
		})
	}
	all.Wait()
	whole := time.Since(begun)
	used = l.cpu() - used
	if failed != nil {
		fail("%s: %w", l.name, failed)
	}
	l.rates = append(l.rates, float64(calls)/whole.Seconds())
	l.p50s = append(l.p50s, took.Quantile(0.5))
	l.cpus = append(l.cpus, measure.MS(used)/float64(calls))
	must(ctx.Err())
}

// weighLoads runs loads in turn, in rounds, and prints the medians of the rounds and the medians
// of the ratios to the first load.
func weighLoads(program, what string, n, clients, calls int, loads []*load) {
	for _, l := range loads {
		l.rates, l.p50s, l.cpus = nil, nil, nil
		l.run(clients, max(calls/10, clients))
		l.rates, l.p50s, l.cpus = nil, nil, nil
	}
	for round := range n {
		for i := range loads {
			l := loads[(i+round)%len(loads)]
			l.run(clients, calls)
			reapOrphans() // a thousand zombies slow down every fork
			last := len(l.rates) - 1
			if raw != nil {
				for _, v := range []struct {
					what string
					is   float64
				}{{"calls/s", l.rates[last]}, {"p50", l.p50s[last]}, {"cpu", l.cpus[last]}} {
					fmt.Fprintf(raw, "%s %d clients\t%d\t%s, %s\t%.3f\n", program, clients, round, l.name, v.what, v.is)
				}
			}
		}
	}
	fmt.Printf("%s: %s; clients: %d, rounds: %d of %d calls each, load %s\n", program, what, clients, n, calls, measure.Read("/proc/loadavg"))
	for _, l := range loads {
		fmt.Printf("  %s  %-34s %7.0f calls/s   p50 %7.3f ms   CPU %6.3f ms per call\n", l.letter, l.name, l.rates.Quantile(0.5), l.p50s.Quantile(0.5), l.cpus.Quantile(0.5))
	}
	for _, l := range loads[1:] {
		a := loads[0]
		fmt.Printf("  %s/%s calls/s %.2f   p50 %.2f   CPU %.2f\n", a.letter, l.letter, a.rates.Over(l.rates).Quantile(0.5), a.p50s.Over(l.p50s).Quantile(0.5), a.cpus.Over(l.cpus).Quantile(0.5))
	}
	if raw == nil {
		for _, l := range loads {
			fmt.Printf("  raw %s, calls/s: %v\n  raw %s, p50 ms: %v\n  raw %s, CPU ms: %v\n", l.letter, l.rates, l.letter, l.p50s, l.letter, l.cpus)
		}
	}
	fmt.Println()
}

// request is a load that sends the same request on a connection per client, and checks the answer.
func (s *server) request(letter, name, path string, body any, right func([]byte) bool) *load {
	text := measure.Post(path, body, "")
	return &load{letter: letter, name: name, cpu: func() time.Duration { return s.cpu() + ownCPU() }, client: func() (call, close func()) {
		c := s.dial()
		return func() { asked(c, text, right) }, func() { c.Close() }
	}}
}

// asked sends a request and checks the answer.
func asked(c *measure.Connection, request []byte, right func([]byte) bool) {
	if answer := got(c.Ask(request)); !right(answer) {
		fail("the answer was %.600s", answer)
	}
}

// alone is a load without a server.
func alone(letter, name string, call func()) *load {
	return &load{letter: letter, name: name, cpu: ownCPU, client: func() (func(), func()) { return call, func() {} }}
}

// warm accepts the answer of a call that ended well in a warm room.
func warm(answer []byte) bool {
	return bytes.Contains(answer, []byte(`"verdict":"proven"`)) && bytes.Contains(answer, []byte(`"exit_code":0`)) && bytes.Contains(answer, []byte(`"room":"warm"`))
}

// forkExec is the baseline: true without a sandbox.
func forkExec(letter string) *load {
	return alone(letter, "fork and exec, no sandbox", func() { must(exec.CommandContext(context.Background(), "/bin/true").Run()) })
}

// paced makes n calls, one every 60 ms, and returns their durations.
func paced(n int, call func()) (took measure.Sample) {
	for range n {
		begin := time.Now()
		call()
		must(ctx.Err())
		took = append(took, measure.MS(time.Since(begin)))
		time.Sleep(time.Until(begin.Add(60 * time.Millisecond))) // the pace that is measured
	}
	return took
}

// interpreters measures print(1) with a prestarted interpreter, with one started for the call, and
// as a cell of a kept one.
func interpreters(builds []*build) {
	const ahead = "[languages.python]\ncommand = [\"python3\", \"{file}\"]\nfile = \"main.py\"\nkept = [\"python3\"]\ndriver = \"python\"\nahead = %d\n"
	printed := func(answer []byte) bool { return bytes.Contains(answer, []byte(`"stdout":"1\n"`)) }
	program := measure.Object{"language": "python", "code": "print(1)"}
	for _, v := range []struct {
		name  string
		ahead int
		cell  bool
	}{{"python, started ahead", 2, false}, {"python, started for the call", 0, false}, {"a cell of a kept interpreter", 0, true}} {
		func() {
			s := builds[0].serve(fmt.Sprintf(ahead, v.ahead))
			defer s.close()
			s.heat(4)
			path := "/v1/run"
			c := s.dial()
			defer c.Close()
			if v.cell {
				text := got(c.Ask(measure.Post("/v1/sessions", measure.Object{}, "")))
				var made struct{ ID string }
				must(json.Unmarshal(text, &made))
				path = "/v1/sessions/" + made.ID + "/code"
			}
			request := measure.Post(path, program, "")
			call := func() { asked(c, request, printed) }
			paced(10, call)
			took := paced(rounds(100), call)
			fmt.Printf("python: print(1) each 60 ms, %s: p50 %.3f ms, p90 %.3f ms, load %s\n  raw, ms: %v\n", v.name, took.Quantile(0.5), took.Quantile(0.9), measure.Read("/proc/loadavg"), took)
		}()
	}
	fmt.Println()
}

// density weighs a server with many idle sessions.
func density(builds []*build) {
	n := *sessions
	s := builds[0].serve(fmt.Sprintf("[rooms]\nmax = 0\n[tenant]\nsessions = %d\n", n))
	defer s.close()
	before, tasks, free := weigh([]int{s.cmd.Process.Pid}), machineTasks(), machineFree()
	eachOf(n, func(int) {
		c := s.dial()
		defer c.Close()
		got(c.Ask(measure.Post("/v1/sessions", measure.Object{}, "")))
	})
	tasks, free = machineTasks()-tasks, free-machineFree()
	after := weigh([]int{s.cmd.Process.Pid})
	more := weight{after.processes - before.processes, after.tasks - before.tasks, after.pss - before.pss, after.unread}
	fmt.Printf("density: %d idle sessions\n  the server before: %v\n  and with them:     %v\n  each of them:      %v\n", n, before, after, more.each(n))
	fmt.Printf("  of the machine, with what else runs there: %.2f tasks and %.0f kB each, load %s\n\n", tasks/float64(n), free/float64(n), measure.Read("/proc/loadavg"))
}

// machineTasks returns the number of tasks on the machine (proc_loadavg(5)).
func machineTasks() (n float64) {
	fields := strings.FieldsFunc(measure.Read("/proc/loadavg"), func(r rune) bool { return r == ' ' || r == '/' })
	if len(fields) > 4 {
		n, _ = strconv.ParseFloat(fields[4], 64) // the kernel's format
	}
	return n
}

// machineFree returns the available memory in kB (proc_meminfo(5)). Unlike PSS it includes the
// kernel's memory for processes, namespaces and mounts.
func machineFree() (kB float64) {
	_, rest, _ := strings.Cut(measure.Read("/proc/meminfo"), "MemAvailable:")
	line, _, _ := strings.Cut(rest, " kB")
	kB, _ = strconv.ParseFloat(strings.TrimSpace(line), 64) // likewise
	return kB
}

// httpCalls compares a call in a warm room with one without.
func httpCalls(builds []*build) {
	const ready, most = 4, 8 // rooms
	var servers []*server
	for _, b := range builds {
		s := b.serve(fmt.Sprintf("[rooms]\nmin = %d\nmax = %d\ncalls = 0\n", ready, most))
		defer s.close()
		s.heat(ready)
		servers = append(servers, s)
	}
	s := servers[0]
	plainFloor := floor("old")
	defer plainFloor.close()
	newFloor := floor("new")
	defer newFloor.close()
	bare := measure.Object{"argv": []string{"/bin/true"}}
	limited := measure.Object{"argv": []string{"/bin/true"}, "limits": measure.Object{"memory": 256 << 20, "pids": 64, "cpus": 1}}
	loads := []*load{
		s.request("A", "POST /v1/run of true, warm", "/v1/run", bare, warm),
		forkExec("B"),
		alone("C", "bwrap, the same sandbox", func() { inPlain(elapsed, "true") }),
		s.request("D", "POST /v1/run with limits, warm", "/v1/run", limited, warm),
		plainFloor.floorLoad("E", "net/http, fork and exec"),
		newFloor.floorLoad("F", "the same in new namespaces"),
	}
	if len(servers) > 1 {
		loads = append(loads, servers[1].request("H", "as A, the old build", "/v1/run", bare, warm), servers[1].request("I", "as D, the old build", "/v1/run", limited, warm))
	}
	if *judge == "" {
		fmt.Println("http: without go-judge, whose binary -judge names")
	} else {
		j, close := goJudge(*judge, ready, most)
		defer close()
		loads = append(loads, j.judged("G"))
	}
	for _, field := range strings.Split(*clients, ",") {
		weighLoads("http", "a call of /bin/true", rounds(10), got(strconv.Atoi(field)), 500, loads)
	}
}
