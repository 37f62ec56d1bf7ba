package api

import "github.com/sbxrun/sbxrun/cleanup/result"

// Cell is a piece of code for an interpreter that keeps its state between cells.
type Cell struct {
	Language  string     `json:"language,omitempty" maxLength:"64" doc:"A language of /v1/languages with cells; default: python"`
	Code      string     `json:"code"`
	TimeoutMS float64    `json:"timeout_ms,omitempty" minimum:"0" doc:"Time limit after which the cell is interrupted; 0 for the server's default. One second later the interpreter is killed. Reduced like that of a call."`
	Limits    CellLimits `json:"limits,omitempty"`
	Files     []FileIn   `json:"files,omitempty" maxItems:"1024" doc:"Files to write to the workspace first"`
	Collect   []string   `json:"collect,omitempty" maxItems:"64" doc:"As for a call"`
}

// CellLimits are the limits of a cell; those of its interpreter limit everything else.
type CellLimits struct {
	MaxOutput int64 `json:"max_output,omitempty" minimum:"1" doc:"Bytes kept of stdout and of stderr each: the beginning and the end"`
}

// CellAnswer is the outcome of a cell. Members with the names of a report's have the same meaning.
type CellAnswer struct {
	ID        string       `json:"id"`
	Cause     result.Cause `json:"cause" doc:"done if the code finished or raised an exception, timeout, canceled, or what ended the interpreter"`
	State     string       `json:"state" enum:"kept,lost" doc:"lost: all definitions are gone, and the next cell gets a new interpreter"`
	Number    int          `json:"number" doc:"Number of the cell in its interpreter, from 1"`
	TimedOut  bool         `json:"timed_out"`
	StartedAt string       `json:"started_at"`
	Duration  float64      `json:"duration_ms"`

	Results          []CellResult `json:"results" doc:"Value of the last expression, arguments of display, and figures"`
	ResultsTruncated bool         `json:"results_truncated" doc:"Whether results were dropped"`
	Exception        *Exception   `json:"exception,omitempty" doc:"Exception raised by the code"`

	Stdout          *string `json:"stdout,omitempty"`
	StdoutBase64    *string `json:"stdout_base64,omitempty"`
	StdoutBytes     *int64  `json:"stdout_bytes"`
	StdoutTruncated *bool   `json:"stdout_truncated"`
	Stderr          *string `json:"stderr,omitempty"`
	StderrBase64    *string `json:"stderr_base64,omitempty"`
	StderrBytes     *int64  `json:"stderr_bytes"`
	StderrTruncated *bool   `json:"stderr_truncated"`
	DroppedBytes    int64   `json:"dropped_bytes" doc:"Bytes written between the previous cell and this one"`

	Interpreter *result.Report `json:"interpreter,omitempty" doc:"Report of the interpreter, if the state is lost"`
	Earlier     *result.Report `json:"earlier,omitempty" doc:"Report of the previous interpreter, if it ended between two cells"`

	Files     []FileOut `json:"files,omitempty"`
	Unmatched []string  `json:"unmatched,omitempty" doc:"Patterns of collect that matched no file"`
	QueueMS   float64   `json:"queue_ms" doc:"Time in the queue"`
	TimeoutMS float64   `json:"timeout_ms" doc:"Effective timeout"`
	Clamped   []string  `json:"clamped,omitempty" doc:"Request members that were reduced to the server's maximum"`
	RequestID string    `json:"request_id,omitempty"`
}

// CellResult is a value in all available media types, plain text first.
type CellResult struct {
	Kind      string   `json:"kind" enum:"value,display,figure"`
	Media     []Medium `json:"media"`
	Truncated bool     `json:"truncated,omitempty" doc:"Too long; only part of its text is included"`
}

// Medium is one form of a result: text, or anything else in the content store.
type Medium struct {
	MediaType string  `json:"media_type"`
	Text      *string `json:"text,omitempty"`
	ID        string  `json:"id,omitempty" doc:"ID in the content store"`
	Size      int64   `json:"size"`
	Error     string  `json:"error,omitempty" doc:"Reason if it was not stored"`
}

// Exception is the error of a cell, in the words of its language.
type Exception struct {
	Name      string `json:"name"`
	Message   string `json:"message"`
	Traceback string `json:"traceback"`
}
