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

// chunk is how much is read at once.
const chunk = 32 << 10

// pollInterval is how late a follower may be that the kernel cannot wake.
const pollInterval = 100 * time.Millisecond

// A LogFile is a log to follow. File is read from where it stands, and must not
// be shared with another follower: it is the offset that is shared. Emit gets
// every byte once and in order; what it is given is valid until it returns.
type LogFile struct {
	File *os.File
	Emit func([]byte) error
}

// Follow reads the streams as they grow, until ended is closed, which says that
// nothing more will be written, and then to their ends. A nil ended never is.
// An error of reading or of Emit ends it, and so does ctx, with its cause.
//
// Each stream keeps its order; between two there is none to be had, but what
// both have is taken in turns, so that neither waits for the end of the other.
// Emit is called by this goroutine alone.
func Follow(ctx context.Context, ended <-chan struct{}, streams ...LogFile) error {
	// Before the first read: what is written after a read found the end, and
	// before there was a watch, would wake nobody.
	changed, stop, err := watch(streams)
	var tick <-chan time.Time
	if err != nil {
		// A user has 128 instances of inotify, shared with every editor and
		// container of theirs; a follower that is a little late is better than
		// none. The same goes for a /proc that is not mounted.
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
			over = true // but for what came after the last read
		case <-ctx.Done():
		}
	}
}

// drain reads a chunk of each stream in turn, until all are at their ends.
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

// watch returns a channel that has something to receive after one of the
// streams' files was written to.
func watch(streams []LogFile) (changed <-chan struct{}, stop func(), err error) {
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		return nil, nil, fmt.Errorf("inotify_init: %w", err)
	}
	events := os.NewFile(uintptr(fd), "inotify")
	// Fails if the file could not be added to Go's poller, and Read would not wait.
	err = events.SetReadDeadline(time.Time{})
	for _, s := range streams {
		if err == nil {
			// The file that is open, whatever has its name by now.
			_, err = unix.InotifyAddWatch(fd, fmt.Sprintf("/proc/self/fd/%d", proc.Descriptor(s.File)), unix.IN_MODIFY)
		}
	}
	if err != nil {
		events.Close()
		return nil, nil, fmt.Errorf("watch logs: %w", err)
	}

	c := make(chan struct{}, 1)
	go func() {
		// What the events say is of no interest: all files are read.
		buf := make([]byte, 4096)
		for {
			if _, err := events.Read(buf); err != nil {
				return // closed
			}
			select {
			case c <- struct{}{}:
			default: // it will read after this write, too
			}
		}
	}()
	return c, func() { events.Close() }, nil
}
