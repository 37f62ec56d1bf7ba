// Package entry checks the limits on address space (RLIMIT_AS, ulimit -v) and data (RLIMIT_DATA,
// ulimit -d) before the Go runtime starts.
//
// The runtime reserves 1.2 GiB in pieces and allocates 42 MiB. If it does not get a piece, it prints a
// stack trace and exits with 2, before any code of the program runs. So the program's entry point is a
// few instructions here, which print an error and exit with 125 instead, or continue at the runtime's
// own entry point. The linker takes the entry point from its flag -E (internal/setup/build.sh). A program
// that was built without the flag, by go install for example, still has Go's stack trace.
package entry

//lint:file-ignore U1000 the assembly uses all of these

// The limits below which the program does not start. The runtime starts at 1.25 GiB and 56 MiB; the rest
// is for the heap and for the memory that keepers share.
const (
	minSpace = 1536 << 20
	minData  = 96 << 20
)

const exitCode = 125 // result.ExitNotStarted

var refusal = "sbxrun: error: the limit on address space (ulimit -v) is below 1536 MiB or that on data (ulimit -d) below 96 MiB, which sbxrun itself needs; raise it, and limit the command with --memory\n"
