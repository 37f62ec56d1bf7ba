package serve

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// cell runs a cell, which must be answered in time.
func (s *server) cell(path string, c api.Cell) *api.CellAnswer {
	s.t.Helper()
	began := time.Now()
	a := decoded[api.CellAnswer](s, http.StatusOK, http.MethodPost, path+"/code", c)
	// The deadline, one second after SIGINT, and the proof.
	took := time.Since(began)
	check.That(s.t, c.TimeoutMS <= 0 || took <= time.Duration(c.TimeoutMS)*time.Millisecond+time.Second+harness.Slack, "%.100q took %v", c.Code, took)
	check.That(s.t, (a.State == "lost") == (a.Interpreter != nil) && (a.Interpreter == nil || a.Interpreter.Teardown.Verdict == "proven"),
		"%.100q: %s, %+v", c.Code, a.State, a.Interpreter)
	return &a
}

func python(code string) api.Cell { return api.Cell{Language: "python", Code: code} }

// shown returns the value of a cell as plain text.
func shown(a *api.CellAnswer) string {
	for _, r := range a.Results {
		for _, m := range r.Media {
			if r.Kind == "value" && m.MediaType == "text/plain" {
				return text(m.Text)
			}
		}
	}
	return "<none>"
}

// Definitions of cells persist per language and session.
func TestCode(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{"files":[{"path":"given","text":"here"}]}`)
	a := s.cell(path, python("import sys\nx = 41\nprint('out')\nprint('err', file=sys.stderr)"))
	check.That(t, a.Cause == "done" && a.State == "kept" && a.Number == 1 && !a.TimedOut && text(a.Stdout) == "out\n" && text(a.Stderr) == "err\n" && *a.StdoutBytes == 4 && len(a.Results) == 0 && a.Exception == nil,
		"%+v", a)
	check.That(t, a.ID != "" && a.RequestID != "" && a.StartedAt != "" && a.TimeoutMS == 30_000, "%+v", a)
	a = s.cell(path, python("x += 1\nx"))
	check.That(t, a.Number == 2 && shown(a) == "42" && text(a.Stdout) == "", "%+v", a)
	a = s.cell(path, python("print('before')\ny = 5\n1/0"))
	check.That(t, a.Cause == "done" && a.State == "kept" && a.Exception != nil && a.Exception.Name == "ZeroDivisionError" && strings.Contains(a.Exception.Traceback, "line 3") && text(a.Stdout) == "before\n",
		"%+v %+v", a, a.Exception)
	a = s.cell(path, python("x + y"))
	check.That(t, shown(a) == "47" && a.Exception == nil, "%+v", a)
	// An exec and a cell have the same files.
	c := python("open('plot.txt', 'w').write(open('given').read() + open('more').read())")
	c.Files, c.Collect = []api.FileIn{{Path: "more", Text: new(string)}}, []string{"*.txt"}
	*c.Files[0].Text = " and there"
	a = s.cell(path, c)
	check.Require(t, len(a.Files) == 1 && a.Files[0].Path == "plot.txt" && a.Files[0].MediaType == "text/plain; charset=utf-8", "%+v", a)
	_, b := s.ask(http.MethodGet, "/v1/files/"+a.Files[0].ID, nil)
	check.That(t, string(b) == "here and there", "%q", b)
	ran := s.call(path+"/exec", sh("cat plot.txt; pgrep -c python3 || :"))
	check.That(t, strings.HasPrefix(text(ran.Stdout), "here and there"), "%q", text(ran.Stdout))
	other := s.session(`{}`)
	a = s.cell(other, python("x"))
	check.That(t, a.Number == 1 && a.Exception != nil && a.Exception.Name == "NameError", "another session: %+v", a)
	node := api.Cell{Language: "node", Code: "globalThis.z = (globalThis.z ?? 0) + 1"}
	if _, err := exec.LookPath("node"); err == nil {
		a := s.cell(path, node)
		check.That(t, a.Number == 1 && shown(a) == "1", "%+v", a)
		a = s.cell(path, node)
		check.That(t, a.Number == 2 && shown(a) == "2", "%+v", a)
	}
	a = s.cell(path, python("x"))
	check.That(t, shown(a) == "42", "beside node: %+v", a)
	_, e := s.refused(http.MethodPost, path+"/code", api.Cell{Language: "bash", Code: "x"})
	check.That(t, e.Failure.Code == api.Usage && strings.Contains(e.Failure.Hint, "GET /v1/languages"), "%+v", e)
	s.logs(`"msg":"cell"`)
	log := s.log.String()
	check.That(t, !strings.Contains(log, "before") && !strings.Contains(log, "ZeroDivision"), "%s", log)
	s.answers(http.StatusOK, fmt.Sprintf(`sbxrun_cells_total{cause="done",state="kept",tenant="uid-%d"}`, os.Geteuid()), http.MethodGet, "/metrics", nil)
	_, b = s.ask(http.MethodGet, "/v1/languages", nil)
	check.That(t, strings.Contains(string(b), `"file":"main.py","cells":true`) && strings.Contains(string(b), `"file":"main.sh","cells":false`), "%s", b)
	for _, p := range []string{path, other} {
		s.answers(200, `"verdict":"proven"`, http.MethodDelete, p, nil)
	}
	s.idle()
}

// Text results are in the answer, and images in the content store.
func TestCodeMedia(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nfiles = 16000\n")
	path := s.session(`{}`)
	const class = "class P:\n def __init__(self, n): self.n = n\n def _repr_png_(self): return b'\\x89PNG' + b'\\0' * self.n\n def _repr_html_(self): return '<b>p</b>'\n def __repr__(self): return 'P'\n"
	a := s.cell(path, python(class+"display(P(1))\nP(6)"))
	check.Require(t, len(a.Results) == 2 && a.Results[0].Kind == "display" && a.Results[1].Kind == "value", "%+v", a)
	kinds := map[string]api.Medium{}
	for _, m := range a.Results[1].Media {
		kinds[m.MediaType] = m
	}
	m := kinds["text/plain"]
	check.That(t, text(m.Text) == "P" && a.Results[1].Media[0].MediaType == "text/plain", "%+v", a.Results[1].Media)
	m = kinds["text/html"]
	check.That(t, text(m.Text) == "<b>p</b>" && m.Size == 8 && m.ID == "", "%+v", m)
	png := kinds["image/png"]
	_, b := s.ask(http.MethodGet, "/v1/files/"+png.ID, nil)
	check.That(t, png.Text == nil && png.Size == 10 && string(b) == "\x89PNG\x00\x00\x00\x00\x00\x00", "%+v: %q", png, b)
	// The answer reports results without room in the store, and the cell has run.
	a = s.cell(path, python("P(20000)"))
	for _, m := range a.Results[0].Media {
		check.That(t, m.MediaType != "image/png" || m.Error != "" && m.ID == "", "%+v", m)
	}
	check.That(t, shown(a) == "P", "%+v", a)
}

// A cell ends at its deadline whatever it does, and the next one works.
func TestCodeTimeout(t *testing.T) {
	t.Parallel()
	s := serve(t, "[call]\nmax_timeout = \"31s\"\n")
	path := s.session(`{}`)
	s.cell(path, python("x = 1"))
	// began runs a cell that prints "began" before its deadline, as server.late does.
	began := func(code, state string) (a *api.CellAnswer) {
		for d := harness.Deadline(300 * time.Millisecond); ; d *= 2 {
			c := python(code)
			c.TimeoutMS = result.Milliseconds(d)
			a = s.cell(path, c)
			if a.State == state && text(a.Stdout) == "began\n" || d > harness.Bound {
				return a
			}
			if a.State == "lost" { // a busy machine has not run it within a second after SIGINT
				s.cell(path, python("x = 1"))
			}
		}
	}
	a := began("import time\nprint('began')\nwhile True: time.sleep(0.01)", "kept")
	check.That(t, a.Cause == "timeout" && a.TimedOut && a.State == "kept" && text(a.Stdout) == "began\n" && a.Exception != nil && a.Exception.Name == "KeyboardInterrupt",
		"%+v %+v", a, a.Exception)
	next := s.cell(path, python("x"))
	check.That(t, next.Number == a.Number+1 && shown(next) == "1", "kept: %+v", next)
	// C code that checks for no signals, with a process that must end too.
	a = began("import subprocess\np = subprocess.Popen(['sleep', '7531'])\nprint('began', flush=True)\nsum(range(10**13))", "lost")
	check.That(t, a.Cause == "timeout" && a.State == "lost" && text(a.Stdout) == "began\n" && a.Interpreter != nil && a.Interpreter.Usage != nil, "%+v", a)
	ran := s.call(path+"/exec", sh("pgrep -f 'sleep 753[1]' && echo there"))
	check.That(t, !strings.Contains(text(ran.Stdout), "there"), "a process of the lost interpreter: %q", text(ran.Stdout))
	a = s.cell(path, python("'x' in globals()"))
	check.That(t, a.Number == 1 && shown(a) == "False" && a.Earlier == nil, "after it was lost: %+v", a)
	// Start-up files of the session count towards the cell's time.
	slow := s.session(`{}`)
	s.call(slow+"/exec", sh(`d=$(python3 -m site --user-site); mkdir -p "$d"; echo "import time; time.sleep(600)" >"$d/usercustomize.py"`))
	late := python("1")
	late.TimeoutMS = 300
	a = s.cell(slow, late)
	check.That(t, a.Cause == "timeout" && a.TimedOut && a.State == "lost" && a.Number == 1, "a start that takes long: %+v", a)
	s.call(slow+"/exec", sh("rm -r .local"))
	a = s.cell(slow, python("1"))
	check.That(t, shown(a) == "1" && a.Number == 1, "after a start that took long: %+v", a)
	long := python("1")
	long.TimeoutMS = 60_000
	a = s.cell(path, long)
	check.That(t, len(a.Clamped) == 1 && a.Clamped[0] == "timeout_ms" && a.TimeoutMS == 31_000, "%+v", a)
}

// A call does not hang while the interpreter is idle, when its message that the cell is over, or
// that the connection closed, was lost.
func testIdleInterpreter(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	for _, test := range []struct{ name, code, cause, state string }{
		{"the socket is closed", "import os, time\nos.close(3)\ntime.sleep(600)", "lost", "lost"},
		{"it has killed itself", "import os\nos.kill(os.getpid(), 9)", "signaled", "lost"},
		{"a process holds all of its descriptors", "import subprocess\np = subprocess.Popen(['sleep', '600'], close_fds=False)", "done", "kept"},
	} {
		c := python(test.code)
		c.TimeoutMS = 60_000
		a := s.cell(path, c) // not a timeout
		check.That(t, string(a.Cause) == test.cause && a.State == test.state, "%s: %s, %s", test.name, a.Cause, a.State)
		a = s.cell(path, python("6*7"))
		check.That(t, shown(a) == "42", "after %s: %+v", test.name, a)
	}
	// Short ones in quick succession.
	first := s.cell(path, python("0")).Number
	for n := range 200 {
		a := s.cell(path, python(itoa(n)))
		check.Require(t, shown(a) == itoa(n) && a.Number == first+n+1, "%d: %+v", n, a)
	}
	// An interpreter that exits between two cells is reported with the next one, even if its end is proven only then.
	s.cell(path, python(`import os, threading, time
def leave():
    while not os.path.exists("leave"): time.sleep(0.01)
    os._exit(9)
threading.Thread(target=leave).start()`))
	s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/leave", "", "Content-Type", "application/octet-stream")
	harness.Until(t, harness.Bound, "the end of the interpreter", func() bool {
		return !slices.ContainsFunc(harness.Descendants(s.cmd.Process.Pid), func(pid int) bool {
			line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")) // it may have exited
			return strings.HasPrefix(string(line), "python3\x00")
		})
	})
	a := s.cell(path, python("1"))
	end := cmp.Or(a.Earlier, a.Interpreter)
	check.That(t, end != nil && end.ExitCode == 9 && end.Teardown.Verdict == "proven" && (a.Earlier == nil || a.Number == 1), "%+v", a)
}

// Only one cell runs at a time; others are rejected at once. A client that disconnects ends its cell.
func TestCodeBusy(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	s.cell(path, python("x = 1"))
	kept, lost := 0, 0
	for kept == 0 || lost == 0 {
		check.Require(t, lost <= 20, "no cell of a client that left has ended within a second after SIGINT")
		code := "open('began', 'w')\nimport time\ntime.sleep(600)"
		if kept > 0 {
			code = "open('began', 'w')\nsum(range(10**13))"
		}
		ctx, leave := context.WithCancel(t.Context())
		left := make(chan error, 1)
		go func() {
			_, _, _, err := s.try(ctx, http.MethodPost, path+"/code", python(code))
			left <- err
		}()
		harness.Until(t, harness.Bound, "the cell to run", func() bool {
			status, _ := s.ask(http.MethodGet, path+"/files/began", nil)
			return status == 200
		})
		s.refuses(api.BusySession, http.MethodPost, path+"/code", python("1"))
		// Other calls continue.
		s.want(path+"/exec", "rm began; echo free", "free\n")
		leave()
		err := <-left
		check.That(t, err != nil, "the client has left, and has an answer")
		harness.Until(t, harness.Bound, "the session to be free", func() bool {
			status, _ := s.ask(http.MethodPost, path+"/code", python("1"))
			return status == 200
		})
		harness.Until(t, harness.Bound, "the cell in the log", func() bool {
			log, was := s.log.String(), kept+lost
			kept, lost = strings.Count(log, `"cause":"canceled","state":"kept"`), strings.Count(log, `"cause":"canceled","state":"lost"`)
			return kept+lost > was
		})
	}
}

// Invalid cells are rejected, and nothing starts.
func TestCodeRefused(t *testing.T) {
	t.Parallel()
	s := serve(t, "[languages.none]\ncommand = [\"sh\", \"{file}\"]\nfile = \"main.sh\"\nkept = [\"no-such-python\"]\ndriver = \"python\"\n")
	path := s.session(`{}`)
	for _, test := range []struct {
		body   string
		status int
		word   string
	}{
		{`{}`, 400, "code"},
		{`{"language":"cobol","code":"1"}`, 400, "cobol"},
		{`{"language":"sh","code":"1"}`, 400, "does not support cells"},
		{`{"language":"none","code":"1"}`, 400, "no-such-python"},
		{`{"language":"python"}`, 400, "code"},
		{`{"language":"python","code":"1","argv":["true"]}`, 400, "argv"},
		{`{"language":"python","code":"1","timeout_ms":-1}`, 400, "timeout_ms"},
		{`{"language":"python","code":"1","files":[{"path":"../a","text":""}]}`, 400, ".."},
		{`{"language":"python","code":"1","files":[{"path":"a","id":"sha256:00"}]}`, 404, "content store"},
		{`{"language":"python","code":"1","collect":["["]}`, 400, "pattern"},
		{`nonsense`, 400, "body"},
	} {
		status, e := s.refused(http.MethodPost, path+"/code", test.body)
		check.That(t, status == test.status && strings.Contains(e.Failure.Message, test.word), "%s: %d %s", test.body, status, e.Failure.Message)
	}
	a := s.cell(path, python("1"))
	check.That(t, a.Number == 1, "%+v", a)
	s.refuses(api.NoSuchSession, http.MethodPost, "/v1/sessions/none/code", python("1"))
}

// The end of a session ends its interpreters and a running cell.
func TestCodeSessionEnds(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	answer := make(chan string, 1)
	go func() {
		_, b, _, err := s.try(t.Context(), http.MethodPost, path+"/code", python("open('began', 'w')\nwhile True:\n try: sum(range(10**13))\n except: pass"))
		answer <- fmt.Sprint(err, string(b))
	}()
	harness.Until(t, harness.Bound, "the cell to run", func() bool {
		status, _ := s.ask(http.MethodGet, path+"/files/began", nil)
		return status == 200
	})
	s.answers(200, `"verdict":"proven"`, http.MethodDelete, path, nil)
	a := <-answer
	check.That(t, strings.Contains(a, `"cause":"canceled"`) && strings.Contains(a, `"state":"lost"`), "%s", a)
	status, e := s.refused(http.MethodPost, path+"/code", python("1"))
	check.That(t, status == http.StatusGone && e.Failure.Code == api.Ended && strings.Contains(e.Failure.Message, "killed"), "%d %+v", status, e)
	s.idle()
	// While its interpreter starts, or before.
	for range 5 {
		path := s.session(`{}`)
		go func() {
			_, b, _, err := s.try(t.Context(), http.MethodPost, path+"/code", python("import time\ntime.sleep(600)"))
			answer <- fmt.Sprint(err, string(b))
		}()
		s.answers(200, "", http.MethodDelete, path, nil)
		a := <-answer
		check.That(t, strings.Contains(a, `"code":"ended"`) || strings.Contains(a, `"state":"lost"`), "%s", a)
	}
	s.idle()
}
