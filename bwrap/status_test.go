package bwrap

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bwrapStatus is what bubblewrap 0.8 writes, with its line ends and gaps.
const bwrapStatus = `{ "child-pid": 4711, "cgroup-namespace": 4026532501, "ipc-namespace": 4026532499, "mnt-namespace": 4026532497, "net-namespace": 4026532502, "pid-namespace": 4026532500, "uts-namespace": 4026532498 }
{ "exit-code": 42 }
`

// told is all that a status stream can say, in the order in which it is asked.
type told struct {
	PID   int
	PIDNS uint64
	Code  int
	Err   string // the first error
}

func tell(r io.Reader) (got told) {
	s := newStatusStream(r)
	child, err := s.child()
	if err == nil {
		got.PID, got.PIDNS = child.pid, child.pidNS
		got.Code, err = s.exitCode()
	}
	if err != nil {
		got.Err = err.Error()
	}
	return got
}

func TestStatusStream(t *testing.T) {
	const child = `{"child-pid":4711,"pid-namespace":4026532500}`
	known := func(err string) told { return told{PID: 4711, PIDNS: 4026532500, Err: err} }
	tests := []struct {
		name, in string
		want     told
	}{
		{"real", bwrapStatus, told{4711, 4026532500, 42, ""}},
		{"no gaps", child + `{"exit-code":0}`, told{4711, 4026532500, 0, ""}},
		{"unknown objects between", `{}{"x":[{"child-pid":1}]}` + child + `{"y":null}{"exit-code":255}`, told{4711, 4026532500, 255, ""}},
		{"unknown members", `{"a":{"pid-namespace":7},"child-pid":4711,"b":"}{","pid-namespace":4026532500,"c":[]}{"exit-code":1,"d":1e999}`,
			told{4711, 4026532500, 1, ""}},
		{"blanks after it", child + strings.Repeat(" ", 1000) + "\n" + `{"exit-code":137}`, told{4711, 4026532500, 137, ""}},
		{"null is not there", `{"child-pid":null}` + child + `{"exit-code":null}{"exit-code":7}`, told{4711, 4026532500, 7, ""}},
		{"greatest pid", `{"child-pid":4194304,"pid-namespace":18446744073709551615}`, told{4194304, 18446744073709551615, 0, "EOF"}},

		{"nothing", "", told{Err: "EOF"}},
		{"blanks only", " \n\t ", told{Err: "EOF"}},
		{"exit code without a child", `{"exit-code":1}`, told{Err: "EOF"}},
		{"child only", child, known("EOF")},
		{"cut", child[:30], told{Err: "EOF"}},
		{"cut later", child + `{"exit-code":13`, known("EOF")},
		{"pid 0", `{"child-pid":0,"pid-namespace":1}`, told{Err: "bwrap's status names the impossible pid 0"}},
		{"pid 1", `{"child-pid":1,"pid-namespace":1}`, told{Err: "bwrap's status names the impossible pid 1"}},
		{"pid -1", `{"child-pid":-1,"pid-namespace":1}`, told{Err: "bwrap's status names the impossible pid -1"}},
		{"pid too great", `{"child-pid":4194305,"pid-namespace":1}`, told{Err: "bwrap's status names the impossible pid 4194305"}},
		{"pid that would wrap around", `{"child-pid":4294967298,"pid-namespace":1}`, told{Err: "bwrap's status names the impossible pid 4294967298"}},
		{"no namespace", `{"child-pid":4711}`, told{Err: "bwrap's status names no PID namespace"}},
		{"namespace 0", `{"child-pid":4711,"pid-namespace":0}`, told{Err: "bwrap's status names no PID namespace"}},
		{"namespace in another object", `{"child-pid":4711}{"pid-namespace":1}`, told{Err: "bwrap's status names no PID namespace"}},
		{"exit code 256", child + `{"exit-code":256}`, known("bwrap's status names the impossible exit code 256")},
		{"exit code -1", child + `{"exit-code":-1}`, known("bwrap's status names the impossible exit code -1")},
		{"endless blanks", child + strings.Repeat(" ", 2*maxStatus) + `{"exit-code":0}`, known("EOF")},
		{"endless object", `{"x":"` + strings.Repeat("x", 2*maxStatus) + `"}` + child, told{Err: "EOF"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, tell(strings.NewReader(tt.in))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.want, tell(iotest.OneByteReader(strings.NewReader(tt.in)))); diff != "" {
				t.Errorf("byte by byte (-want +got):\n%s", diff)
			}
		})
	}
}

func TestStatusStreamGarbage(t *testing.T) {
	for _, in := range []string{"x", "}", "5", `"child-pid"`, "[]", "true", `{"child-pid":"4711","pid-namespace":1}`, `{"child-pid":4711.5,"pid-namespace":1}`,
		`{"child-pid":1e30,"pid-namespace":1}`, `{"child-pid":[4711],"pid-namespace":1}`, `{"child-pid":4711,"pid-namespace":-1}`, "\xff", "{\x00}"} {
		s := newStatusStream(strings.NewReader(in + bwrapStatus))
		if child, err := s.child(); err == nil || err == io.EOF {
			t.Errorf("%q: got %+v, %v; want an error that is not the end", in, child, err)
		}
	}
}

// Cut anywhere, or split anywhere between two writes, the stream tells what is
// whole and then ends; it never tells less or something else.
func TestStatusStreamSplit(t *testing.T) {
	first, second := strings.IndexByte(bwrapStatus, '}')+1, strings.LastIndexByte(bwrapStatus, '}')+1
	for i := range len(bwrapStatus) + 1 {
		want := told{4711, 4026532500, 42, ""}
		split := io.MultiReader(strings.NewReader(bwrapStatus[:i]), strings.NewReader(bwrapStatus[i:]))
		if diff := cmp.Diff(want, tell(split)); diff != "" {
			t.Errorf("split at %d (-want +got):\n%s", i, diff)
		}
		if i < first {
			want.PID, want.PIDNS = 0, 0
		}
		if i < second {
			want.Code, want.Err = 0, "EOF"
		}
		if diff := cmp.Diff(want, tell(strings.NewReader(bwrapStatus[:i]))); diff != "" {
			t.Errorf("cut at %d (-want +got):\n%s", i, diff)
		}
	}
}

// An error of reading is not taken for the end: it may be the deadline.
func TestStatusStreamReadError(t *testing.T) {
	s := newStatusStream(io.MultiReader(strings.NewReader(bwrapStatus[:20]), iotest.ErrReader(iotest.ErrTimeout)))
	if _, err := s.child(); !errors.Is(err, iotest.ErrTimeout) {
		t.Errorf("got %v, want %v", err, iotest.ErrTimeout)
	}
}

// FuzzStatusStream: whatever comes, a pid is one that may be opened, and an
// exit code is one.
func FuzzStatusStream(f *testing.F) {
	for _, seed := range []string{bwrapStatus, bwrapStatus[:30], `{"child-pid":1,"pid-namespace":1}`, `{"child-pid":2,"pid-namespace":1}{"exit-code":256}`, "[", `{"exit-code":0}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s := newStatusStream(strings.NewReader(string(data)))
		if child, err := s.child(); err == nil && (child.pid <= 1 || child.pid > 1<<22 || child.pidNS == 0) {
			t.Errorf("child %+v", child)
		}
		if code, err := s.exitCode(); err == nil && (code < 0 || code > 255) {
			t.Errorf("exit code %d", code)
		}
	})
}

// A payload that nobody has caught may run for longer than the setup was given.
func TestHearOutlastsSetup(t *testing.T) {
	ours, theirs, err := statusPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	defer theirs.Close()
	sb := &Sandbox{status: ours, stream: newStatusStream(ours)}
	if err := ours.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := theirs.WriteString(`{ "exit-code": 42 }`); err != nil {
		t.Fatal(err)
	}
	if sb.hear(); sb.fallback.code != 42 || sb.fallback.err != nil {
		t.Errorf("%+v", sb.fallback)
	}
}
