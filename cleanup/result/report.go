package result

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
)

// ReportVersion changes only when old readers would misread the report. New members do not change it, because
// readers ignore unknown members.
const ReportVersion = 1

// TimeFormat is the format of times, always in UTC. Formatted times sort chronologically.
const TimeFormat = "2006-01-02T15:04:05.000Z"

// Report is the document written by --report and --json. docs/reference/report.md explains its members.
type Report struct {
	Version   int            `json:"version"`
	ID        string         `json:"id"`
	Argv      []string       `json:"argv"`
	Started   bool           `json:"started"`
	Cause     Cause          `json:"cause"`
	Status    Status         `json:"status"`
	ExitCode  int            `json:"exit_code"`
	Payload   *ReportPayload `json:"payload,omitempty"`
	TimedOut  bool           `json:"timed_out"`
	StartedAt string         `json:"started_at"`
	Duration  float64        `json:"duration_ms"`
	Setup     *float64       `json:"setup_ms,omitempty"`
	TeardownT *float64       `json:"teardown_ms,omitempty"`
	Teardown  ReportTeardown `json:"teardown"`
	Usage     *ReportUsage   `json:"usage,omitempty"`
	Limits    []Limit        `json:"limits,omitempty"`
	Network   *ReportNetwork `json:"network,omitempty"`
	Copied    *ReportCopied  `json:"copied,omitempty"`
	Devices   []string       `json:"devices,omitempty"`
	Image     *ReportImage   `json:"image,omitempty"`

	Stdout          *string `json:"stdout,omitempty"`
	StdoutBase64    *string `json:"stdout_base64,omitempty"`
	StdoutBytes     *int64  `json:"stdout_bytes,omitempty"`
	StdoutTruncated *bool   `json:"stdout_truncated,omitempty"`
	Stderr          *string `json:"stderr,omitempty"`
	StderrBase64    *string `json:"stderr_base64,omitempty"`
	StderrBytes     *int64  `json:"stderr_bytes,omitempty"`
	StderrTruncated *bool   `json:"stderr_truncated,omitempty"`

	Changes *ReportChanges `json:"changes,omitempty"`

	Error *ReportError `json:"error,omitempty"`
	Bwrap *ReportBwrap `json:"bwrap,omitempty"`
}

// ReportPayload is the command's own end.
type ReportPayload struct {
	ExitCode *int    `json:"exit_code,omitempty"`
	Signal   *string `json:"signal,omitempty"`
}

// ReportTeardown is the proof of the teardown, or the evidence against it.
type ReportTeardown struct {
	Verdict   Verdict    `json:"verdict"`
	Strays    int        `json:"strays"`
	Survivors []Survivor `json:"survivors"`
}

// ReportUsage is the resource usage of the sandbox.
type ReportUsage struct {
	CPUUser   float64 `json:"cpu_user_ms"`
	CPUSystem float64 `json:"cpu_system_ms"`
	MaxRSS    int64   `json:"max_rss_bytes"`

	MemoryPeak int64 `json:"memory_peak_bytes,omitempty"`
	PidsPeak   int64 `json:"pids_peak,omitempty"`
}

// ReportChanges counts the changes in overlays.
type ReportChanges struct {
	Count int   `json:"count"`
	Bytes int64 `json:"bytes"`
}

// ReportError is an [Error].
type ReportError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// ReportImage is the image that was the root of the sandbox.
type ReportImage struct {
	Name     string `json:"name,omitempty"` // as given
	Digest   string `json:"digest"`
	Platform string `json:"platform"`
	Writable bool   `json:"writable"`
}

// ReportBwrap is the bubblewrap program that was used.
type ReportBwrap struct {
	Path    string `json:"path"`
	Version string `json:"version"`
}

// ReportNetwork is the use of a network with lists.
type ReportNetwork struct {
	Hosts      []ReportHost      `json:"hosts"`
	Published  []ReportPublished `json:"published,omitempty"`
	Incomplete bool              `json:"incomplete,omitempty"` // usage is not fully known
}

// ReportHost is the sandbox's use of a host.
type ReportHost struct {
	Host        string `json:"host"`
	Connections int64  `json:"connections"`
	Refused     int64  `json:"refused"`
	Sent        int64  `json:"sent_bytes"`
	Received    int64  `json:"received_bytes"`
	Reason      string `json:"reason,omitempty"` // of the last refusal
}

// ReportPublished is a host port that was forwarded to the sandbox.
type ReportPublished struct {
	Address string `json:"address"`
	Port    uint16 `json:"port"`
}

// ReportCopied counts the files copied by --put and --get.
type ReportCopied struct {
	Put ReportCarried `json:"put"`
	Got ReportCarried `json:"got"`
}

// ReportCarried counts copied files, directories and links.
type ReportCarried struct {
	Entries int64 `json:"entries"`
	Bytes   int64 `json:"bytes"`
	Links   int   `json:"links"` // symbolic links among the entries
	LeftOut int   `json:"left_out"`
}

// Stream is a captured stream: Text is the kept part, and UTF8 whether it is valid UTF-8.
type Stream struct {
	Text      string
	UTF8      bool
	Bytes     int64
	Truncated bool
}

// Report returns the report of a result.
func (r Result) Report(id string, argv []string) Report {
	rep := Report{
		Version:   ReportVersion,
		ID:        id,
		Argv:      argv,
		Started:   r.Started,
		Cause:     r.Cause,
		Status:    r.Status(),
		ExitCode:  r.ExitCode(),
		TimedOut:  r.Cause == Timeout || r.Cause == IdleTimeout,
		StartedAt: r.StartedAt.UTC().Format(TimeFormat),
		Duration:  Milliseconds(r.Duration),
		Teardown:  ReportTeardown{Verdict: r.Verdict, Strays: r.Strays, Survivors: r.Survivors},
		Limits:    r.Limits,
	}
	if rep.Argv == nil {
		rep.Argv = []string{}
	}
	if rep.Teardown.Survivors == nil {
		rep.Teardown.Survivors = []Survivor{}
	}
	if p := r.Payload; p != nil {
		rep.Payload = &ReportPayload{}
		if p.Signal != 0 {
			rep.Payload.Signal = new(SignalName(p.Signal))
		} else {
			rep.Payload.ExitCode = &p.ExitCode
		}
	}
	if r.Started {
		rep.Setup = new(Milliseconds(r.Setup))
	}
	if r.Verdict != NotApplicable {
		rep.TeardownT = new(Milliseconds(r.Teardown))
		rep.Usage = &ReportUsage{CPUUser: Milliseconds(r.CPUUser), CPUSystem: Milliseconds(r.CPUSystem), MaxRSS: r.MaxRSS, MemoryPeak: r.MemoryPeak, PidsPeak: r.PidsPeak}
	}
	if r.Err != nil {
		rep.Error = r.Err.Report()
	}
	return rep
}

// SetOutput adds the captured streams.
func (r *Report) SetOutput(stdout, stderr Stream) {
	r.Stdout, r.StdoutBase64 = stdout.members()
	r.Stderr, r.StderrBase64 = stderr.members()
	r.StdoutBytes, r.StdoutTruncated = &stdout.Bytes, &stdout.Truncated
	r.StderrBytes, r.StderrTruncated = &stderr.Bytes, &stderr.Truncated
}

func (s Stream) members() (text, encoded *string) {
	if s.UTF8 {
		return &s.Text, nil
	}
	// Encode piece by piece, because converting the whole text to bytes would copy it once more.
	var b strings.Builder
	b.Grow(base64.StdEncoding.EncodedLen(len(s.Text)))
	enc := base64.NewEncoder(base64.StdEncoding, &b)
	_, _ = io.Copy(enc, struct{ io.Reader }{strings.NewReader(s.Text)}) // a Builder never fails
	enc.Close()
	return nil, new(b.String())
}

// JSON returns the report as a line.
func (r Report) JSON() ([]byte, error) { return JSON(r) }

// JSON returns v as a line with a newline. Unlike json.Marshal it does not escape <, > and &, which only matters
// in HTML and makes the text harder to read.
func JSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return harmless(b.Bytes()), err
}

// harmless escapes DEL and the control characters U+0080 to U+009F, which package json does not escape and some
// terminals obey: file names and output come from commands.
func harmless(text []byte) []byte {
	var out []byte
	done := 0
	for i, c := range text {
		code, size := c, 1
		switch {
		case c == 0x7f:
		case c == 0xc2 && i+1 < len(text) && text[i+1] < 0xa0: // in valid UTF-8
			code, size = text[i+1], 2
		default:
			continue
		}
		out = fmt.Appendf(append(out, text[done:i]...), `\u%04x`, code)
		done = i + size
	}
	if done == 0 {
		return text
	}
	return append(out, text[done:]...)
}

// Milliseconds converts a time to the unit used in JSON, with a resolution of microseconds.
func Milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
