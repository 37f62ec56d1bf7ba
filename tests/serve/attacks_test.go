package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/budget"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// attacker is a tenant that attacks a server in one way until its context ends.
type attacker struct {
	*server
	ctx     context.Context
	token   []string // headers
	begun   func()   // called when the attack is at its height
	tenant  string
	address string // the server's TCP address
}

// attacks are attempts of one or several tenants to exhaust the server's resources. Each prepares
// itself, calls begun, and continues until its context ends.
var attacks = []struct {
	name    string
	tenants int
	config  string // the server's
	attack  func(*attacker)
}{
	{"lists", 1, "", func(a *attacker) {
		path := a.filled(9_900)
		a.repeat(48, func() { a.do(http.MethodGet, path+"/files", nil) })
	}},
	{"archives", 1, "", func(a *attacker) {
		path := a.filled(9_900)
		a.repeat(48, func() { a.do(http.MethodGet, path+"/archive", nil) })
	}},
	{"small files", 1, "", func(a *attacker) {
		path := a.filled(9_000)
		a.repeat(48, func() { a.do(http.MethodPut, path+"/files/small", "12345") })
	}},
	{"patterns", 1, "", func(a *attacker) {
		call := hostileCollect()
		a.repeat(8, func() { a.do(http.MethodPost, "/v1/run", call) })
	}},
	{"comparisons", 2, "", func(a *attacker) {
		path := a.open(`{"overlay":{"name":"app"}}`)
		a.exec(path, "cd /work && seq -f "+strings.Repeat("x", 200)+"%g 8000 | xargs touch")
		for range 2 {
			a.stall("GET " + path + "/diff HTTP/1.1\r\n\r\n")
		}
		a.hold()
	}},
	{"bodies", 3, "", func(a *attacker) {
		for range 5 {
			a.stall("POST /v1/run HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
		}
		a.hold()
	}},
	{"memory", 3, "buffers = \"128M\"\n", func(a *attacker) { // memory that is in use
		for range 5 {
			a.stall("POST /v1/run HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 8000000\r\n\r\n" + strings.Repeat(" ", 5_000_000))
		}
		a.hold()
	}},
}

// The server serves another tenant throughout while tenants attack it.
func TestAttacks(t *testing.T) {
	for _, tt := range attacks {
		t.Run(tt.name, func(t *testing.T) {
			_, config := app(t)
			names := []string{"victim"}
			for i := range tt.tenants {
				names = append(names, fmt.Sprint("attacker", i))
			}
			s, address := overTCP(t, tt.config+config, names...)
			ctx, stop := context.WithCancel(t.Context())
			var over, begun sync.WaitGroup
			defer over.Wait()
			defer stop()
			for _, name := range names[1:] {
				begun.Add(1)
				over.Go(func() {
					once := sync.OnceFunc(begun.Done)
					defer once()
					tt.attack(&attacker{s, ctx, bearer(name), once, name, address})
				})
			}
			begun.Wait()
			threads := 0
			for range 3 {
				s.served(bearer("victim"))
				threads = max(threads, s.threads())
			}
			t.Logf("%d threads", threads)
			most := 90 + 4*runtime.NumCPU()
			check.That(t, threads <= most, "the server has %d threads, want at most %d", threads, most) // 64 of them are spare
		})
	}
}

func bearer(tenant string) []string { return []string{"Authorization", "Bearer " + tenant + "-token"} }

// served makes one request of each kind as a tenant. All must succeed.
func (s *server) served(token []string) {
	s.t.Helper()
	var x api.Session
	for _, q := range []struct {
		method, path string
		body         any
		want         int
	}{
		{http.MethodGet, "/v1/languages", nil, 200},
		{http.MethodPost, "/v1/run", sh("echo ok"), 200},
		{http.MethodPost, "/v1/run", io.MultiReader(strings.NewReader(`{"argv":["true"]}`)), 200}, // chunked
		{http.MethodPost, "/v1/sessions", `{"overlay":{"name":"app"}}`, 201},
		{http.MethodPut, "/files/a", "text", 201},
		{http.MethodPost, "/exec", sh("cat a >b; echo c >/work/c"), 200},
		{http.MethodGet, "/files", nil, 200},
		{http.MethodGet, "/files/b", nil, 200},
		{http.MethodGet, "/archive", nil, 200},
		{http.MethodGet, "/diff", nil, 200},
		{http.MethodDelete, "", nil, 200},
	} {
		if !strings.HasPrefix(q.path, "/v1/") {
			q.path = "/v1/sessions/" + x.ID + q.path
		}
		status, b, _, err := s.try(s.t.Context(), q.method, q.path, q.body, token...)
		check.Require(s.t, err == nil && status == q.want, "%s %s: %d %.300s %v", q.method, q.path, status, b, err)
		if status == 201 && x.ID == "" {
			check.Must(s.t, json.Unmarshal(b, &x))
		}
	}
}

// threads returns the number of the server's threads.
func (s *server) threads() int {
	s.t.Helper()
	list := harness.ReadDir(s.t, filepath.Join("/proc", itoa(s.cmd.Process.Pid), "task"))
	return len(list)
}

// When commands have used up all tasks, requests whose system calls block do not end the server,
// although Go cannot create threads.
func TestNoTasks(t *testing.T) {
	t.Parallel()
	const most = 400
	b := budget.New(t, most)
	if b == nil {
		t.Log("no cgroup can be made here")
		return
	}
	s := serveBy(t, b.Wrap(), harness.Dir(t), "")
	path := s.session(`{}`)
	b.Limit(b.Used()) // from now on as if a command had used up the rest
	var all sync.WaitGroup
	for i := range 24 {
		all.Go(func() {
			name := path + "/files/" + itoa(i)
			for range 20 {
				for _, q := range []struct{ method, path, body string }{
					{http.MethodPut, name, strings.Repeat("x", 100_000)}, {http.MethodGet, name, ""}, {http.MethodGet, path + "/files", ""}, {http.MethodGet, path + "/archive", ""},
				} {
					if status, b, _, err := s.try(t.Context(), q.method, q.path, q.body); err != nil || status >= 300 {
						t.Errorf("%s %s: %d %.200s %v", q.method, q.path, status, b, err)
						return
					}
				}
			}
		})
	}
	all.Wait()
	b.Limit(most)
	a := s.run(sh("echo ok"))
	check.That(t, a.ExitCode == 0, "%+v", a)
}

// When memory runs out, the kernel kills sandboxes before the server, including warm rooms and sessions.
func TestExpendable(t *testing.T) {
	t.Parallel()
	s := serve(t, "[rooms]\nmin = 1\nmax = 2\n")
	adjustment := func(text string) int {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		check.Must(t, err)
		return n
	}
	own := harness.ReadFile(t, filepath.Join("/proc", itoa(s.cmd.Process.Pid), "oom_score_adj"))
	want := min(1000, max(0, adjustment(string(own)))+500)
	session := s.session(`{}`)
	for _, path := range []string{"/v1/run", session + "/exec"} {
		for _, file := range []string{"/proc/self/oom_score_adj", "/proc/1/oom_score_adj"} {
			a := s.call(path, sh("cat "+file))
			check.That(t, a.Stdout != nil && adjustment(*a.Stdout) == want, "%s: %s: %+v, want %d", path, file, a.Stdout, want)
		}
	}
}

// do makes a request, which the server must answer with any status.
func (a *attacker) do(method, path string, body any) (int, []byte) {
	status, b, _, err := a.try(a.ctx, method, path, body, a.token...)
	check.That(a.t, err == nil || a.ctx.Err() != nil, "%s: %s %s: %v", a.tenant, method, path, err)
	return status, b
}

// open creates a session.
func (a *attacker) open(body string) (path string) {
	var x api.Session
	status, b := a.do(http.MethodPost, "/v1/sessions", body)
	check.That(a.t, status == 201 && json.Unmarshal(b, &x) == nil, "%s: %d %s", a.tenant, status, b)
	return "/v1/sessions/" + x.ID
}

func (a *attacker) exec(path, line string) {
	var out api.Answer
	status, b := a.do(http.MethodPost, path+"/exec", sh(line))
	check.That(a.t, status == 200 && json.Unmarshal(b, &out) == nil && out.ExitCode == 0, "%s: %d %.1000s", a.tenant, status, b)
}

// filled creates a session with a number of files.
func (a *attacker) filled(files int) (path string) {
	path = a.open(`{}`)
	a.exec(path, fmt.Sprintf("seq %d | xargs touch", files))
	return path
}

// repeat calls do in atOnce goroutines until the attack ends.
func (a *attacker) repeat(atOnce int, do func()) {
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() {
			for a.ctx.Err() == nil {
				a.begun()
				do()
			}
		})
	}
	all.Wait()
}

// stall sends the beginning of a request on its own connection and reads nothing. The server may close the connection.
func (a *attacker) stall(request string) {
	line, rest, _ := strings.Cut(request, "\r\n")
	c, err := net.Dial("unix", a.socket())
	if err != nil {
		a.t.Errorf("%s: %v", a.tenant, err)
		return
	}
	a.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(harness.Bound))
	_, _ = io.WriteString(c, line+"\r\nHost: sbxrun\r\n"+strings.Join(a.token, ": ")+"\r\n"+rest)
}

// hold gives stalled requests some time, calls begun, and waits until the attack ends.
func (a *attacker) hold() {
	// From outside, the test cannot see whether the server has read a stalled request.
	for range 20 {
		a.do(http.MethodGet, "/v1/status", nil)
	}
	a.begun()
	<-a.ctx.Done()
}

// hostileCollect returns a call whose file names and patterns take long to match.
func hostileCollect() api.Call {
	name := strings.Repeat("a", 240)
	call := sh("seq -f " + name + "%g 9000 | xargs touch")
	for range 32 {
		call.Collect = append(call.Collect, strings.Repeat("*"+strings.Repeat("a", 30)+"b", 3))
	}
	return call
}

// The cost of writing a small file does not depend on the number of files.
func TestPutTime(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	var took [2]time.Duration
	for i, files := range []int{1, 9_900} {
		path := s.session(`{}`)
		a := s.call(path+"/exec", sh(fmt.Sprintf("seq %d | xargs touch", files)))
		check.Require(t, a.ExitCode == 0, "%v", text(a.Stderr))
		before := s.cpuTime()
		for range 100 {
			status, b := s.ask(http.MethodPut, path+"/files/small", "12345")
			check.Require(t, status == 201, "%d %s", status, b)
		}
		took[i] = s.cpuTime() - before
	}
	check.That(t, took[1] <= 3*took[0]+300*time.Millisecond, "%v", took)
}

// cpuTime returns the CPU time of the server process alone.
func (s *server) cpuTime() time.Duration {
	s.t.Helper()
	b := harness.ReadFile(s.t, filepath.Join("/proc", itoa(s.cmd.Process.Pid), "stat"))
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	check.Must(s.t, errors.Join(err1, err2))
	return time.Duration(user+system) * (time.Second / 100)
}
