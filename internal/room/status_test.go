package room

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// bwrapStatus is the output of bubblewrap 0.8, with its line ends and spacing.
const bwrapStatus = `{
    "child-pid": 4711,
    "cgroup-namespace": 4026532501,
    "ipc-namespace": 4026532499,
    "mnt-namespace": 4026532497,
    "net-namespace": 4026532502,
    "pid-namespace": 4026532500,
    "uts-namespace": 4026532498
}
`

// told is the content of a status stream.
type told struct {
	PID   int
	PIDNS uint64
	Err   string
}

func tell(r io.Reader) told {
	pid, ns, err := readStatus(r)
	if err != nil {
		return told{Err: err.Error()}
	}
	return told{pid, ns, ""}
}

func TestStatus(t *testing.T) {
	const child = `{"child-pid":4711,"pid-namespace":4026532500}`
	known := told{PID: 4711, PIDNS: 4026532500}
	impossible := func(pid, ns int) told {
		return told{Err: fmt.Sprintf("bwrap's status names the impossible pid %d in PID namespace %d", pid, ns)}
	}
	tests := []struct {
		name, in string
		want     told
	}{
		{"real", bwrapStatus, known},
		{"no gaps", child, known},
		{"unknown members", `{"a":{"pid-namespace":7},"child-pid":4711,"b":"}{","pid-namespace":4026532500,"c":[]}`, known},
		{"blanks before it", strings.Repeat(" ", 1000) + "\n" + child, known},
		{"greatest pid", `{"child-pid":4194304,"pid-namespace":18446744073709551615}`, told{4194304, 18446744073709551615, ""}},

		{"nothing", "", told{Err: "EOF"}},
		{"blanks only", " \n\t ", told{Err: "EOF"}},
		{"cut", child[:30], told{Err: "EOF"}},
		{"pid 0", `{"child-pid":0,"pid-namespace":1}`, impossible(0, 1)},
		{"pid 1", `{"child-pid":1,"pid-namespace":1}`, impossible(1, 1)},
		{"pid -1", `{"child-pid":-1,"pid-namespace":1}`, impossible(-1, 1)},
		{"pid too great", `{"child-pid":4194305,"pid-namespace":1}`, impossible(4194305, 1)},
		{"pid that would wrap around", `{"child-pid":4294967298,"pid-namespace":1}`, impossible(4294967298, 1)},
		{"no pid", `{"child-pid":null,"pid-namespace":1}`, impossible(0, 1)},
		{"no namespace", `{"child-pid":4711}`, impossible(4711, 0)},
		{"namespace 0", `{"child-pid":4711,"pid-namespace":0}`, impossible(4711, 0)},
		{"namespace in another object", `{"child-pid":4711}{"pid-namespace":1}`, impossible(4711, 0)},
		{"endless blanks", strings.Repeat(" ", 2*maxStatus) + child, told{Err: "EOF"}},
		{"endless object", `{"x":"` + strings.Repeat("x", 2*maxStatus) + `"}` + child, told{Err: "EOF"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			check.NoDiff(t, cmp.Diff(tt.want, tell(strings.NewReader(tt.in))), "(-want +got)")
			check.NoDiff(t, cmp.Diff(tt.want, tell(iotest.OneByteReader(strings.NewReader(tt.in)))), "byte by byte (-want +got)")
		})
	}
}

func TestStatusGarbage(t *testing.T) {
	for _, in := range []string{"x", "}", "5", `"child-pid"`, "[]", "true", `{"child-pid":"4711","pid-namespace":1}`, `{"child-pid":4711.5,"pid-namespace":1}`,
		`{"child-pid":1e30,"pid-namespace":1}`, `{"child-pid":[4711],"pid-namespace":1}`, `{"child-pid":4711,"pid-namespace":-1}`, "\xff", "{\x00}"} {
		pid, _, err := readStatus(strings.NewReader(in + bwrapStatus))
		check.That(t, err != nil && !errors.Is(err, io.EOF), "%q: got %d, %v; want an error that is not the end", in, pid, err)
	}
}

// A read error is not taken for the end of the stream, because it may be the deadline.
func TestStatusReadError(t *testing.T) {
	_, _, err := readStatus(io.MultiReader(strings.NewReader(bwrapStatus[:20]), iotest.ErrReader(iotest.ErrTimeout)))
	check.That(t, errors.Is(err, iotest.ErrTimeout), "got %v, want %v", err, iotest.ErrTimeout)
}

// FuzzStatus checks that every accepted PID is valid.
func FuzzStatus(f *testing.F) {
	for _, seed := range []string{bwrapStatus, bwrapStatus[:30], `{"child-pid":1,"pid-namespace":1}`, `{"child-pid":2,"pid-namespace":1}{"exit-code":256}`, "[", `{"exit-code":0}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		pid, ns, err := readStatus(strings.NewReader(string(data)))
		check.That(t, err != nil || pid > 1 && pid <= 1<<22 && ns != 0, "pid %d in %d", pid, ns)
	})
}
