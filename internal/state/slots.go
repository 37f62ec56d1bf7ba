package state

import (
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ErrFull means that all slots are taken.
var ErrFull = errors.New("all slots are taken")

// TakeSlot takes one of the slots 0 to n-1 without waiting. It returns [ErrFull] if none is
// free or other processes wait. release frees the slot, as does the end of the process.
//
// Only the holder of the queue takes slots. Another process may hold the queue for the
// moment of looking for a slot, which does not mean that all are taken. TakeSlot then
// queries the slots without taking one, and tries again.
func (d *Dir) TakeSlot(n int) (release func(), err error) {
	queue, err := d.root.Open(queueName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, failed(err)
	}
	defer unix.Close(queue)
	for end := time.Now().Add(queueMoment); ; time.Sleep(time.Millisecond) {
		switch err := unix.Flock(queue, unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return d.freeSlot(n)
		case err == unix.EINTR:
			continue
		case err != unix.EWOULDBLOCK:
			return nil, failed(d.root.Fail("lock", queueName, err))
		}
		if full, err := d.full(n); err != nil {
			return nil, failed(err)
		} else if full {
			return nil, ErrFull
		}
		if time.Now().After(end) {
			return d.freeSlot(n)
		}
	}
}

// queueMoment is how long the queue may be held while a slot is free. Its holder takes the
// slot within that time, or is stopped and passed over. On a busy machine a process may have to
// wait seconds for a CPU.
const queueMoment = 4 * time.Second

// standing reports whether a slot stays free for all of queueMoment, so that the queue does not move.
func (d *Dir) standing(n int) bool {
	for end := time.Now().Add(queueMoment); time.Now().Before(end); time.Sleep(slotPause) {
		if full, err := d.full(n); full || err != nil {
			return false
		}
	}
	return true
}

// WaitSlot is TakeSlot with waiting, in the order of arrival: all processes block on the queue
// (flock(2); since Linux 5.0 waiters get a lock in order), and only its head looks for a free
// slot. A stopped head is passed over. WaitSlot returns the cause of ctx when that is done.
//
// The process should exit after such an error, because a thread may still wait in the queue.
func (d *Dir) WaitSlot(ctx context.Context, n int) (release func(), err error) {
	queue, err := d.root.Open(queueName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, failed(err)
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
			if d.standing(n) {
				if release, err := d.freeSlot(n); err != ErrFull {
					return release, err
				}
			}
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	defer unix.Close(queue)
	if err != nil {
		return nil, failed(d.root.Fail("lock", queueName, err))
	}
	for pause := time.Millisecond; ; pause = min(2*pause, slotPause) {
		release, err := d.freeSlot(n)
		if err != ErrFull {
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
func (d *Dir) freeSlot(n int) (release func(), err error) {
	for i := range n {
		if release, ok, err := d.try(slotPrefix + strconv.Itoa(i)); ok || err != nil {
			return release, err
		}
	}
	return nil, ErrFull
}

// full reports whether all slots are taken.
func (d *Dir) full(n int) (bool, error) {
	for i := range n {
		if taken, err := d.root.Locked(slotPrefix + strconv.Itoa(i)); err != nil || !taken {
			return false, err
		}
	}
	return true, nil
}

// TryAdmission takes the lock that is held from the check of scarce resources until the
// command runs, so that two commands do not both use resources that suffice for one. ok is false if
// another process has it.
func (d *Dir) TryAdmission() (release func(), ok bool, err error) { return d.try(admissionName) }

// try takes a lock of the state directory if it is free.
func (d *Dir) try(name string) (release func(), ok bool, err error) {
	fd, err := d.root.Lock(name, unix.O_RDWR|unix.O_CREAT, unix.F_WRLCK, 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, failed(err)
	}
	return func() { _ = unix.Close(fd) }, true, nil
}
