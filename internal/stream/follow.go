package stream

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// chunk is the size of one read.
const chunk = 32 << 10

// pollInterval is the delay of a follower that inotify cannot wake.
const pollInterval = 100 * time.Millisecond

// A LogFile is a log to follow. File is read from its current offset and must not be shared with another follower,
// because the offset is shared, too. Emit gets every byte once and in order; its argument is valid until it returns.
type LogFile struct {
	File *os.File
	Emit func([]byte) error
}

// Follow reads the streams as they grow until ended is closed, which means that writing
// has stopped, and then to their ends. A nil ended never closes. Follow returns the first
// error of a read or of Emit, and the cause of ctx when that is done.
//
// Within a stream the order is kept; between streams it is unknown, but they are read in
// turns, so that none waits for another's end. Emit is called by this goroutine only.
func Follow(ctx context.Context, ended <-chan struct{}, streams ...LogFile) error {
	// Watch before the first read. Otherwise a write between that read and the watch would wake no follower.
	changed, stop, err := watch(streams)
	var tick <-chan time.Time
	if err != nil {
		// A user has 128 inotify instances, shared with every editor and container. Without
		// one, or without a mounted /proc, the follower polls.
		t := time.NewTicker(pollInterval)
		tick, stop = t.C, t.Stop
	}
	defer stop()

	buf := make([]byte, chunk)
	for over := false; ; {
		if err := drain(ctx, streams, buf); err != nil || over {
			return err
		}
		select {
		case <-changed:
		case <-tick:
		case <-ended:
			over = true // after one more read
		case <-ctx.Done():
		}
	}
}

// drain reads a chunk of each stream in turn until all are at their ends.
func drain(ctx context.Context, streams []LogFile, buf []byte) error {
	for atEnd := 0; atEnd < len(streams); {
		atEnd = 0
		for _, s := range streams {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			n, err := s.File.Read(buf)
			if err == io.EOF {
				atEnd++
				continue
			}
			if err == nil {
				err = s.Emit(buf[:n])
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// watch returns a channel that receives a value after one of the files was written to.
func watch(streams []LogFile) (changed <-chan struct{}, stop func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("inotify_init: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	// Fails if the file is not in Go's poller, so that Read would return at once.
	err = events.SetReadDeadline(time.Time{})
	for _, s := range streams {
		if err == nil {
			// By descriptor: the name may refer to another file by now.
			_, err = unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", proc.Descriptor(s.File)), unix.IN_MODIFY)
		}
	}
	if err != nil {
		events.Close()
		return nil, nil, fmt.Errorf("watch logs: %w", err)
	}

	c := make(chan struct{}, 1)
	go func() {
		// The events do not matter: all files are read.
		buf := make([]byte, 4096)
		for {
			if _, err := events.Read(buf); err != nil {
				return // closed
			}
			select {
			case c <- struct{}{}:
			default: // a wake-up is pending
			}
		}
	}()
	return c, func() { events.Close() }, nil
}
