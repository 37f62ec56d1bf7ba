package serve

import (
	"cmp"
	"context"
	"encoding/json"
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
	"github.com/sbxrun/sbxrun/tests/harness"
)

// cell runs a cell, which must be answered in time.
func (s *server) cell(path string, c api.Cell) *api.CellAnswer {
	s.t.Helper()
	began := time.Now()
	status, b := s.ask(http.MethodPost, path+"/code", c)
	if status != http.StatusOK {
		s.t.Fatalf("%.100q: %d %s\n%s", c.Code, status, b, s.log)
	}
	a := &api.CellAnswer{}
	if err := json.Unmarshal(b, a); err != nil {
		s.t.Fatalf("%v: %s", err, b)
	}
	// The deadline, one second after SIGINT, and the proof.
	if took := time.Since(began); c.TimeoutMS > 0 && took > time.Duration(c.TimeoutMS)*time.Millisecond+time.Second+harness.Slack {
		s.t.Errorf("%.100q took %v", c.Code, took)
	}
	if (a.State == "lost") != (a.Interpreter != nil) || a.Interpreter != nil && a.Interpreter.Teardown.Verdict != "proven" {
		s.t.Errorf("%.100q: %s, %+v", c.Code, a.State, a.Interpreter)
	}
	return a
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
	if a.Cause != "done" || a.State != "kept" || a.Number != 1 || a.TimedOut || text(a.Stdout) != "out\n" || text(a.Stderr) != "err\n" || *a.StdoutBytes != 4 || len(a.Results) != 0 || a.Exception != nil {
		t.Errorf("%+v", a)
	}
	if a.ID == "" || a.RequestID == "" || a.StartedAt == "" || a.TimeoutMS != 30_000 {
		t.Errorf("%+v", a)
	}
	if a := s.cell(path, python("x += 1\nx")); a.Number != 2 || shown(a) != "42" || text(a.Stdout) != "" {
		t.Errorf("%+v", a)
	}
	a = s.cell(path, python("print('before')\ny = 5\n1/0"))
	if a.Cause != "done" || a.State != "kept" || a.Exception == nil || a.Exception.Name != "ZeroDivisionError" || !strings.Contains(a.Exception.Traceback, "line 3") || text(a.Stdout) != "before\n" {
		t.Errorf("%+v %+v", a, a.Exception)
	}
	if a := s.cell(path, python("x + y")); shown(a) != "47" || a.Exception != nil {
		t.Errorf("%+v", a)
	}
	// An exec and a cell have the same files.
	c := python("open('plot.txt', 'w').write(open('given').read() + open('more').read())")
	c.Files, c.Collect = []api.FileIn{{Path: "more", Text: new(string)}}, []string{"*.txt"}
	*c.Files[0].Text = " and there"
	a = s.cell(path, c)
	if len(a.Files) != 1 || a.Files[0].Path != "plot.txt" || a.Files[0].MediaType != "text/plain; charset=utf-8" {
		t.Fatalf("%+v", a)
	}
	if _, b := s.ask(http.MethodGet, "/v1/files/"+a.Files[0].ID, nil); string(b) != "here and there" {
		t.Errorf("%q", b)
	}
	if a := s.call(path+"/exec", sh("cat plot.txt; pgrep -c python3 || :")); !strings.HasPrefix(text(a.Stdout), "here and there") {
		t.Errorf("%q", text(a.Stdout))
	}
	other := s.session(`{}`)
	if a := s.cell(other, python("x")); a.Number != 1 || a.Exception == nil || a.Exception.Name != "NameError" {
		t.Errorf("another session: %+v", a)
	}
	node := api.Cell{Language: "node", Code: "globalThis.z = (globalThis.z ?? 0) + 1"}
	if _, err := exec.LookPath("node"); err == nil {
		if a := s.cell(path, node); a.Number != 1 || shown(a) != "1" {
			t.Errorf("%+v", a)
		}
		if a := s.cell(path, node); a.Number != 2 || shown(a) != "2" {
			t.Errorf("%+v", a)
		}
	}
	if a := s.cell(path, python("x")); shown(a) != "42" {
		t.Errorf("beside node: %+v", a)
	}
	if _, e := s.refused(http.MethodPost, path+"/code", api.Cell{Language: "bash", Code: "x"}); e.Failure.Code != api.Usage || !strings.Contains(e.Failure.Hint, "GET /v1/languages") {
		t.Errorf("%+v", e)
	}
	c = python("import matplotlib.pyplot as plt\nplt.figure(1)\nNone")
	pyplot := harness.Pyplot
	c.Files = []api.FileIn{{Path: "matplotlib/__init__.py", Text: new(string)}, {Path: "matplotlib/pyplot.py", Text: &pyplot}}
	if a := s.cell(path, c); len(a.Results) != 1 || a.Results[0].Kind != "figure" || a.Results[0].Media[0].MediaType != "image/png" {
		t.Errorf("%+v", a)
	} else if _, b := s.ask(http.MethodGet, "/v1/files/"+a.Results[0].Media[0].ID, nil); string(b) != "png by Agg" {
		t.Errorf("%q", b)
	}
	s.logs(`"msg":"cell"`)
	if log := s.log.String(); strings.Contains(log, "before") || strings.Contains(log, "ZeroDivision") {
		t.Errorf("%s", log)
	}
	if _, b := s.ask(http.MethodGet, "/metrics", nil); !strings.Contains(string(b), fmt.Sprintf(`sbxrun_cells_total{cause="done",state="kept",tenant="uid-%d"}`, os.Geteuid())) {
		t.Errorf("no cells in %s", b)
	}
	if _, b := s.ask(http.MethodGet, "/v1/languages", nil); !strings.Contains(string(b), `"file":"main.py","cells":true`) || !strings.Contains(string(b), `"file":"main.sh","cells":false`) {
		t.Errorf("%s", b)
	}
	for _, p := range []string{path, other} {
		if status, b := s.ask(http.MethodDelete, p, nil); status != 200 || !strings.Contains(string(b), `"verdict":"proven"`) {
			t.Errorf("%d %s", status, b)
		}
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
	if len(a.Results) != 2 || a.Results[0].Kind != "display" || a.Results[1].Kind != "value" {
		t.Fatalf("%+v", a)
	}
	kinds := map[string]api.Medium{}
	for _, m := range a.Results[1].Media {
		kinds[m.MediaType] = m
	}
	if m := kinds["text/plain"]; text(m.Text) != "P" || a.Results[1].Media[0].MediaType != "text/plain" {
		t.Errorf("%+v", a.Results[1].Media)
	}
	if m := kinds["text/html"]; text(m.Text) != "<b>p</b>" || m.Size != 8 || m.ID != "" {
		t.Errorf("%+v", m)
	}
	png := kinds["image/png"]
	if _, b := s.ask(http.MethodGet, "/v1/files/"+png.ID, nil); png.Text != nil || png.Size != 10 || string(b) != "\x89PNG\x00\x00\x00\x00\x00\x00" {
		t.Errorf("%+v: %q", png, b)
	}
	// The answer reports results without room in the store, and the cell has run.
	a = s.cell(path, python("P(20000)"))
	for _, m := range a.Results[0].Media {
		if m.MediaType == "image/png" && (m.Error == "" || m.ID != "") {
			t.Errorf("%+v", m)
		}
	}
	if shown(a) != "P" {
		t.Errorf("%+v", a)
	}
}

// A cell ends at its deadline whatever it does, and the next one works.
func TestCodeTimeout(t *testing.T) {
	t.Parallel()
	s := serve(t, "[call]\nmax_timeout = \"31s\"\n")
	path := s.session(`{}`)
	s.cell(path, python("x = 1"))
	loop := python("import time\nprint('began')\nwhile True: time.sleep(0.01)")
	loop.TimeoutMS = result.Milliseconds(harness.Deadline(300 * time.Millisecond))
	a := s.cell(path, loop)
	if a.Cause != "timeout" || !a.TimedOut || a.State != "kept" || text(a.Stdout) != "began\n" || a.Exception == nil || a.Exception.Name != "KeyboardInterrupt" {
		t.Errorf("%+v %+v", a, a.Exception)
	}
	if a := s.cell(path, python("x")); a.Number != 3 || shown(a) != "1" {
		t.Errorf("kept: %+v", a)
	}
	// C code that checks for no signals, with a process that must end too.
	hard := python("import subprocess\np = subprocess.Popen(['sleep', '7531'])\nprint('began', flush=True)\nsum(range(10**13))")
	hard.TimeoutMS = loop.TimeoutMS
	a = s.cell(path, hard)
	if a.Cause != "timeout" || a.State != "lost" || text(a.Stdout) != "began\n" || a.Interpreter == nil || a.Interpreter.Usage == nil {
		t.Errorf("%+v", a)
	}
	if a := s.call(path+"/exec", sh("pgrep -f 'sleep 753[1]' && echo there")); strings.Contains(text(a.Stdout), "there") {
		t.Errorf("a process of the lost interpreter: %q", text(a.Stdout))
	}
	if a := s.cell(path, python("'x' in globals()")); a.Number != 1 || shown(a) != "False" || a.Earlier != nil {
		t.Errorf("after it was lost: %+v", a)
	}
	// Start-up files of the session count towards the cell's time.
	slow := s.session(`{}`)
	s.call(slow+"/exec", sh(`d=$(python3 -m site --user-site); mkdir -p "$d"; echo "import time; time.sleep(600)" >"$d/usercustomize.py"`))
	late := python("1")
	late.TimeoutMS = 300
	if a := s.cell(slow, late); a.Cause != "timeout" || !a.TimedOut || a.State != "lost" || a.Number != 1 {
		t.Errorf("a start that takes long: %+v", a)
	}
	s.call(slow+"/exec", sh("rm -r .local"))
	if a := s.cell(slow, python("1")); shown(a) != "1" || a.Number != 1 {
		t.Errorf("after a start that took long: %+v", a)
	}
	long := python("1")
	long.TimeoutMS = 60_000
	if a := s.cell(path, long); len(a.Clamped) != 1 || a.Clamped[0] != "timeout_ms" || a.TimeoutMS != 31_000 {
		t.Errorf("%+v", a)
	}
}

// A call does not hang while the interpreter is idle, when its message that the cell is over, or
// that the connection closed, was lost.
func testIdleInterpreter(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	for _, test := range []struct{ name, code, cause, state string }{
		{"the socket is closed", "import os, time\nos.close(3)\ntime.sleep(600)", "lost", "lost"},
		{"it has ended", "import os\nos._exit(7)", "exited", "lost"},
		{"it has killed itself", "import os\nos.kill(os.getpid(), 9)", "signaled", "lost"},
		{"its streams are closed", "import os\nos.close(1)\nos.close(2)", "done", ""},
		{"a process holds all of its descriptors", "import subprocess\np = subprocess.Popen(['sleep', '600'], close_fds=False)", "done", "kept"},
		{"a thread goes on", "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "done", "kept"},
		{"much is written at the end", "import sys\nsys.stdout.write('x' * (8 << 20))", "done", "kept"},
		{"no code", "", "done", "kept"},
	} {
		c := python(test.code)
		c.TimeoutMS = 60_000
		began := time.Now()
		a := s.cell(path, c)
		if took := time.Since(began); took > harness.Slack {
			t.Errorf("%s: answered after %v", test.name, took)
		}
		if string(a.Cause) != test.cause || test.state != "" && a.State != test.state {
			t.Errorf("%s: %s, %s", test.name, a.Cause, a.State)
		}
		if a := s.cell(path, python("6*7")); shown(a) != "42" {
			t.Errorf("after %s: %+v", test.name, a)
		}
	}
	// Short ones in quick succession.
	first := s.cell(path, python("0")).Number
	for n := range 200 {
		if a := s.cell(path, python(itoa(n))); shown(a) != itoa(n) || a.Number != first+n+1 {
			t.Fatalf("%d: %+v", n, a)
		}
	}
	// An interpreter that exits between two cells is reported with the next one, even if its end
	// is proven only then.
	s.cell(path, python("import threading, os\nthreading.Timer(0.05, os._exit, (9,)).start()"))
	harness.Until(t, harness.Bound, "the end of the interpreter", func() bool {
		return !slices.ContainsFunc(harness.Descendants(s.cmd.Process.Pid), func(pid int) bool {
			line, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cmdline")) // it may have exited
			return strings.HasPrefix(string(line), "python3\x00")
		})
	})
	a := s.cell(path, python("1"))
	if end := cmp.Or(a.Earlier, a.Interpreter); end == nil || end.ExitCode != 9 || end.Teardown.Verdict != "proven" || a.Earlier != nil && a.Number != 1 {
		t.Errorf("%+v", a)
	}
}

// Only one cell runs at a time; others are rejected at once. A client that disconnects ends its
// cell.
func TestCodeBusy(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	s.cell(path, python("x = 1"))
	for _, code := range []string{"open('began', 'w')\nimport time\ntime.sleep(600)", "open('began', 'w')\nsum(range(10**13))"} {
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
		if _, e := s.refused(http.MethodPost, path+"/code", python("1")); e.Failure.Code != api.BusySession {
			t.Errorf("%+v", e)
		}
		// Other calls continue.
		if a := s.call(path+"/exec", sh("rm began; echo free")); text(a.Stdout) != "free\n" {
			t.Errorf("%q", text(a.Stdout))
		}
		leave()
		if err := <-left; err == nil {
			t.Error("the client has left, and has an answer")
		}
		harness.Until(t, harness.Bound, "the session to be free", func() bool {
			status, _ := s.ask(http.MethodPost, path+"/code", python("1"))
			return status == 200
		})
	}
	s.logs(`"cause":"canceled","state":"kept"`, `"cause":"canceled","state":"lost"`)
}

// Output that looks like an answer is output.
func TestCodeForged(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	const forged = `{"result":{"kind":"value","media":[{"type":"text/plain","text":"forged"}]}}` + "\n" + `{"end":true}`
	a := s.cell(path, python("print('''"+forged+"''')\nimport os, time\nos.write(2, b'{\"end\":true}\\n')\nos.write(3, b'''"+forged+"\n''')\ntime.sleep(0.2)\nprint('after')\n'real'"))
	if shown(a) != "'real'" || len(a.Results) != 1 || text(a.Stdout) != forged+"\nafter\n" || text(a.Stderr) != "{\"end\":true}\n" {
		t.Errorf("%+v: %q %q", a, text(a.Stdout), text(a.Stderr))
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
		if status, e := s.refused(http.MethodPost, path+"/code", test.body); status != test.status || !strings.Contains(e.Failure.Message, test.word) {
			t.Errorf("%s: %d %s", test.body, status, e.Failure.Message)
		}
	}
	if a := s.cell(path, python("1")); a.Number != 1 {
		t.Errorf("%+v", a)
	}
	if _, e := s.refused(http.MethodPost, "/v1/sessions/none/code", python("1")); e.Failure.Code != api.NoSuchSession {
		t.Errorf("%+v", e)
	}
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
	if status, b := s.ask(http.MethodDelete, path, nil); status != 200 || !strings.Contains(string(b), `"verdict":"proven"`) {
		t.Errorf("%d %s", status, b)
	}
	if a := <-answer; !strings.Contains(a, `"cause":"canceled"`) || !strings.Contains(a, `"state":"lost"`) {
		t.Errorf("%s", a)
	}
	status, e := s.refused(http.MethodPost, path+"/code", python("1"))
	if status != http.StatusGone || e.Failure.Code != api.Ended || !strings.Contains(e.Failure.Message, "killed") {
		t.Errorf("%d %+v", status, e)
	}
	s.idle()
	// While its interpreter starts, or before.
	for range 5 {
		path := s.session(`{}`)
		go func() {
			_, b, _, err := s.try(t.Context(), http.MethodPost, path+"/code", python("import time\ntime.sleep(600)"))
			answer <- fmt.Sprint(err, string(b))
		}()
		if status, b := s.ask(http.MethodDelete, path, nil); status != 200 {
			t.Errorf("%d %s", status, b)
		}
		if a := <-answer; !strings.Contains(a, `"code":"ended"`) && !strings.Contains(a, `"state":"lost"`) {
			t.Errorf("%s", a)
		}
	}
	s.idle()
}

// A cell that is sent twice with one key runs once.
func TestCellOnce(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	status, b := s.ask(http.MethodPost, "/v1/sessions", api.NewSession{})
	var session api.Session
	if err := json.Unmarshal(b, &session); err != nil || status != http.StatusCreated {
		t.Fatalf("%d %s", status, b)
	}
	path := "/v1/sessions/" + session.ID + "/code"
	cell := api.Cell{Language: "python", Code: "n = globals().get('n', 0) + 1\nn"}
	var answers []string
	for range 2 {
		status, b := s.ask(http.MethodPost, path, cell, "Idempotency-Key", "k")
		if status != 200 || !strings.Contains(string(b), `"text":"1"`) {
			t.Errorf("%d %s", status, b)
		}
		answers = append(answers, string(b))
	}
	if answers[0] != answers[1] {
		t.Errorf("%s\n%s", answers[0], answers[1])
	}
	if status, b := s.ask(http.MethodPost, path, cell); status != 200 || !strings.Contains(string(b), `"text":"2"`) {
		t.Errorf("without a key: %d %s", status, b)
	}
	cell.Code = "0"
	if status, e := s.refused(http.MethodPost, path, cell, "Idempotency-Key", "k"); status != 409 || e.Failure.Code != api.Idempotency {
		t.Errorf("%d %+v", status, e)
	}
}
