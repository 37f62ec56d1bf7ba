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

// Room is where an interpreter runs, such as a [slot.Slot].
type Room interface {
	// Start starts a command, which ends with ctx, and returns when it was executed.
	Start(ctx context.Context, c slot.Command) (slot.Running, error)
}

// Spec is an interpreter that is to be kept: where, which, and within which limits.
type Spec struct {
	Room     Room
	Language Language
	Limits   limits.Request // of the interpreter and all that it starts
}

// Cell is a piece of code, and what it may take.
type Cell struct {
	Code    string
	Timeout time.Duration // from its beginning, a start of the interpreter included; 0 for none
	// MaxOutput is how many bytes are kept of stdout, and of stderr: the beginning and the
	// end. 0 for 1 MiB. More does not end the cell.
	MaxOutput int64
	// Begun, if not nil, is called when the interpreter runs that gets the code.
	Begun func()
}

const maxOutput = 1 << 20

// MaxResults is how many bytes the results of a cell may have, as the driver sends them. What is beyond is
// left out.
const MaxResults = 8 << 20

// State is what has become of all that the cells have defined.
type State string

const (
	Kept State = "kept" // the next cell finds it
	Lost State = "lost" // the interpreter is gone, and all that it had started; the next cell has a new one
)

// Done is the cause of a cell whose end the driver has told in time: at the end of its code,
// or by an exception. All other causes are those of a command.
const Done result.Cause = "done"

// Answer is what has become of a cell.
type Answer struct {
	// Cause is what ended the cell: [Done]; "timeout" or "canceled"; or what ended its
	// interpreter: "exited", "signaled", "oom", "killed" and so on. "lost" is one that has
	// closed or flooded the driver's socket, and was ended for that.
	Cause  result.Cause
	State  State
	Number int // of the cell in its interpreter; 1 begins without anything defined

	Stdout, Stderr result.Stream
	// Dropped is how many bytes came between the last cell and this one, from threads and
	// background processes. They belong to no cell, and are not kept.
	Dropped int64

	Results   []Result
	Truncated bool       // results were left out
	Error     *Exception // nil if the code has raised none

	Duration time.Duration
	// Ended is how the interpreter has ended, if the state is lost: its exit code or signal,
	// its use of resources, and the verdict of the proof.
	Ended *result.Result
	// Earlier is how the interpreter before this one has ended, if it did between two cells.
	Earlier *result.Result
}

// Result is a value in all the media that it can be shown as, the plain text first.
type Result struct {
	Kind      string `json:"kind"` // "value" of the last expression, "display", or "figure"
	Media     media  `json:"media"`
	Truncated bool   `json:"truncated,omitempty"` // it was too long: a part of its text is there
}

// Medium is one of them. Text is for types that are text, Base64 has the bytes of all others.
type Medium struct {
	Type   string `json:"type"`
	Text   string `json:"text,omitempty"`
	Base64 []byte `json:"base64,omitempty"`
}

// Exception is why a cell has failed, as its language words it.
type Exception struct {
	Name      string `json:"name"`
	Message   string `json:"message"`
	Traceback string `json:"traceback"`
}

// New makes a Kernel, whose interpreter is started with the first cell. The caller closes it.
func New(spec Spec) *Kernel {
	k := &Kernel{spec: spec}
	k.ctx, k.end = context.WithCancel(context.Background())
	return k
}
