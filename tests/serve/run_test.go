package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/tests/budget"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func itoa(n int) string { return strconv.Itoa(n) }

func TestRun(t *testing.T) {
	t.Parallel()
	for config, room := range map[string]string{"": "cold", "[rooms]\nmin = 2\nmax = 4\n[languages.python]\ncommand = [\"python3\", \"{file}\"]\nfile = \"main.py\"\nahead = 1\n": "warm"} {
		t.Run(room, func(t *testing.T) { testRun(t, config, room) })
	}
}

// A wrong method gets 405 and the methods of the path; an unknown path gets 404.
func TestMethods(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	for path, want := range map[string]api.Code{"/v1/run": api.NoSuchMethod, "/v1/sessions/x/files/a": api.NoSuchMethod, "/run": api.NoSuchPath, "/v1/run/x": api.NoSuchPath} {
		_, e := s.refused(http.MethodPatch, path, nil)
		check.That(t, e.Failure.Code == want && strings.Contains(e.Failure.Message, path), "%s: %+v", path, e)
	}
	_, e := s.refused(http.MethodGet, "/v1/run", nil)
	check.That(t, e.Failure.Message == "/v1/run supports POST, not GET", "%+v", e)
}

func testRun(t *testing.T, config, room string) {
	s := serve(t, config)
	for _, test := range []struct {
		name           string
		call           api.Call
		cause          string
		code           int
		stdout, stderr string
	}{
		{"output", sh("echo out; echo err >&2; exit 3"), "exited", 3, "out\n", "err\n"},
		{"stdin", api.Call{Argv: []string{"cat"}, Stdin: "in"}, "exited", 0, "in", ""},
		{"no stdin", api.Call{Argv: []string{"cat"}}, "exited", 0, "", ""},
		{"env", api.Call{Argv: []string{"sh", "-c", `echo "$A"`}, Env: map[string]string{"A": "b c"}}, "exited", 0, "b c\n", ""},
		{"nothing of the server's", api.Call{Argv: []string{"sh", "-c", `env | grep -c -v '^\(PATH\|HOME\|USER\|LOGNAME\|PWD\|OLDPWD\|SHLVL\|_\|LANG\|LC_[A-Z]*\|TERM\|PYTHONUNBUFFERED\)='; pwd`}}, "exited", 0, "0\n/home/sandbox\n", ""},
		{"workdir", api.Call{Argv: []string{"pwd"}, Workdir: "/tmp"}, "exited", 0, "/tmp\n", ""},
		{"own signal", sh("kill -9 $$"), "signaled", 137, "", ""},
		{"137", sh("exit 137"), "exited", 137, "", ""},
		{"not there", api.Call{Argv: []string{"no-such-command"}}, "start-failed", 127, "", ""},
		{"not executable", api.Call{Argv: []string{"/etc"}}, "start-failed", 126, "", ""},
		{"python", api.Call{Language: "python", Code: "import sys; print(6*7); print(sys.stdin.read())", Stdin: "x"}, "exited", 0, "42\nx\n", ""},
		{"python by default", api.Call{Code: "print(6*7)"}, "exited", 0, "42\n", ""},
		{"bash", api.Call{Language: "bash", Code: "echo ${BASH_VERSION:+yes}"}, "exited", 0, "yes\n", ""},
		{"node", api.Call{Language: "node", Code: "console.log(6*7)"}, "exited", 0, "42\n", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := s.in(room, test.call)
			check.That(t, string(a.Cause) == test.cause && a.ExitCode == test.code && text(a.Stdout) == test.stdout && text(a.Stderr) == test.stderr,
				"%s %d, stdout %q, stderr %q", a.Cause, a.ExitCode, text(a.Stdout), text(a.Stderr))
			check.That(t, a.ID != "" && a.RequestID != "", "id %q, request %q", a.ID, a.RequestID)
		})
	}
	if room == "warm" { // after the first, a second Python program gets a prestarted interpreter
		harness.Until(t, harness.Bound, "an interpreter that was started ahead", func() bool {
			waits := map[string]bool{} // by what was started
			for _, pid := range harness.Descendants(s.cmd.Process.Pid) {
				if p, ok := harness.ReadProc(pid); ok && strings.HasPrefix(p.Comm, "python3") {
					waits[p.Start] = true
				}
			}
			a := s.run(api.Call{Language: "python", Code: "print(open('/proc/self/stat').read().rsplit(')')[1].split()[19])"})
			return waits[strings.TrimSpace(text(a.Stdout))]
		})
	}
	call := sh("mkdir d; echo x >d/a")
	call.Collect = []string{"d/*"}
	a := s.run(call)
	check.That(t, len(a.Files) == 1 && a.Files[0].Path == "d/a", "collected %+v", a.Files)
	if room == "cold" {
		s.idle()
	}
}

// Rooms are warm before the first call, and a call sees neither output nor files of the previous one.
func TestCallsApart(t *testing.T) {
	t.Parallel()
	s := serve(t, "[rooms]\nmin = 1\nmax = 1\n")
	s.warm(1)
	check.Equal(t, s.run(sh("true")).Room, "warm", "the first call's room")
	s.in("warm", sh("echo secret >/tmp/a; echo secret >~/b; sleep 1000 & echo"))
	check.Equal(t, text(s.in("warm", sh("ls /tmp ~; set -- /proc/[0-9]*; echo $#")).Stdout), "/home/sandbox:\n\n/tmp:\n2\n") // init and the shell
}

// An invalid request is rejected, and nothing starts.
func TestUsage(t *testing.T) {
	t.Parallel()
	s := serve(t, "max_body = \"100k\"\n")
	for _, test := range []struct {
		body   string
		status int
		word   string
	}{
		{`{"argv":["true"],"language":"python"}`, 400, "argv"},
		{`{}`, 400, "argv"},
		{`{"argv":[]}`, 400, "argv"},
		{`{"argv":[""]}`, 400, "empty"},
		{`{"argv":["true"],"code":"1"}`, 400, "either argv or code"},
		{`{"language":"cobol","code":"1"}`, 400, "cobol"},
		{`{"argv":"true"}`, 400, "array"},
		{`{"argv":["true"],"unknown":1}`, 400, "unknown"},
		{`{"argv":["true"],"timeout_ms":-1}`, 400, "timeout_ms"},
		{`{"argv":["true"],"limits":{"pids":1}}`, 400, "pids"},
		{`{"argv":["true"],"limits":{"memory":1}}`, 400, "memory"},
		{`{"argv":["true"],"env":{"A=B":"1"}}`, 400, "env"},
		{`{"argv":["true"],"env":{"A":"a\u0000b"}}`, 400, "env"},
		{`{"argv":["tr\u0000ue"]}`, 400, "NUL"},
		{`{"argv":["true"],"workdir":"tmp"}`, 400, "workdir"},
		{`{"argv":["true"],"workdir":"/no/such"}`, 400, "/no/such"},
		{`{"argv":["true"],"files":[{"path":"a"}]}`, 400, "one of"},
		{`{"argv":["true"],"files":[{"path":"a","text":"","base64":""}]}`, 400, "one of"},
		{`{"argv":["true"],"files":[{"path":"a","base64":"?"}]}`, 400, "base64"},
		{`{"argv":["true"],"files":[{"path":"../a","text":""}]}`, 400, ".."},
		{`{"argv":["true"],"files":[{"path":"/a","text":""}]}`, 400, "absolute"},
		{`{"argv":["true"],"files":[{"path":"a","text":"","mode":"9"}]}`, 400, "mode"},
		{`{"argv":["true"],"files":[{"path":"a","id":"sha256:00"}]}`, 404, "content store"},
		{`{"argv":["true"],"collect":["["]}`, 400, "pattern"},
		{`{"argv":["true"],"collect":["*.png","[` + strings.Repeat("a-b", 2000) + `]"]}`, 400, "4096"},
		{`{"argv":["` + strings.Repeat("x", 110_000) + `"]}`, 413, "large"},
		{`nonsense`, 400, "body"},
		{``, 400, "body"},
		{`[]`, 400, "object"},
		{`{"argv":["true"],"limits":{"max_output":-1},"limits":{}}`, 400, "duplicate member"},
		{`{"argv":["true"],"limits":{"max_output":1},"Limits":{"max_output":-1}}`, 400, "Limits"},
		{`{"argv":["echo","` + "\xff" + `"]}`, 400, "Unicode"},
		{`{"argv":["echo","\udc80"]}`, 400, "/argv/1"},
		// As people first write them, who know other services: the hint names the right member.
		{`{"command": "ls -l"}`, 400, `["sh", "-c", "COMMAND"]`},
		{`{"argv": "ls -l"}`, 400, `["sh", "-c", "COMMAND"]`},
		{`{"code": "1", "timeout": 5}`, 400, "timeout_ms"},
		{`{"code": "1", "files": [{"path": "a", "content": "x"}]}`, 400, "text or base64"},
		{`{"code": "1", "limits": {"memory": "64M"}}`, 400, "number of bytes"},
		{`{"code": "1", "stdin": {"a": 1}}`, 400, "encode JSON as a string"},
		{`{"code": "1", "language": "javascript"}`, 400, ", node, "},
	} {
		status, e := s.refused(http.MethodPost, "/v1/run", test.body)
		check.That(t, status == test.status && strings.Contains(e.Failure.Message+e.Failure.Hint, test.word), "%.100s: %d %+v", test.body, status, e.Failure)
	}
	status, _ := s.refused(http.MethodPost, "/v1/run", "a=b", "Content-Type", "application/x-www-form-urlencoded")
	check.That(t, status == 415, "a form: %d", status)
	small := serve(t, "[tenant]\nmemory = \"64M\"\n")
	status, e := small.refused(http.MethodPost, "/v1/run", `{"argv":["true"],"limits":{"memory":1000000000}}`)
	check.That(t, status == 403 && strings.Contains(e.Failure.Message, "ceiling"), "above the ceiling: %d %+v", status, e)
	log := s.log.String() + small.log.String()
	check.That(t, !strings.Contains(log, `"call"`), "something was started: %s", log)
}

// Calls have few descriptors, with and without warm rooms.
func TestFewFiles(t *testing.T) {
	t.Parallel()
	few := strconv.FormatInt(limits.Files(1024), 10)
	const one = "[rooms]\nmin = 1\nmax = 1\n"
	for config, want := range map[string]string{one: few, one + "[call]\nnofile = 77\n": "77", "[rooms]\nmin = 0\nmax = 0\n": few} {
		s := serve(t, config)
		warm := strings.HasPrefix(config, one)
		if warm {
			s.warm(1)
		}
		a := s.run(sh("ulimit -Sn; ulimit -Hn"))
		check.That(t, *a.Stdout == want+"\n"+want+"\n" && warm == (a.Room == "warm"), "%q: %q in a %s room", config, *a.Stdout, a.Room)
	}
}

// The log contains neither code, nor arguments, nor environment of a client.
func TestLogHoldsNoSecrets(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	s.run(api.Call{Argv: []string{"echo", "hush-arg"}, Env: map[string]string{"A": "hush-env"}, Stdin: "hush-in"})
	s.run(api.Call{Language: "sh", Code: "echo hush-code"})
	s.refused(http.MethodPost, "/v1/run", `{"argv":["hush-wrong"],"x":"hush-wrong"}`)
	s.refused(http.MethodPost, "/v1/run", `{"argv":["true"]}`, "Authorization", "Bearer hush-token")
	s.end() // makes the log complete
	log := s.log.String()
	check.That(t, !strings.Contains(log, "hush") && strings.Contains(log, `"cause":"exited"`), "%v", log)
}

func TestOutputTruncated(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	call := sh("seq 100000; echo end")
	call.Limits.MaxOutput = 1000
	a := s.run(call)
	check.That(t, *a.StdoutTruncated && len(*a.Stdout) <= 1100 && strings.HasPrefix(*a.Stdout, "1\n2\n") && strings.HasSuffix(*a.Stdout, "\nend\n") && a.ExitCode == 0,
		"%v %d %.80q", *a.StdoutTruncated, len(*a.Stdout), *a.Stdout)
	a = s.run(sh(`printf '\377\000'`))
	check.That(t, a.Stdout == nil && text(a.StdoutBase64) == "/wA=", "%v %v", text(a.Stdout), text(a.StdoutBase64))
}

func TestFilesInAndOut(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	in, encoded := "text", "AAEC"
	call := sh("wc -c <a; wc -c <b/c; ./run; echo made >out.txt; mkdir -p d/deep other; echo x >d/e.csv; touch d/deep/f other/g.html other/h; ln -s /etc/passwd link.txt; mkfifo fifo.txt")
	call.Files = []api.FileIn{{Path: "a", Text: &in}, {Path: "b/c", Base64: &encoded}, {Path: "run", Text: ptr("#!/bin/sh\necho ran"), Mode: "755"}}
	call.Collect = []string{"*.txt", "d", "**/*.html", "none/x", "*.png"}
	a := s.run(call)
	check.That(t, text(a.Stdout) == "4\n3\nran\n", "%q %q", text(a.Stdout), text(a.Stderr))
	check.Require(t, len(a.Files) != 0, "nothing is collected")
	var names []string
	for _, f := range a.Files {
		names = append(names, f.Path+f.Error)
	}
	check.NoDiff(t, cmp.Diff([]string{"d/deep/f", "d/e.csv", "other/g.html", "out.txt"}, names), "collected (-want +got)")
	check.NoDiff(t, cmp.Diff([]string{"none/x", "*.png"}, a.Unmatched), "unmatched (-want +got)")
	made := a.Files[len(a.Files)-1]
	check.That(t, made.Size == 5 && strings.HasPrefix(made.MediaType, "text/plain"), "%+v", made)
	// Collected files can be passed to the next call.
	next := sh("cat again")
	next.Files = []api.FileIn{{Path: "again", ID: made.ID}}
	s.prints("/v1/run", next, "made\n")
}

// Directories that no pattern leads to are not searched, however large.
func TestCollectShallow(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	call := sh("mkdir d; seq 10001 | (cd d && xargs touch); echo x >a.txt")
	call.Collect = []string{"*.txt"}
	a := s.run(call)
	check.That(t, len(a.Files) == 1 && a.Files[0].Path == "a.txt", "%+v", a.Files)
	call.Collect = []string{"*/*.txt"}
	a = s.run(call)
	check.That(t, len(a.Files) == 1 && a.Files[0].Error != "", "%+v", a.Files)
}

func ptr[T any](v T) *T { return &v }

// read reads a stream of events.
func read(t *testing.T, r *http.Response) (all []api.Event) {
	t.Helper()
	lines := bufio.NewScanner(r.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Bytes()
		if r.Header.Get("Content-Type") == "text/event-stream" {
			var ok bool
			if line, ok = bytes.CutPrefix(line, []byte("data: ")); !ok {
				continue
			}
		}
		var e api.Event
		err := json.Unmarshal(line, &e)
		check.Require(t, err == nil, "%v: %s", err, line)
		all = append(all, e)
	}
	return all
}

func (s *server) stream(ctx context.Context, call api.Call, headers ...string) *http.Response {
	s.t.Helper()
	r, err := send(ctx, s.client, http.MethodPost, "http://sbxrun/v1/run", call, headers...)
	check.Must(s.t, err)
	return r
}

func TestStreams(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	for _, accept := range []string{"application/x-ndjson", "text/event-stream"} {
		t.Run(accept, func(t *testing.T) {
			t.Parallel()
			testStream(t, s, accept)
		})
	}
	// A call that fails to start is not answered with a stream.
	status, e := s.refused(http.MethodPost, "/v1/run?stream=1", api.Call{Argv: []string{"true"}, Workdir: "/no/such"})
	check.That(t, status == 400, "%d %+v", status, e)
}

// testStream: characters are never split, and other bytes come as Base64. The call is long enough for a keepalive.
func testStream(t *testing.T, s *server, accept string) {
	t.Helper()
	call := sh(`printf 'a\303'; sleep 0.2; printf '\244b'; echo err >&2; sleep 8; printf '\377'`)
	r := s.stream(t.Context(), call, "Accept", accept)
	check.Equal(t, r.Header.Get("Content-Type"), accept)
	all := read(t, r)
	r.Body.Close()
	var out, err string
	var binary []byte
	kinds := map[string]int{}
	for _, e := range all {
		kinds[e.Event]++
		switch e.Event {
		case "stdout":
			out, binary = out+e.Text, append(binary, e.Base64...)
		case "stderr":
			err += e.Text
		}
	}
	all = slices.DeleteFunc(all, func(e api.Event) bool { return e.Event == "keepalive" }) // the first one may come before the start
	last := all[len(all)-1]
	check.That(t, out == "aäb" && err == "err\n" && string(binary) == "\xff" && kinds["keepalive"] != 0 && all[0].Event == "start" && all[0].ID != "",
		"%q %q %q %v", out, err, binary, kinds)
	check.That(t, last.Event == "report" && last.Report != nil && last.Report.Cause == "exited" && *last.Report.StdoutBytes == 5 && last.Report.ID == all[0].ID, "%+v", last)
}

// A stream also respects the output limit.
func TestStreamBound(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	call := sh("yes | head -c 1000000")
	call.Limits.MaxOutput = 100_000
	r := s.stream(t.Context(), call, "Accept", "application/x-ndjson")
	defer r.Body.Close()
	n := 0
	all := read(t, r)
	for _, e := range all {
		n += len(e.Text)
	}
	rep := all[len(all)-1].Report
	check.That(t, n == 100_000 && rep != nil && *rep.StdoutBytes == 1_000_000 && *rep.StdoutTruncated, "%d bytes, %+v", n, rep)
}

// A client that disconnects ends its call, with and without a stream.
func testClientLeaves(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	for _, path := range []string{"/v1/run", "/v1/run?stream=1"} {
		s.begin(2, "sleep 1234", path, sh("setsid sleep 1234 & trap '' TERM; sleep 1234; sleep 1234"))()
		s.idle()
	}
	harness.Until(t, harness.Bound, "the log", func() bool { return strings.Count(s.log.String(), `"cause":"canceled"`) == 2 })
}

// A client that reads nothing does not delay others.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	call := sh("yes; sleep 1000")
	call.Limits.MaxOutput = 64 << 20
	r := s.stream(ctx, call, "Accept", "application/x-ndjson")
	defer r.Body.Close()
	for range 20 {
		s.want("/v1/run", "echo quick", "quick\n")
	}
	cancel()
	s.idle()
}

// A tenant's output limit applies to calls that request none.
func TestOutputCeiling(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nmax_output = \"64K\"\n")
	call := sh("head -c 1M /dev/zero | tr '\\0' x")
	const most = 64<<10 + 100 // with the event around it
	a := s.run(call)
	check.That(t, len(text(a.Stdout)) <= most && len(a.Clamped) == 0, "%d bytes, clamped %q", len(text(a.Stdout)), a.Clamped)
	call.Limits.MaxOutput = 65 << 10
	a = s.run(call)
	check.That(t, len(text(a.Stdout)) <= most && slices.Equal(a.Clamped, []string{"limits.max_output"}), "%d bytes, clamped %q", len(text(a.Stdout)), a.Clamped)
}

// Output that JSON escapes completely costs the server little memory, and is truncated to the size of an answer.
func TestAnswerMemory(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	for range 2 {
		call := sh("head -c 32M /dev/zero; head -c 32M /dev/zero >&2")
		call.Limits.MaxOutput = 64 << 20
		a := s.run(call)
		check.That(t, *a.StdoutBytes == 32<<20 && *a.StdoutTruncated && a.StdoutBase64 != nil && a.Stdout == nil && slices.Equal(a.Clamped, []string{"limits.max_output"}),
			"%d bytes, %d as text, clamped %q", *a.StdoutBytes, len(text(a.Stdout)), a.Clamped)
		if a.StdoutBase64 != nil {
			b, err := base64.StdEncoding.DecodeString(*a.StdoutBase64)
			check.That(t, err == nil && len(b) >= 8<<20 && len(b) <= 8<<20+100, "%d bytes, %v", len(b), err)
		}
	}
	status := harness.ReadFile(t, filepath.Join("/proc", itoa(s.cmd.Process.Pid), "status"))
	_, peak, _ := strings.Cut(string(status), "VmHWM:")
	kib, err := strconv.Atoi(strings.Fields(peak)[0])
	check.That(t, err == nil && kib <= 400<<10, "the server had %d KiB, %v", kib, err)
	// Text arrives unchanged, however it is split into pieces.
	want := strings.Repeat("\n<ä€😀>\"\\\t", 20_000)
	call := sh("cat")
	call.Stdin = want
	a := s.run(call)
	check.That(t, text(a.Stdout) == want, "%d bytes of %d", len(text(a.Stdout)), len(want))
}

// An answer's maximum memory is reserved before the call starts, and released with the answer.
func TestBuffers(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nbuffers = \"5M\"\n")
	leave := s.begin(1, "sleep 1234", "/v1/run", sh("exec sleep 1234"))
	s.refuses(api.Quota, http.MethodPost, "/v1/run", sh("true"))
	small := sh("echo small")
	small.Limits.MaxOutput = 1000
	s.prints("/v1/run", small, "small\n")
	leave()
	s.idle()
	// It is released a moment after its processes have ended.
	var status int
	var b []byte
	harness.Until(t, harness.Bound, "the memory of the call that was left", func() bool {
		status, b = s.ask(http.MethodPost, "/v1/run", sh("head -c 1M /dev/zero | tr '\\0' x; head -c 1M /dev/zero | tr '\\0' x >&2"), "Idempotency-Key", "k")
		return status != 429
	})
	check.That(t, status == 200, "%d %.300s", status, b)
	// The stored answer is on disk.
	s.answers(200, "", http.MethodPost, "/v1/run", sh("true"))
}

// The same for a status, of which each reader gets a copy. A call can still be removed.
func TestBuffersOfWhatIsTold(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nbuffers = \"5M\"\n")
	long := api.Call{Argv: append([]string{"true"}, slices.Repeat([]string{strings.Repeat("x", 100_000)}, 10)...)}
	c := s.status(http.MethodPost, "/v1/calls", long, http.StatusAccepted)
	harness.Until(t, harness.Bound, "the end of the call, of which nothing can be told", func() bool {
		status, b := s.ask(http.MethodGet, "/v1/calls/"+c.ID, nil)
		return status == http.StatusForbidden && strings.Contains(string(b), `"policy"`)
	})
	c = s.status(http.MethodDelete, "/v1/calls/"+c.ID, nil, http.StatusOK)
	check.That(t, c.Report != nil && c.Report.Cause == result.Exited && c.Report.Argv == nil, "%.1000v", c)
	path := s.session(`{}`)
	a := s.call(path+"/exec", sh("d=$(printf 'x%.0s' $(seq 250)); for i in $(seq 31); do mkdir $d; cd $d; done; touch $(seq 200)"))
	check.Require(t, a.ExitCode == 0, "%v", text(a.Stderr))
	s.refuses(api.Policy, http.MethodGet, path+"/files", nil)
	s.call(path+"/exec", sh("rm -r x*; touch a"))
	s.answers(http.StatusOK, `"path":"a"`, http.MethodGet, path+"/files", nil)
}

// Over its own limit a tenant gets 429, over the server's 503, both with Retry-After.
func TestBusy(t *testing.T) {
	t.Parallel()
	for config, want := range map[string]int{"[tenant]\nconcurrency = 1\nqueue = 0\n": 429, "places = 1\n[tenant]\nqueue = 0\n": 503} {
		s := serve(t, config)
		leave := s.begin(1, "sleep 4321", "/v1/run", sh("sleep 4321"))
		status, b, h, err := s.try(t.Context(), http.MethodPost, "/v1/run", sh("true"))
		check.That(t, err == nil && status == want && h.Get("Retry-After") != "" && strings.Contains(string(b), `"started":false`), "%d %s %v, want %d", status, b, err, want)
		leave()
		s.idle()
	}
}

// A scrape contains ended calls and their durations. A status reveals nothing of their contents unless configured.
func TestScrape(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	s.run(sh("exit 3; : hush"))
	long := sh("sleep 1000; : hush")
	long.TimeoutMS = 300
	s.run(long)
	s.run(api.Call{Language: "sh", Code: "exit 0; : hush"})
	_, m := s.ask(http.MethodGet, "/metrics", nil)
	own := fmt.Sprintf(`tenant="uid-%d"`, os.Geteuid())
	for _, line := range []string{
		`sbxrun_calls_total{cause="exited",room="cold",` + own + `} 2`, `sbxrun_calls_total{cause="timeout",room="cold",` + own + `} 1`,
		`sbxrun_call_duration_seconds_count{room="cold"} 3`, `sbxrun_call_duration_seconds_bucket{room="cold",le="300"} 3`, `sbxrun_call_teardown_seconds_count 3`, `sbxrun_unproven_total 0`,
	} {
		check.That(t, strings.Contains(string(m), line+"\n"), "no %s", line)
	}
	var sum float64
	if _, rest, _ := strings.Cut(string(m), "sbxrun_call_duration_seconds_sum{room=\"cold\"} "); rest != "" {
		sum, _ = strconv.ParseFloat(strings.Fields(rest)[0], 64) // must be above 0
	}
	bound := 3 * (0.3 + harness.Slack.Seconds())
	check.That(t, sum >= 0.3 && sum <= bound, "%v seconds", sum)
	_, b := s.ask(http.MethodGet, "/v1/status", nil)
	check.That(t, !strings.Contains(string(b), "hush") && strings.Count(string(b), `"verdict":"proven"`) == 3, "%s", b)
}

// When the machine is near its task limit, requests that start something are rejected with
// Retry-After, until there are tasks again.
func TestTaskBudget(t *testing.T) {
	t.Parallel()
	b := budget.New(t, 1000)
	if b == nil {
		return // no cgroup can be made: TestPressure covers the thresholds
	}
	s := serve(t, "")
	check.Must(t, os.WriteFile(b.Dir+"/cgroup.procs", []byte(itoa(s.cmd.Process.Pid)), 0))
	path := s.session(`{}`)
	s.call(path+"/exec", sh("true"))
	b.Fill(100)
	b.Limit(b.Used() * 10 / 9)
	busy := 0
	for _, q := range []struct{ path, body string }{
		{"/v1/run", `{"argv":["true"]}`}, {"/v1/run?stream=1", `{"argv":["true"]}`}, {"/v1/sessions", `{}`}, {path + "/exec", `{"argv":["true"]}`}, {path + "/code", `{"language":"python","code":"1"}`},
	} {
		status, answer, h, err := s.try(t.Context(), http.MethodPost, q.path, q.body)
		var e api.Error
		if err == nil {
			err = json.Unmarshal(answer, &e)
		}
		check.That(t, err == nil && status == http.StatusServiceUnavailable && e.Failure.Code == api.Busy && !e.Started && h.Get("Retry-After") != "" && strings.Contains(e.Failure.Message, b.Dir),
			"%s: %d %s %v, %v", q.path, status, answer, h, err)
		if q.path != "/v1/sessions" {
			busy++
		}
	}
	c := s.status(http.MethodPost, "/v1/calls", sh("true"), http.StatusAccepted)
	c = s.status(http.MethodGet, "/v1/calls/"+c.ID+"?wait_ms=60000", nil, http.StatusOK)
	check.That(t, c.Failure != nil && c.Failure.Code == api.Busy && !c.Started, "%+v", c)
	_, m := s.ask(http.MethodGet, "/metrics", nil)
	check.That(t, strings.Contains(string(m), fmt.Sprintf("sbxrun_refused_total{code=\"busy\",tenant=\"uid-%d\"} %d\n", os.Geteuid(), busy+1)), "%s", m)
	b.Limit(1000)
	s.run(sh("true"))
	s.call(path+"/exec", sh("true"))
	a := s.cell(path, python("1"))
	check.That(t, a.Number == 1, "%+v", a)
}

// A server that is shutting down starts nothing, lets calls end, and cancels those that take too long.
func TestDrain(t *testing.T) {
	t.Parallel()
	s := serve(t, "", "--drain-timeout", harness.Deadline(3*time.Second).String()) // the requests below come before
	answers := make(chan string, 2)
	for _, script := range []string{"sleep 6787; echo 6789; exit 7", "sleep 6789"} {
		go func() {
			status, b, _, err := s.try(context.Background(), http.MethodPost, "/v1/run", sh(script))
			var a api.Answer
			_ = json.Unmarshal(b, &a)
			answers <- fmt.Sprintln(status, err, a.Cause, a.ExitCode)
		}()
	}
	detached := s.status(http.MethodPost, "/v1/calls", sh("sleep 6788"), http.StatusAccepted)
	told := make(chan string, 1)
	go func() {
		_, b, _, err := s.try(context.Background(), http.MethodGet, "/v1/calls/"+detached.ID+"?wait_ms=60000", nil)
		told <- fmt.Sprintf("%s %v", b, err)
	}()
	s.busy(1, "sleep 6787")
	s.busy(1, "sleep 6789")
	s.busy(1, "sleep 6788")
	_ = s.cmd.Process.Signal(unix.SIGTERM)
	harness.Until(t, harness.Bound, "readyz to say so", func() bool {
		r, err := s.client.Get("http://sbxrun/readyz")
		if err != nil {
			return false
		}
		r.Body.Close()
		return r.StatusCode == 503
	})
	s.refuses(api.Draining, http.MethodPost, "/v1/run", sh("true"))
	s.release("sleep 6787")
	first, second := <-answers, <-answers
	check.That(t, first == "200 <nil> exited 7\n" && strings.HasPrefix(second, "200 <nil> canceled 143"), "%s, %s", first, second)
	end := <-told
	check.That(t, strings.Contains(end, `"cause":"canceled"`), "who waits for a detached call: %s", end)
	<-s.ended
	check.That(t, s.cmd.ProcessState.ExitCode() == 0, "%v", s.cmd.ProcessState)
	s.killed = true
	_, err := os.Stat(s.socket())
	check.That(t, err != nil, "the socket is left")
}

// SIGKILL of the server during 50 calls and a session leaves no process, and the next server starts with the same
// socket and state. It does so SBXRUN_SOAK times, at most 100; a third of the kills come at a random moment. One is
// SIGABRT, by which Go's runtime exits with a trace and 2, as after a panic in an unguarded goroutine.
func testServerKilled(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	times := min(100, harness.Soak(t))
	for i := range times + 1 {
		config := ""
		if i%2 == 1 && i < times {
			config = "[rooms]\nmin = 5\nmax = 8\n"
		}
		config += "[tenant]\nconcurrency = 60\n[call]\ntimeout = \"10m\"\nmax_timeout = \"10m\"\n" // until all have begun
		if i%3 == 2 && i < times {
			killedAnyMoment(t, dir, config)
			continue
		}
		s := serveIn(t, dir, config)
		over := s.amid(func(int) api.Call { return sh("setsid sleep 5678 & (sleep 5678 &); sleep 5678") })
		s.busy(153, "sleep 5678")
		its := cgroups(s.cmd.Process.Pid)
		if i < times {
			s.kill()
		} else if s.killBy(unix.SIGABRT); s.cmd.ProcessState.ExitCode() != 2 || !strings.Contains(s.log.String(), "goroutine 1 ") {
			t.Errorf("%v %s", s.cmd.ProcessState, s.log)
		}
		over()
		removed(t, its)
	}
	var left []limits.Leftover // of servers that were killed before they had a keeper, if there were any
	if machine, err := limits.Detect(); err == nil {
		left = machine.Leftovers()
	}
	t.Logf("cgroups left: %v", left)
	s := serveIn(t, dir, "")
	for _, l := range left {
		harness.Until(t, harness.Bound, "the removal of "+l.Dir, func() bool { _, err := os.Stat(l.Dir); return err != nil })
	}
	s.want("/v1/run", "echo again", "again\n")
}

// amid starts 50 calls, each followed by others as long as the server lives, and a session with a
// process, a cell and a stream. Half of the calls have limits where these can be set.
func (s *server) amid(call func(n int) api.Call) (over func()) {
	some := api.Limits{Pids: 64}
	if status, _, _, err := s.try(s.t.Context(), http.MethodPost, "/v1/run", api.Call{Argv: []string{"true"}, Limits: some}); err == nil && status != http.StatusOK {
		some = api.Limits{}
	}
	var all sync.WaitGroup
	ask := func(path string, body any) (answer []byte, err error) {
		_, answer, _, err = s.try(s.t.Context(), http.MethodPost, path, body)
		return answer, err
	}
	for n := range 50 {
		all.Go(func() {
			c := call(n)
			if n%2 == 0 {
				c.Limits = some
			}
			for err := error(nil); err == nil; {
				_, err = ask("/v1/run", c)
			}
		})
	}
	all.Go(func() {
		var x api.Session
		if b, err := ask("/v1/sessions", api.NewSession{Limits: some}); err != nil || json.Unmarshal(b, &x) != nil {
			return // the server was killed
		}
		path := "/v1/sessions/" + x.ID
		_, _ = ask(path+"/processes", sh("exec sleep 5678"))
		all.Go(func() {
			_, _ = ask(path+"/code", api.Cell{Language: "python", Code: "import subprocess\nsubprocess.run(['sleep', '5678'])", TimeoutMS: 600_000})
		})
		_, _ = ask(path+"/exec?stream=1", sh("exec sleep 5678"))
	})
	return all.Wait
}

// reaper starts a server, adopts and reaps the processes that it leaves, and exits when there are none.
const reaper = `import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) # PR_SET_CHILD_SUBREAPER
os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
while True:
    try: os.wait()
    except ChildProcessError: break
`

// killedAnyMoment kills a server that starts, runs and ends calls all the time. It does not look
// first, because that would miss the youngest processes. Everything is below the reaper.
func killedAnyMoment(t *testing.T, dir, config string) {
	t.Helper()
	s := serveBy(t, []string{"python3", "-c", reaper}, dir, config)
	s.killed = true
	below := func() []int { return harness.Descendants(s.cmd.Process.Pid) }
	target, err := harness.Open(below()[0])
	check.Must(t, err)
	defer target.Close()
	over := s.amid(func(n int) api.Call {
		switch n % 3 {
		case 0:
			return sh("setsid sleep 5678 & exit 3")
		case 1:
			c := sh("setsid sleep 5678 & sleep 5678")
			c.TimeoutMS = 100
			return c
		}
		return sh("setsid sleep 5678 & (sleep 5678 &); sleep 5678")
	})
	delay := rand.N(700 * time.Millisecond)
	time.Sleep(delay)
	its := cgroups(s.cmd.Process.Pid)
	check.Must(t, target.Signal(unix.SIGKILL))
	select {
	case <-s.ended:
	case <-time.After(harness.Bound):
		t.Errorf("killed after %v, it leaves %d processes: %v", delay, len(below()), below())
		for _, pid := range below() {
			if p, err := harness.Open(pid); err == nil {
				_ = p.Signal(unix.SIGKILL)
				p.Close()
			}
		}
	}
	over()
	removed(t, its)
}

// cgroups returns the IDs of the cgroups that descendants of a process are in.
func cgroups(pid int) (ids []string) {
	for _, pid := range harness.Descendants(pid) {
		text, _ := os.ReadFile(filepath.Join("/proc", itoa(pid), "cgroup")) // it may have exited
		for _, m := range regexp.MustCompile(`/sbxrun-([0-9a-f]{16})`).FindAllSubmatch(text, -1) {
			ids = append(ids, string(m[1]))
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// removed waits until cgroups are gone, by their IDs.
func removed(t *testing.T, ids []string) {
	t.Helper()
	harness.Until(t, harness.Bound, "the removal of cgroups", func() bool {
		ids = slices.DeleteFunc(ids, func(id string) bool { return len(harness.Cgroups(id)) == 0 })
		return len(ids) == 0
	})
}

// Two servers cannot share a socket or a state directory, and only the server's user reaches its socket.
func TestSocket(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	st, err := os.Stat(s.socket())
	check.That(t, err == nil && st.Mode().Perm() == 0o600, "%v %v", st.Mode(), err)
	other := harness.Dir(t)
	for _, test := range []struct{ word, socket, state string }{
		{"listen ", s.dir, other},
		{"state_dir ", other, s.dir},
	} {
		config := filepath.Join(other, "config.toml")
		check.Must(t, os.WriteFile(config, fmt.Appendf(nil, "listen = [%q]\nstate_dir = %q\n[rooms]\nmin = 0\nmax = 0\n", "unix:"+filepath.Join(test.socket, filepath.Base(s.socket())), filepath.Join(test.state, "state")), 0o600))
		out, code := fails(t, "--config", config)
		check.That(t, code == 125 && strings.Contains(out, test.word) && strings.Contains(out, "in use by another server"), "%d %s", code, out)
	}
	s.run(sh("true"))
}

// fails runs a server that should exit at once.
func fails(t *testing.T, flags ...string) (stderr string, code int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, harness.Binary(t), append([]string{"serve"}, flags...)...)
	out, _ := combined(cmd) // the test checks ProcessState
	return string(out), cmd.ProcessState.ExitCode()
}

func TestConfig(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	file := filepath.Join(dir, "c.toml")
	for _, test := range []struct{ config, word string }{
		{"", "no listening address"},
		{"listen = [\"tcp:127.0.0.1:0\"]", "token_file"},
		{"listen = [\"unix:relative\"]", "absolute"},
		{"listen = [\"udp:1\"]", "want unix"},
		{"listen = [\"tcp:8080\"]", "want unix:PATH, absolute and shorter than 108 bytes, or tcp:HOST:PORT"},
		{"listen = [\"unix:/a\"]\n[tenants.\"a b\"]\nqueue = 1", "tenants.a b: want the name of a token"},
		{"lisen = []", "unknown key lisen"},
		{"[call]\ntimeot = \"1s\"", ":2: unknown key call.timeot"},
		{"[call]\ntimeout = \"x\"\n", "c.toml:2"},
		{"listen = [", "c.toml:1"},
		{"listen = [\"unix:/a\"]\n[call]\ntimeout = \"10m\"", "max_timeout"},
		{"listen = [\"unix:/a\"]\n[sandbox]\nnetwork = \"all\"", "network"},
		{"listen = [\"unix:/a\"]\n[sandbox]\nmounts = [\"models\"]", "absolute paths"},
		{"listen = [\"unix:/a\"]\n[sandbox]\nmounts = [\"/usr\", \"/nosuch:/x\"]", `sandbox.mounts: "/nosuch" does not exist`},
		{"listen = [\"unix:/a\"]\n[overlays]\napp = \"/nosuch\"", `overlays.app: "/nosuch" does not exist`},
		{"listen = [\"unix:/a\"]\n[languages.x]\nfile = \"a/b\"", "languages.x"},
		{"listen = [\"unix:/a\"]\ntls_cert = \"x\"", "require each other"},
		{"listen = [\"unix:/a\"]\ntls_cert = \"/no/such\"\ntls_key = \"/no/key\"", "tls_cert /no/such, tls_key /no/key: open /no/such"},
		{"listen = [\"unix:/a\"]\ntoken_file = \"/no/such\"", "/no/such"},
	} {
		check.Must(t, os.WriteFile(file, []byte(test.config), 0o600))
		out, code := fails(t, "--check-config", "--config", file)
		check.That(t, code == 125 && strings.Contains(out, test.word), "%s: %d %s", test.config, code, out)
	}
	out, code := fails(t, "--check-config", "--listen", "unix:/tmp/x")
	check.That(t, code == 0 && strings.Contains(out, "configuration OK"), "%d %s", code, out)
	for flag, word := range map[string]string{"--config=/no/such": "no such file", "--listen=unix:/proc/x/y": "in a directory that this user can write to", "--listen=unix:" + dir: "is not a socket"} {
		out, code := fails(t, flag)
		check.That(t, code == 125 && strings.Contains(out, word) && strings.Count(out, "sbxrun: ") == 1, "%s: %d %s", flag, code, out)
	}
	_, err := os.Lstat(dir + ".lock")
	check.That(t, err != nil, "a lock is left beside what is not a socket")
	out, code = fails(t, "--listen", "unix:"+filepath.Join(dir, "no", "such", "socket"))
	check.That(t, code == 125 && strings.Contains(out, "no/such: no such file"), "%d %s", code, out)
	out, code = fails(t, "--nonsense")
	check.That(t, code == 125 && strings.Contains(out, "sbxrun serve --help"), "%d %s", code, out)
}

// sbxrun serve executes the sbxrund in its own directory, wherever else there is one.
func TestServerBeside(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	program := harness.ReadFile(t, harness.Binary(t))
	alone := filepath.Join(dir, "bin", "sbxrun")
	for name, text := range map[string][]byte{alone: program, filepath.Join(dir, "sbxrund"): []byte("#!/bin/sh\necho wrong\n")} {
		check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755))
		check.Must(t, os.WriteFile(name, text, 0o755))
	}
	refused := func(remedy string) {
		t.Helper()
		cmd := exec.Command("env", "PATH="+dir+":/usr/bin:/bin", alone, "serve", "--listen", "unix:/tmp/x")
		cmd.Dir = dir
		out, err := combined(cmd)
		check.That(t, cmd.ProcessState.ExitCode() == 125 && strings.Contains(string(out), filepath.Join(dir, "bin", "sbxrund")) && strings.Contains(string(out), remedy), "%v %s", err, out)
	}
	refused("; install sbxrund in the same directory as sbxrun")
	// In the source tree, as after ./setup.sh demo.
	check.Must(t, os.WriteFile(filepath.Join(dir, "setup.sh"), nil, 0o755))
	refused("; build it: " + filepath.Join(dir, "setup.sh") + " build")
}

// The server offers a language only if its command runs in a sandbox. A program that only the server's PATH
// has is not offered, unless tools is set.
func TestLanguagesThatWork(t *testing.T) {
	dir := harness.Dir(t)
	prefix := filepath.Join(dir, "prefix")
	check.Must(t, os.MkdirAll(filepath.Join(prefix, "bin"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(prefix, "bin", "own-sh"), []byte("#!/bin/sh\nexec sh \"$@\"\n"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(prefix, "bin", "broken-sh"), []byte("#!/bin/sh\nexec no-such-shell \"$@\"\n"), 0o755))
	t.Setenv("PATH", filepath.Join(prefix, "bin")+":"+os.Getenv("PATH"))
	languages := ""
	for _, name := range []string{"own", "broken"} {
		languages += fmt.Sprintf("[languages.%s]\ncommand = [\"%s-sh\", \"{file}\"]\nfile = \"main.sh\"\n", name, name)
	}
	for _, tools := range []bool{false, true} {
		s := serve(t, fmt.Sprintf("[sandbox]\ntools = %v\n%s", tools, languages))
		_, b := s.ask(http.MethodGet, "/v1/languages", nil)
		for name, want := range map[string]bool{"sh": true, "python": true, "own": tools, "broken": false} {
			got := strings.Contains(string(b), fmt.Sprintf(`"name":%q`, name))
			check.That(t, got == want, "tools %v: %s: %v, want %v: %s", tools, name, got, want, b)
		}
		if tools {
			s.answers(http.StatusOK, `"stdout":"42\n"`, http.MethodPost, "/v1/run", `{"language":"own","code":"echo $((6*7))"}`)
		}
	}
}

// A call with an idempotency key continues when its connection breaks, and a retry gets its result.
func TestKeyOutlivesConnection(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	session := s.session(`{}`)
	for path, key := range map[string]string{"/v1/run": "a", session + "/exec": "b"} {
		call := sh("echo begun >&2; sleep 4331; cat /proc/sys/kernel/random/uuid")
		s.begin(1, "sleep 4331", path, call, "Idempotency-Key", key)()
		s.release("sleep 4331")
		status, b := s.ask(http.MethodPost, path, call, "Idempotency-Key", key)
		var a api.Answer
		err := json.Unmarshal(b, &a)
		check.That(t, err == nil && status == http.StatusOK && a.Cause == "exited" && len(text(a.Stdout)) == 37, "%s: %d %s", path, status, b)
		_, again := s.ask(http.MethodPost, path, call, "Idempotency-Key", key)
		check.That(t, string(again) == string(b), "%s, and then %s", b, again)
	}
}

// A working directory that does not exist, or is not a directory, is a usage error in every kind of sandbox.
func TestWrongWorkdir(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	session := s.session(`{}`)
	for _, dir := range []string{"/no/such", "/etc/passwd"} {
		call := sh("true")
		call.Workdir = dir
		code := api.Call{Code: "1", Workdir: dir}
		for _, path := range []string{"/v1/run", session + "/exec"} {
			for _, body := range []api.Call{call, code} {
				status, e := s.refused(http.MethodPost, path, body)
				check.That(t, status == http.StatusBadRequest && e.Failure.Code == api.Usage && !e.Started && strings.Contains(e.Failure.Message, dir), "%s, %s: %d %+v", path, dir, status, e)
			}
		}
	}
}

// A null member is an absent one, and code without a language is Python.
func TestNullAndDefaults(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	status, b := s.ask(http.MethodPost, "/v1/run", `{"argv":null,"language":null,"code":"print(6*7)","stdin":null,"env":null,"workdir":null,"timeout_ms":null,"grace_ms":null,
		"limits":{"memory":null,"output":null},"files":[{"path":"a","path_base64":null,"text":"","id":null,"base64":null,"mode":null}],"collect":null,"overlay":null,"volumes":null,"network":null}`)
	check.That(t, status == http.StatusOK && strings.Contains(string(b), `"stdout":"42\n"`), "%d %s", status, b)
	path := s.session(`{"limits":null,"idle_timeout_ms":null,"files":null}`)
	s.answers(http.StatusOK, `"text":"42"`, http.MethodPost, path+"/code", `{"code":"6*7","language":null,"limits":null}`)
}

// A call cannot execute the server's own file through /proc/self/exe, with or without a warm room (CVE-2019-5736).
func TestSelfExe(t *testing.T) {
	t.Parallel()
	const refusal = "sbxrun: /proc/self/exe cannot be executed here"
	for config, room := range map[string]string{"[rooms]\nmax = 0\n": "", "[rooms]\nmin = 1\nmax = 1\n": "warm"} {
		s := serve(t, config)
		if room == "warm" {
			s.warm(1)
		}
		for _, argv := range [][]string{{"/proc/self/exe", "--version"}, {"/proc/self/exe"}} {
			a := s.run(api.Call{Argv: argv})
			check.That(t, a.ExitCode == 126 && text(a.Stdout) == "" && strings.Contains(text(a.Stderr), refusal),
				"room %q, %q: exit code %d, stdout %q, stderr %q", a.Room, argv, a.ExitCode, text(a.Stdout), text(a.Stderr))
		}
	}
}
