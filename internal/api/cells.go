package api

import "github.com/sbxrun/sbxrun/cleanup/result"

// Cell is a piece of code for an interpreter that keeps its state between cells.
type Cell struct {
	Language  string     `json:"language" minLength:"1" maxLength:"64" doc:"One of /v1/languages that has cells"`
	Code      string     `json:"code"`
	TimeoutMS float64    `json:"timeout_ms,omitempty" minimum:"0" doc:"Time from when the interpreter receives the code until it is interrupted; 0 for the server's default. One second later the interpreter is killed. Reduced like that of a call."`
	Limits    CellLimits `json:"limits,omitempty"`
	Files     []FileIn   `json:"files,omitempty" maxItems:"1024" doc:"Files in the workspace when it begins"`
	Collect   []string   `json:"collect,omitempty" maxItems:"64" doc:"As of a call"`
}

// CellLimits are the limits of a cell; those of its interpreter limit everything else.
type CellLimits struct {
	MaxOutput int64 `json:"max_output,omitempty" minimum:"1" doc:"Bytes kept of stdout, and of stderr: the beginning and the end"`
}

// CellAnswer is the outcome of a cell. Members with the names of a report's have the same meaning.
type CellAnswer struct {
	ID        string       `json:"id"`
	Cause     result.Cause `json:"cause" doc:"done: the code finished or raised an exception; timeout, canceled; or what ended the interpreter"`
	State     string       `json:"state" enum:"kept,lost" doc:"lost: everything that cells defined is gone, and the next cell gets a new interpreter"`
	Number    int          `json:"number" doc:"Number of the cell in its interpreter; 1 begins with nothing defined"`
	TimedOut  bool         `json:"timed_out"`
	StartedAt string       `json:"started_at"`
	Duration  float64      `json:"duration_ms"`

	Results          []CellResult `json:"results" doc:"The value of the last expression, arguments of display, and figures"`
	ResultsTruncated bool         `json:"results_truncated" doc:"There were more"`
	Exception        *Exception   `json:"exception,omitempty" doc:"That the code has raised"`

	Stdout          *string `json:"stdout,omitempty"`
	StdoutBase64    *string `json:"stdout_base64,omitempty"`
	StdoutBytes     *int64  `json:"stdout_bytes"`
	StdoutTruncated *bool   `json:"stdout_truncated"`
	Stderr          *string `json:"stderr,omitempty"`
	StderrBase64    *string `json:"stderr_base64,omitempty"`
	StderrBytes     *int64  `json:"stderr_bytes"`
	StderrTruncated *bool   `json:"stderr_truncated"`
	DroppedBytes    int64   `json:"dropped_bytes" doc:"Bytes of output between the last cell and this one"`

	Interpreter *result.Report `json:"interpreter,omitempty" doc:"How the interpreter ended, if the state is lost"`
	Earlier     *result.Report `json:"earlier,omitempty" doc:"How the previous interpreter ended, if that was between two cells"`

	Files     []FileOut `json:"files,omitempty"`
	QueueMS   float64   `json:"queue_ms" doc:"Time spent waiting for its turn"`
	TimeoutMS float64   `json:"timeout_ms" doc:"The timeout that was in force"`
	Clamped   []string  `json:"clamped,omitempty" doc:"Members of the request that were reduced to the server's maximum"`
	RequestID string    `json:"request_id,omitempty"`
}

// CellResult is a value in all available media types, plain text first.
type CellResult struct {
	Kind      string   `json:"kind" enum:"value,display,figure"`
	Media     []Medium `json:"media"`
	Truncated bool     `json:"truncated,omitempty" doc:"It was too long, and only part of its text is included"`
}

// Medium is one form of a result: text, or anything else in the content store.
type Medium struct {
	MediaType string  `json:"media_type"`
	Text      *string `json:"text,omitempty"`
	ID        string  `json:"id,omitempty" doc:"In the content store"`
	Size      int64   `json:"size"`
	Error     string  `json:"error,omitempty" doc:"Why it was not kept"`
}

// Exception is the error of a cell, in the words of its language.
type Exception struct {
	Name      string `json:"name"`
	Message   string `json:"message"`
	Traceback string `json:"traceback"`
}
