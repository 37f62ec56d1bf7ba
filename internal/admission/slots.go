package admission

import (
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Files in the state directory.
const (
	queueName     = "queue"     // the queue for slots; see waitSlot
	slotPrefix    = "slot-"     // followed by the slot's number; locked while its command runs
	admissionName = "admission" // locked while a command that may exceed a limit starts
)

// errFull means that all slots are taken.
var errFull = errors.New("all slots are taken")

// takeSlot takes one of the slots 0 to n-1 without waiting. It returns [errFull] if none is
// free or other processes wait. release frees the slot, as does the end of the process.
//
// Only the holder of the queue takes slots. Another process may hold the queue for a moment while it looks for a
// slot, which does not mean that all are taken. takeSlot then queries the slots without taking one, and tries again.
func takeSlot(d safeopen.Folder, n int) (release func(), err error) {
	queue, err := d.Open(queueName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, err
	}
	defer unix.Close(queue)
	for end := time.Now().Add(queueMoment); ; time.Sleep(time.Millisecond) {
		switch err := unix.Flock(queue, unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return freeSlot(d, n)
		case err == unix.EINTR:
			continue
		case err != unix.EWOULDBLOCK:
			return nil, d.Fail("lock", queueName, err)
		}
		if full, err := full(d, n); err != nil {
			return nil, err
		} else if full {
			return nil, errFull
		}
		if time.Now().After(end) {
			return freeSlot(d, n)
		}
	}
}

// queueMoment is how long the queue may be held while a slot is free. Its holder takes the
// slot within that time, or is stopped and passed over. On a busy machine a process may have to
// wait seconds for a CPU.
const queueMoment = 4 * time.Second

// standing reports whether a slot stays free for all of queueMoment, so that the queue does not move.
func standing(d safeopen.Folder, n int) bool {
	for end := time.Now().Add(queueMoment); time.Now().Before(end); time.Sleep(slotPause) {
		if full, err := full(d, n); full || err != nil {
			return false
		}
	}
	return true
}

// waitSlot is takeSlot with waiting, in the order of arrival: all processes block on the queue
// (flock(2); since Linux 5.0 waiters get a lock in order), and only its head looks for a free
// slot. A stopped head is passed over. waitSlot returns the cause of ctx when that is done.
//
// The process should exit after that error, because a thread may still wait in the queue.
func waitSlot(ctx context.Context, d safeopen.Folder, n int) (release func(), err error) {
	queue, err := d.Open(queueName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, err
	}
	locked := make(chan error)
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		err := flock(queue)
		select {
		case locked <- err: // hands over the descriptor
		case <-waiting.Done():
			_ = unix.Close(queue) // leaves the queue
		}
	}()
	for behind := true; behind; {
		select {
		case err = <-locked:
			behind = false
		case <-time.After(queueMoment):
			if standing(d, n) {
				if release, err := freeSlot(d, n); err != errFull {
					return release, err
				}
			}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	defer unix.Close(queue)
	if err != nil {
		return nil, d.Fail("lock", queueName, err)
	}
	for pause := time.Millisecond; ; pause = min(2*pause, slotPause) {
		release, err := freeSlot(d, n)
		if err != errFull {
			return release, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// slotPause is the interval at which the head of the queue looks for a free slot.
const slotPause = 20 * time.Millisecond

func flock(fd int) error {
	for {
		if err := unix.Flock(fd, unix.LOCK_EX); err != unix.EINTR {
			return err
		}
	}
}

// freeSlot takes the first free slot. The caller holds the queue.
func freeSlot(d safeopen.Folder, n int) (release func(), err error) {
	for i := range n {
		if release, ok, err := try(d, slotPrefix+strconv.Itoa(i)); ok || err != nil {
			return release, err
		}
	}
	return nil, errFull
}

// full reports whether all slots are taken.
func full(d safeopen.Folder, n int) (bool, error) {
	for i := range n {
		if taken, err := d.Locked(slotPrefix + strconv.Itoa(i)); err != nil || !taken {
			return false, err
		}
	}
	return true, nil
}

// try takes a lock if it is free.
func try(d safeopen.Folder, name string) (release func(), ok bool, err error) {
	fd, err := d.Lock(name, unix.O_RDWR|unix.O_CREAT, unix.F_WRLCK, 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, err
	}
	return func() { _ = unix.Close(fd) }, true, nil
}
