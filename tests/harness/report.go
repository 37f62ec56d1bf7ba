package harness

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

type Limit struct {
	Name      string  `json:"name"`
	Requested float64 `json:"requested"`
	Enforced  bool    `json:"enforced"`
	Mechanism string  `json:"mechanism"`
	Hit       bool    `json:"hit"`
	Reason    string  `json:"reason"`
}

// Report is the JSON report as a user would declare it, so that tests notice renamed members. A
// nil pointer is an absent member.
type Report struct {
	Version    int      `json:"version"`
	ID         string   `json:"id"`
	Argv       []string `json:"argv"`
	Started    bool     `json:"started"`
	Cause      string   `json:"cause"`
	Status     string   `json:"status"`
	ExitCode   int      `json:"exit_code"`
	Payload    *Payload `json:"payload"`
	TimedOut   bool     `json:"timed_out"`
	StartedAt  string   `json:"started_at"`
	DurationMS float64  `json:"duration_ms"`
	SetupMS    *float64 `json:"setup_ms"`
	TeardownMS *float64 `json:"teardown_ms"`
	Teardown   struct {
		Verdict   string `json:"verdict"`
		Strays    int    `json:"strays"`
		Survivors []struct {
			PID   int    `json:"pid"`
			Comm  string `json:"comm"`
			State string `json:"state"`
		} `json:"survivors"`
	} `json:"teardown"`
	Usage *struct {
		CPUUserMS   float64 `json:"cpu_user_ms"`
		CPUSystemMS float64 `json:"cpu_system_ms"`
		MaxRSSBytes int64   `json:"max_rss_bytes"`
		MemoryPeak  int64   `json:"memory_peak_bytes"`
		PidsPeak    int64   `json:"pids_peak"`
	} `json:"usage"`
	Limits  []Limit  `json:"limits"`
	Devices []string `json:"devices"`

	Network *struct {
		Hosts     []ReportHost `json:"hosts"`
		Published []struct {
			Address string `json:"address"`
			Port    int    `json:"port"`
		} `json:"published"`
		Incomplete bool `json:"incomplete"`
	} `json:"network"`

	Stdout          *string `json:"stdout"`
	StdoutBase64    []byte  `json:"stdout_base64"`
	StdoutBytes     *int64  `json:"stdout_bytes"`
	StdoutTruncated *bool   `json:"stdout_truncated"`
	Stderr          *string `json:"stderr"`
	StderrBase64    []byte  `json:"stderr_base64"`
	StderrBytes     *int64  `json:"stderr_bytes"`
	StderrTruncated *bool   `json:"stderr_truncated"`

	Error *struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Hint    string `json:"hint"`
	} `json:"error"`
	Bwrap *struct {
		Path    string `json:"path"`
		Version string `json:"version"`
	} `json:"bwrap"`

	raw []byte
}

// ReportHost is the use of one host.
type ReportHost struct {
	Host        string `json:"host"`
	Connections int64  `json:"connections"`
	Refused     int64  `json:"refused"`
	Sent        int64  `json:"sent_bytes"`
	Received    int64  `json:"received_bytes"`
	Reason      string `json:"reason"`
}

// Payload is how the command itself ended.
type Payload struct {
	ExitCode *int   `json:"exit_code"`
	Signal   string `json:"signal"`
}

// ParseReport parses one report: a JSON object on one line.
func ParseReport(data []byte) (*Report, error) {
	r := &Report{raw: data}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("report %.200q: %w", data, err)
	}
	if n := strings.Count(string(data), "\n"); n != 1 || data[len(data)-1] != '\n' {
		return nil, fmt.Errorf("report %.200q: not one line", data)
	}
	return r, nil
}

// Raw returns the JSON, nil without a report.
func (r *Report) Raw() []byte {
	if r == nil {
		return nil
	}
	return r.raw
}

// Value returns the member at a path such as payload.signal or argv.0 as JSON, a string without quotes, or "absent".
func (r *Report) Value(path string) string {
	var at any
	if err := json.Unmarshal(r.raw, &at); err != nil {
		return err.Error()
	}
	for _, name := range strings.Split(path, ".") {
		switch v := at.(type) {
		case map[string]any:
			next, ok := v[name]
			if !ok {
				return "absent"
			}
			at = next
		case []any:
			i, err := strconv.Atoi(name)
			if err != nil || i < 0 || i >= len(v) {
				return "absent"
			}
			at = v[i]
		default:
			return "absent"
		}
	}
	if s, ok := at.(string); ok {
		return s
	}
	b, _ := json.Marshal(at) // it was decoded from JSON
	return string(b)
}

// statusOf maps causes to the status that ps shows. That of exited depends on the code.
var statusOf = map[string]string{
	"signaled": "failed", "timeout": "killed", "killed": "killed",
	"canceled": "killed", "start-failed": "error", "lost": "error", "idle-timeout": "killed",
	"oom": "killed", "cpu-time": "killed", "output-limit": "killed", "fsize": "failed",
}

// check returns violations of the rules that hold for every report.
func (r *Report) check() (wrong []string) {
	expect := func(holds bool, format string, args ...any) {
		if !holds {
			wrong = append(wrong, fmt.Sprintf(format, args...))
		}
	}
	expect(r.Version == 1, "version is %d", r.Version)
	expect(r.ID != "", "there is no id")
	expect(r.Argv != nil, "there is no argv")
	expect(r.TimedOut == (r.Cause == "timeout"), "timed_out is %v with cause %q", r.TimedOut, r.Cause)
	for _, l := range r.Limits {
		expect(l.Name != "" && l.Enforced == (l.Mechanism != "") && l.Enforced == (l.Reason == "") && (l.Enforced || !l.Hit), "limit %+v", l)
	}
	status, known := statusOf[r.Cause]
	if r.Cause == "exited" {
		status, known = "failed", true
		if r.ExitCode == 0 || r.ExitCode == 74 && r.Error != nil && slices.Contains([]string{"get", "diff", "apply", "conflict", "left-out", "held-back", "volume"}, r.Error.Code) {
			status = "completed"
		}
	}
	expect(known, "the cause %q does not exist", r.Cause)
	if r.Teardown.Verdict != "unproven" {
		expect(r.Status == status, "status is %q with cause %q and exit code %d", r.Status, r.Cause, r.ExitCode)
		expect(len(r.Teardown.Survivors) == 0, "verdict %q, but survivors %v", r.Teardown.Verdict, r.Teardown.Survivors)
	}
	expect(r.Teardown.Survivors != nil, "survivors is not a list")
	expect(r.Started == (r.SetupMS != nil), "started is %v, but setup_ms: %v", r.Started, r.SetupMS != nil)
	if r.Cause == "start-failed" {
		expect(!r.Started && r.Error != nil, "start-failed with started %v and error %v", r.Started, r.Error)
		busy := r.Error != nil && r.Error.Code == "busy"
		expect(busy && r.ExitCode == 75 || r.Error != nil && r.Error.Code == "volume-busy" && r.ExitCode == 76 || !busy && r.ExitCode >= 125 && r.ExitCode <= 127, "start-failed with exit code %d", r.ExitCode)
	}
	if r.Started {
		expect(r.Teardown.Verdict != "not_applicable", "it was started, but there is nothing to prove")
		expect(r.TeardownMS != nil && r.Usage != nil, "it was started, but teardown_ms or usage is missing")
	}
	if p := r.Payload; p != nil {
		expect((p.ExitCode == nil) != (p.Signal == ""), "payload has both or none of exit_code and signal")
	}
	return wrong
}
