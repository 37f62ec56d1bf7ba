package bwrap_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
)

// rooms returns the number of concurrent rooms: SBXRUN_SOAK (tests/README.md), at most 200.
func rooms(t *testing.T) int {
	text := os.Getenv("SBXRUN_SOAK")
	if text == "" {
		return 10
	}
	n, err := strconv.Atoi(text)
	check.Require(t, err == nil && n >= 1, "SBXRUN_SOAK=%q: want a number", text)
	return min(n, 200)
}

// Many rooms with five commands each run concurrently in one process. Some are cancelled, signalled, or closed twice at
// once, and some lose their keeper or PID 1, at random moments. Every teardown is proven, and no process, zombie,
// descriptor or goroutine is left.
func TestManyAtOnce(t *testing.T) {
	n := rooms(t)
	use := func(n int) (ran int64) {
		var done atomic.Int64
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() { done.Add(useRoom(t, i)) })
		}
		all.Wait()
		return done.Load()
	}
	use(1)
	before := held(t)
	begin := time.Now()
	ran := use(n)
	t.Logf("%d rooms, %d commands exited by themselves, %v", n, ran, time.Since(begin).Round(time.Millisecond))
	nothingSince(t, before)
}

// nothingSince waits until this process has no more descriptors and goroutines than before, and no children. Leftovers
// of other tests may end in the meantime.
func nothingSince(t *testing.T, before holdings) {
	t.Helper()
	for end := time.Now().Add(bound); ; time.Sleep(10 * time.Millisecond) {
		after := held(t)
		if after.descriptors <= before.descriptors && after.goroutines <= before.goroutines && after.children == "" {
			return
		}
		check.Require(t, !time.Now().After(end), "before: %+v, after: %+v\n%s", before, after, stacks())
	}
}

// holdings counts the resources of this process.
type holdings struct {
	descriptors, goroutines int
	children                string // zombies included
}

func held(t *testing.T) (h holdings) {
	names, err := filepath.Glob("/proc/self/fd/*")
	check.Must(t, err)
	lists, err := filepath.Glob("/proc/self/task/*/children")
	check.Require(t, err == nil && len(lists) != 0, "%q, %v", lists, err)
	for _, name := range lists {
		if children, err := os.ReadFile(name); err == nil { // otherwise the thread has exited
			h.children += string(bytes.TrimSpace(children))
		}
	}
	h.descriptors, h.goroutines = len(names), runtime.NumGoroutine()
	return h
}

// killKeeper kills the keeper of a room: our child, and the grandparent of the room's PID 1.
func killKeeper(init int) error {
	monitor, err := proc.ReadStat(init)
	if err != nil {
		return err
	}
	keeper, err := proc.ReadStat(monitor.Parent)
	if err != nil {
		return err
	}
	p, err := proc.Open(keeper.Parent)
	if err != nil {
		return err
	}
	defer p.Close()
	if st, err := proc.ReadStat(p.PID); err != nil || st.Parent != os.Getpid() {
		return fmt.Errorf("%d is not our child: %w", p.PID, err)
	}
	return p.Signal(unix.SIGKILL)
}

// useRoom uses a room in a way that depends on its number i, and returns the number of commands that exited.
func useRoom(t *testing.T, i int) (exited int64) {
	soon := func() time.Duration { return rand.N(200 * time.Millisecond) }
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	room := &bwrap.Room{ProofTimeout: bound}
	if i%10 == 7 {
		time.AfterFunc(soon(), cancel)
	}
	if err := room.Start(ctx); err != nil {
		check.That(t, ctx.Err() != nil && code(t, err) == "ended", "room %d: %v", i, err)
		return 0
	}
	var all sync.WaitGroup
	var done atomic.Int64
	for k := range 5 {
		all.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			var out bytes.Buffer
			c := room.Command("sh", "-c", "echo "+strconv.Itoa(i)+"; setsid sleep 1000 & [ "+strconv.Itoa(k)+" = 0 ] || sleep 0.1; exit 3")
			c.Stdin, c.Stdout, c.Stderr, c.Timeout, c.ProofTimeout = strings.NewReader("x"), &out, io.Discard, bound, bound
			if k == 4 {
				time.AfterFunc(soon(), cancel)
			}
			res, err := c.Run(ctx)
			switch {
			case err != nil && res == nil:
				got := code(t, err)
				check.That(t, got == "ended" || got == "enter", "room %d, command %d: %s: %v", i, k, got, err)
				return
			case err != nil || res.Verdict != result.Proven:
				t.Errorf("room %d, command %d: %+v, %v", i, k, res, err)
				return
			}
			switch res.Cause {
			case result.Exited:
				done.Add(1)
				want := strconv.Itoa(i) + "\n"
				check.That(t, res.ExitCode() == 3 && out.String() == want, "room %d, command %d: %d, %q", i, k, res.ExitCode(), &out)
			case result.Canceled, result.Killed, result.Signaled, result.Lost:
			default:
				t.Errorf("room %d, command %d: %s", i, k, res.Cause)
			}
		})
	}
	switch i % 10 {
	case 3, 4: // closed twice at once, at a random moment, while it is used and signalled
		time.Sleep(soon())
		all.Go(func() { _ = room.Signal(unix.SIGTERM) })
		all.Go(func() { _, _ = room.Close() })
	case 5, 8: // its PID 1, or its keeper, is killed from outside
		time.Sleep(soon())
		init, err := proc.FromPidfd(room.Way().Init)
		if err != nil {
			t.Errorf("room %d: %v", i, err)
			break
		}
		defer init.Close()
		if i%10 == 5 {
			err = init.Signal(unix.SIGKILL)
		} else {
			err = killKeeper(init.PID)
		}
		check.That(t, err == nil, "room %d: %v", i, err)
		<-room.Ended()
	case 6: // its context is canceled
		time.Sleep(soon())
		cancel()
		<-room.Ended()
	case 7: // its context is canceled at any moment, even before the room exists
		<-room.Ended()
	default: // undisturbed
		all.Wait()
		n := done.Load()
		check.That(t, n >= 4, "room %d: only %d commands exited", i, n)
	}
	res, err := room.Close()
	all.Wait()
	check.That(t, err == nil && res.Verdict == result.Proven, "room %d: %+v, %v", i, res, err)
	return done.Load()
}
