// Package cells runs pieces of code, the cells, one after another in one interpreter. A [Kernel]
// keeps the interpreter, so a cell can use the definitions of earlier ones.
//
//	server
//	└─ shim ─ init ─ interpreter   an ordinary command in a slot (package slot)
//	                 └─ driver     in the same process: reads cells, writes answers
//
// The driver is not trusted, because cells run in its process. Three things do not depend on it:
//
//   - The end of a cell. Go reads one end line with the cell's token, or enforces the deadline:
//     SIGINT to the interpreter, one second, then the command ends with all its processes.
//   - The output. Descriptors 1 and 2 are pipes of the program. Their content at the end belongs
//     to the cell, and later output, until the next cell, to none.
//   - Sizes. Go limits output and results.
//
// A cell can read its token from the driver's memory and write to the driver's socket. It can only
// forge its own results, or those of later cells in the same interpreter, whose memory it can change
// anyway. It cannot reach other interpreters or the server, which reads data of a limited size. The
// token protects against accidents: output that looks like an answer, a child process that returns
// from the cell, an abandoned cell.
//
// The socket is the command's descriptor 0. A shell moves it to 3, sets 0 to /dev/null, and execs
// the interpreter. The driver's code also arrives through the socket.
package cells

import (
	"context"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/slot"
)

// Room is where an interpreter runs, such as a [slot.Slot].
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
	Number int // number in its interpreter; cell 1 starts with no definitions

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
