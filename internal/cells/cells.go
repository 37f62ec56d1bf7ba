// Package cells keeps interpreters: a [Kernel] runs pieces of code, the cells, one after the
// other in one process that stays, so that a cell finds what those before it have defined.
//
//	server
//	└─ keeper ─ init ─ interpreter   a command in a room like any other (package place)
//	                   └─ driver     ours, in the same process: reads cells, writes answers
//
// The driver is Go's only partner and its least trusted one, because the cells run in its
// process and can do all that it can. So three things never depend on it:
//
//   - When a cell is over. Go reads one end line that bears the cell's token, or keeps the
//     deadline: SIGINT to the interpreter alone, one second, then the command is ended, with
//     everything it has started, as every command is.
//   - What was printed. 1 and 2 are pipes of the program's own. What is in them when the end
//     has come belongs to the cell, and what comes between two cells to none.
//   - How much there is. Output and results are bounded here.
//
// A cell can read its token in the driver's memory, and write what it likes to the driver's
// socket. What it gains is a lie about itself, or about later cells of the same interpreter,
// whose memory it can change as well. No other interpreter, and nothing of the server, is in
// reach: what is read is data of a bounded size. The token is for accidents: output that looks
// like an answer, a fork that goes on, a cell that was given up.
//
// The socket is the command's descriptor 0 and moved to 3 by a shell that then executes the
// interpreter, whose own 0 is /dev/null. The driver's code comes by the socket, too.
package cells

import (
	"context"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/slot"
)

// Room is the place for an interpreter, such as a [slot.Slot].
type Room interface {
	// Start starts a command, which ends with ctx, and returns after its exec.
	Start(ctx context.Context, c slot.Command) (slot.Running, error)
}

// Spec describes an interpreter for cells.
type Spec struct {
	Room     Room
	Language Language
	Limits   limits.Request // of the interpreter and everything it starts
}

// Cell is a piece of code with its limits.
type Cell struct {
	Code    string
	Timeout time.Duration // includes the start of the interpreter; 0 for none
	// MaxOutput is how many bytes of stdout, and of stderr, are kept: the beginning and the end. 0 means 1
	// MiB. More output does not end the cell.
	MaxOutput int64
	// Begun, if not nil, is called when the interpreter that gets the code is running.
	Begun func()
}

const maxOutput = 1 << 20

// MaxResults limits the results of a cell, in bytes as the driver sends them. The rest is dropped.
const MaxResults = 8 << 20

// State tells whether the definitions of previous cells still exist.
type State string

const (
	Kept State = "kept" // they exist
	Lost State = "lost" // the interpreter has ended; the next cell gets a new one
)

// Done is the cause of a cell whose end the driver reported in time: it finished or raised an exception. The
// other causes are those of a command.
const Done result.Cause = "done"

// Answer is the outcome of a cell.
type Answer struct {
	// Cause is [Done], "timeout", "canceled", or what ended the interpreter: "exited", "signaled", "oom",
	// "killed" and so on. "lost" means that the interpreter closed or flooded the driver's socket and was
	// ended for that.
	Cause  result.Cause
	State  State
	Number int // of the cell in its interpreter; 1 starts with no definitions

	Stdout, Stderr result.Stream
	// Dropped is the number of bytes written between two cells, by threads and background processes. They are
	// not kept.
	Dropped int64

	Results   []Result
	Truncated bool       // results were dropped
	Error     *Exception // nil if the code raised none

	Duration time.Duration
	// Ended is the interpreter's result if the state is lost.
	Ended *result.Result
	// Earlier is the result of the previous interpreter if it ended between two cells.
	Earlier *result.Result
}

// Result is a value in all available media types, plain text first.
type Result struct {
	Kind      string `json:"kind"` // "value" of the last expression, "display", or "figure"
	Media     media  `json:"media"`
	Truncated bool   `json:"truncated,omitempty"` // too long; only part of its text is included
}

// Medium is one form of a result: Text for text types, Base64 for all others.
type Medium struct {
	Type   string `json:"type"`
	Text   string `json:"text,omitempty"`
	Base64 []byte `json:"base64,omitempty"`
}

// Exception is the error of a cell, in the words of its language.
type Exception struct {
	Name      string `json:"name"`
	Message   string `json:"message"`
	Traceback string `json:"traceback"`
}

// New returns a Kernel. Its interpreter starts with the first cell. The caller closes it.
func New(spec Spec) *Kernel {
	k := &Kernel{spec: spec}
	k.ctx, k.end = context.WithCancel(context.Background())
	return k
}
