package stream

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

var errTest = errors.New("test")

// reopen opens the file again, as another process would.
func reopen(t *testing.T, f *os.File) *os.File {
	t.Helper()
	r, err := os.Open(f.Name())
	check.Must(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

// receive returns the next value, or fails the test after 20 seconds.
func receive[T any](t *testing.T, c <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(20 * time.Second):
		t.Fatalf("timeout while waiting for %s", what)
	}
	return v
}

// hand returns an Emit that sends to c.
func hand(c chan<- string) func([]byte) error {
	return func(p []byte) error { c <- string(p); return nil }
}

// start runs Follow in the background until the test ends.
func start(t *testing.T, ctx context.Context, ended <-chan struct{}, streams ...LogFile) <-chan error {
	ctx, cancel := context.WithCancel(ctx)
	result, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		result <- Follow(ctx, ended, streams...)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return result
}

// The test writes each line after the follower has emitted the one before. If the follower
// missed a write, nothing would wake it again, and the test would time out.
func TestFollowAtOnce(t *testing.T) {
	f := create(t)
	ended, lines := make(chan struct{}), make(chan string, 1)
	result := start(t, t.Context(), ended, LogFile{reopen(t, f), hand(lines)})
	for i := range 3000 {
		line := fmt.Sprintf("line %d\n", i)
		write(t, f, line)
		got := receive(t, lines, line)
		check.Require(t, got == line, "got %q, want %q", got, line)
	}
	close(ended)
	err := receive(t, result, "the end")
	check.That(t, err == nil && len(lines) == 0, "%v, %d more lines", err, len(lines))
}

// A follower neither misses nor repeats output written while it starts.
func TestFollowStart(t *testing.T) {
	for i := range 40 {
		f := create(t)
		lines := make(chan string, 1)
		go func() { // at a random point of the start, which takes about 0.1 ms
			for begin := time.Now(); time.Since(begin) < time.Duration(i)*5*time.Microsecond; {
			}
			f.WriteString(binary)
		}()
		start(t, t.Context(), nil, LogFile{reopen(t, f), hand(lines)})
		check.Equal(t, receive(t, lines, "a line"), binary)
	}
}

// Follow delivers everything when no inotify instance is available.
func TestFollowWithoutInotify(t *testing.T) {
	f := create(t)
	write(t, f, "history\n")
	r := reopen(t, f)
	lines := make(chan string, 1)

	var old unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: old.Max}))
	_, _, err := watch([]LogFile{{File: r}})
	ended := make(chan struct{})
	result := start(t, t.Context(), ended, LogFile{r, hand(lines)})
	first := receive(t, lines, "history") // so watch has failed
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))

	check.That(t, errors.Is(err, unix.EMFILE), "watch: %v; want EMFILE", err)
	write(t, f, "more\n")
	more := receive(t, lines, "more")
	check.That(t, first == "history\n" && more == "more\n", "got %q and %q", first, more)
	close(ended)
	check.OK(t, receive(t, result, "the end"))
}

// Follow continues when the file is removed.
func TestFollowRemoved(t *testing.T) {
	f := create(t)
	r := reopen(t, f)
	check.Must(t, os.Remove(f.Name()))
	lines := make(chan string, 1)
	start(t, t.Context(), nil, LogFile{r, hand(lines)})
	write(t, f, binary)
	check.Equal(t, receive(t, lines, "a line"), binary)
}

// Follow reads all streams in turns when they have ended already.
func TestFollowEnded(t *testing.T) {
	a, b := create(t), create(t)
	write(t, a, strings.Repeat("a", 2*chunk+1))
	write(t, b, strings.Repeat("b", chunk))
	ended := make(chan struct{})
	close(ended)
	var got []string
	emit := func(p []byte) error { got = append(got, fmt.Sprintf("%d%c", len(p), p[0])); return nil }
	check.Must(t, Follow(t.Context(), ended, LogFile{reopen(t, a), emit}, LogFile{reopen(t, b), emit}))
	want := []string{"32768a", "32768b", "32768a", "1a"}
	check.That(t, slices.Equal(got, want), "got %q, want %q", got, want)
}

// Follow starts at the current offset of the file.
func TestFollowTail(t *testing.T) {
	f := create(t)
	write(t, f, "1\n2\n3\n")
	r := reopen(t, f)
	offset, err := Tail(r, 2)
	if err == nil {
		_, err = r.Seek(offset, 0)
	}
	check.Must(t, err)
	lines := make(chan string, 1)
	start(t, t.Context(), nil, LogFile{r, hand(lines)})
	check.Equal(t, receive(t, lines, "the tail"), "2\n3\n")
}

func TestFollowCancelled(t *testing.T) {
	f := create(t)
	write(t, f, strings.Repeat("x", 10*chunk))

	// While there is more to read.
	ctx, cancel := context.WithCancelCause(t.Context())
	calls := 0
	stop := func([]byte) error { calls++; cancel(errTest); return nil }
	err := Follow(ctx, nil, LogFile{reopen(t, f), stop}, LogFile{reopen(t, f), stop})
	check.That(t, err == errTest && calls == 1, "in the middle: %v after %d calls", err, calls)
	err = Follow(ctx, nil, LogFile{reopen(t, f), stop})
	check.That(t, err == errTest && calls == 1, "before: %v after %d calls", err, calls)

	// While there is nothing to read.
	for range 20 {
		ctx, cancel := context.WithCancel(t.Context())
		came := make(chan string, 10)
		result := start(t, ctx, nil, LogFile{reopen(t, f), hand(came)})
		for range 10 {
			receive(t, came, "history")
		}
		cancel()
		check.Equal(t, receive(t, result, "the cancelled"), context.Canceled, "idle")
	}
}

func TestFollowErrors(t *testing.T) {
	f := create(t)
	write(t, f, "x")
	check.Equal(t, Follow(t.Context(), nil, LogFile{reopen(t, f), func([]byte) error { return errTest }}), errTest, "Emit")
	r := reopen(t, f)
	r.Close()
	err := Follow(t.Context(), nil, LogFile{r, nil})
	check.That(t, errors.Is(err, os.ErrClosed), "closed file: %v", err)
}
