package result

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// moment is 2026-03-01 12:00:00.123456789 at UTC+1.
var moment = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.FixedZone("", 3600))

func TestReport(t *testing.T) {
	tests := []struct {
		name   string
		in     Result
		argv   []string
		change func(*Report)
		want   string // on one line, without the line breaks
	}{
		{
			name: "everything",
			in: Result{
				Started: true, Cause: Exited, Payload: &Payload{ExitCode: 3},
				StartedAt: moment, Duration: 1234567 * time.Microsecond, Setup: 3500 * time.Microsecond, Teardown: 999 * time.Nanosecond,
				Verdict: Proven, Strays: 2, CPUUser: 2 * time.Second, CPUSystem: 1500 * time.Nanosecond, MaxRSS: 1 << 40,
			},
			argv: []string{"sh", "-c", "a\nb", ""},
			change: func(r *Report) {
				r.SetOutput(Stream{Text: "ä\n", UTF8: true, Bytes: 3}, Stream{Text: "\xff\x00", Bytes: 1 << 33, Truncated: true})
				r.Bwrap = &ReportBwrap{Path: "/usr/bin/bwrap", Version: "0.8.0"}
			},
			want: `{"version":1,"id":"ID","argv":["sh","-c","a\nb",""],"started":true,"cause":"exited","status":"failed","exit_code":3,
"payload":{"exit_code":3},"timed_out":false,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":1234.567,
"setup_ms":3.5,"teardown_ms":0,"teardown":{"verdict":"proven","strays":2,"survivors":[]},
"usage":{"cpu_user_ms":2000,"cpu_system_ms":0.001,"max_rss_bytes":1099511627776},
"stdout":"ä\n","stdout_bytes":3,"stdout_truncated":false,"stderr_base64":"/wA=","stderr_bytes":8589934592,"stderr_truncated":true,
"bwrap":{"path":"/usr/bin/bwrap","version":"0.8.0"}}`,
		},
		{
			name: "exit 0 is there",
			in:   Result{Started: true, Cause: Exited, Payload: &Payload{}, StartedAt: moment, Verdict: Proven},
			argv: []string{"true"},
			want: `{"version":1,"id":"ID","argv":["true"],"started":true,"cause":"exited","status":"completed","exit_code":0,
"payload":{"exit_code":0},"timed_out":false,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":0,
"setup_ms":0,"teardown_ms":0,"teardown":{"verdict":"proven","strays":0,"survivors":[]},
"usage":{"cpu_user_ms":0,"cpu_system_ms":0,"max_rss_bytes":0}}`,
		},
		{
			name: "died of a signal",
			in:   Result{Started: true, Cause: Signaled, Payload: &Payload{Signal: unix.SIGSEGV}, StartedAt: moment, Verdict: Proven},
			argv: []string{"x"},
			want: `{"version":1,"id":"ID","argv":["x"],"started":true,"cause":"signaled","status":"failed","exit_code":139,
"payload":{"signal":"SEGV"},"timed_out":false,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":0,
"setup_ms":0,"teardown_ms":0,"teardown":{"verdict":"proven","strays":0,"survivors":[]},
"usage":{"cpu_user_ms":0,"cpu_system_ms":0,"max_rss_bytes":0}}`,
		},
		{
			name: "timeout, unproven",
			in: Result{Started: true, Cause: Timeout, StartedAt: moment, Verdict: Unproven,
				Survivors: []Survivor{{PID: 42, Comm: "a\n\"", State: "D"}},
				Err:       &Error{Code: "unproven", Message: "still there", Err: unix.ETIMEDOUT, ExitCode: 1}},
			argv: []string{"x"},
			want: `{"version":1,"id":"ID","argv":["x"],"started":true,"cause":"timeout","status":"killed","exit_code":123,
"timed_out":true,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":0,
"setup_ms":0,"teardown_ms":0,"teardown":{"verdict":"unproven","strays":0,"survivors":[{"pid":42,"comm":"a\n\"","state":"D"}]},
"usage":{"cpu_user_ms":0,"cpu_system_ms":0,"max_rss_bytes":0},
"error":{"code":"unproven","message":"still there"}}`,
		},
		{
			name: "not started",
			in: Result{Cause: StartFailed, StartedAt: moment, Duration: time.Millisecond, Verdict: NotApplicable,
				Err: &Error{Code: "not-found", ExitCode: ExitNotFound, Message: "no", Hint: "try"}},
			want: `{"version":1,"id":"ID","argv":[],"started":false,"cause":"start-failed","status":"error","exit_code":127,
"timed_out":false,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":1,
"teardown":{"verdict":"not_applicable","strays":0,"survivors":[]},
"error":{"code":"not-found","message":"no","hint":"try"}}`,
		},
		{
			name: "canceled before the release",
			in:   Result{Cause: Canceled, Signal: unix.SIGTERM, StartedAt: moment, Verdict: Proven},
			argv: []string{"x"},
			want: `{"version":1,"id":"ID","argv":["x"],"started":false,"cause":"canceled","status":"killed","exit_code":143,
"timed_out":false,"started_at":"2026-03-01T11:00:00.123Z","duration_ms":0,
"teardown_ms":0,"teardown":{"verdict":"proven","strays":0,"survivors":[]},
"usage":{"cpu_user_ms":0,"cpu_system_ms":0,"max_rss_bytes":0}}`,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			rep := tt.in.Report("ID", tt.argv)
			if tt.change != nil {
				tt.change(&rep)
			}
			got, err := rep.JSON()
			check.Must(t, err)
			check.That(t, bytes.Count(got, []byte("\n")) == 1 && got[len(got)-1] == '\n', "not one line: %q", got)
			check.NoDiff(t, cmp.Diff(lines(strings.ReplaceAll(tt.want, "\n", "")), lines(strings.TrimSpace(string(got)))), "(-want +got)")
		})
	}
}

// lines breaks a JSON text before every member, for a readable difference.
func lines(text string) []string { return strings.SplitAfter(text, ",") }

// A stream is in one of two members, and can be restored byte by byte.
func TestSetOutput(t *testing.T) {
	tests := []struct {
		name string
		in   Stream
	}{
		{"empty", Stream{UTF8: true}},
		{"text", Stream{Text: "a<b>&\u2028\x1b[2J\x00\\\"\n", UTF8: true, Bytes: 14}},
		{"the replacement character itself", Stream{Text: "\ufffd", UTF8: true, Bytes: 3}},
		{"not UTF-8", Stream{Text: "a\xffb", Bytes: 3}},
		{"every byte", Stream{Text: allBytes(), Bytes: 256, Truncated: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var rep Report
			rep.SetOutput(tt.in, Stream{UTF8: true, Text: "other", Bytes: 5})
			text, err := rep.JSON()
			check.Must(t, err)
			var got struct {
				Stdout    *string `json:"stdout"`
				Base64    *string `json:"stdout_base64"`
				Bytes     int64   `json:"stdout_bytes"`
				Truncated bool    `json:"stdout_truncated"`
				Stderr    string  `json:"stderr"`
			}
			check.Must(t, json.Unmarshal(text, &got))
			check.Require(t, (got.Stdout != nil) != (got.Base64 != nil) && got.Stderr == "other", "not one of stdout and stdout_base64, or not its own stderr: %s", text)
			back := Stream{UTF8: got.Stdout != nil, Bytes: got.Bytes, Truncated: got.Truncated}
			if got.Stdout != nil {
				back.Text = *got.Stdout
			} else if b, err := base64.StdEncoding.DecodeString(*got.Base64); err == nil {
				back.Text = string(b)
			}
			check.NoDiff(t, cmp.Diff(tt.in, back), "(-want +got)")
		})
	}
}

func allBytes() string {
	b := make([]byte, 256)
	for i := range b {
		b[i] = byte(i)
	}
	return string(b)
}

func TestJSONHarmless(t *testing.T) {
	const text = "a\x7f\u009b31m\u0080\u009f\u00a0é\x1b\ufffdz"
	b, err := JSON(text)
	want := `"a\u007f\u009b31m\u0080\u009f` + "\u00a0é" + `\u001b` + "\ufffdz\"\n"
	check.That(t, err == nil && string(b) == want, "%v, got %q, want %q", err, b, want)
	var back string
	err = json.Unmarshal(b, &back)
	check.That(t, err == nil && back == text, "%v, back %q", err, back)
}
