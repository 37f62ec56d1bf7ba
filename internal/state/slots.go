package state

import (
	"context"
	"errors"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ErrFull says that all slots are taken.
var ErrFull = errors.New("all slots are taken")

// TakeSlot takes one of the slots 0 to n-1 without waiting: [ErrFull] if there is
// none, or who waits comes first. release gives it up, and so does the kernel when
// the process ends.
//
// Slots are taken only by who holds the queue. That may be held for the moment in
// which somebody looks, and that is no full house: then the slots are asked after,
// without being taken, and the queue is tried again.
func (d *Dir) TakeSlot(n int) (release func(), err error) {
	queue, err := d.root.open(queueName, unix.O_RDWR|unix.O_CREAT)
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
			return nil, failed(d.root.fail("lock", queueName, err))
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

// queueMoment is how long the queue may be held although a slot is free: its holder
// takes it within that time, or is stopped, and passed by. On a busy machine it may be without a CPU
// for seconds.
const queueMoment = 4 * time.Second

// standing reports whether a slot stays free for all of queueMoment.
func (d *Dir) standing(n int) bool {
	for end := time.Now().Add(queueMoment); time.Now().Before(end); time.Sleep(slotPause) {
		if full, err := d.full(n); full || err != nil {
			return false
		}
	}
	return true
}

// WaitSlot is TakeSlot for who waits, in the order in which they came: all block
// on the queue (flock(2); since Linux 5.0 waiters get a lock in their order), and its
// head alone looks for a free slot. One that is stopped is passed by. It ends with ctx, whose error it
// returns.
//
// The process should end after such an error: a thread of it may wait for the queue
// still, and a place in the queue with it.
func (d *Dir) WaitSlot(ctx context.Context, n int) (release func(), err error) {
	queue, err := d.root.open(queueName, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, failed(err)
	}
	locked := make(chan error)
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		err := flock(queue)
		select {
		case locked <- err: // and the descriptor with it
		case <-waiting.Done():
			_ = unix.Close(queue) // and so the place in the queue
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
		return nil, failed(d.root.fail("lock", queueName, err))
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

// slotPause is how often the head of the queue looks for a free slot.
const slotPause = 20 * time.Millisecond

func flock(fd int) error {
	for {
		if err := unix.Flock(fd, unix.LOCK_EX); err != unix.EINTR {
			return err
		}
	}
}

// freeSlot takes the first slot that is free. The caller holds the queue.
func (d *Dir) freeSlot(n int) (release func(), err error) {
	for i := range n {
		if release, ok, err := d.try(slotPrefix + strconv.Itoa(i)); ok || err != nil {
			return release, err
		}
	}
	return nil, ErrFull
}

// full asks whether all slots are taken, and takes none.
func (d *Dir) full(n int) (bool, error) {
	for i := range n {
		if taken, err := d.root.locked(slotPrefix + strconv.Itoa(i)); err != nil || !taken {
			return false, err
		}
	}
	return true, nil
}

// TryAdmission takes the lock that is held from the look at what is scarce until the
// payload runs, so that two do not both take what is there for one. ok is false if
// somebody else has it.
func (d *Dir) TryAdmission() (release func(), ok bool, err error) { return d.try(admissionName) }

// try takes a lock of the state directory, if nobody has it.
func (d *Dir) try(name string) (release func(), ok bool, err error) {
	fd, err := d.root.lock(name, unix.O_RDWR|unix.O_CREAT, unix.F_WRLCK, 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, failed(err)
	}
	return func() { _ = unix.Close(fd) }, true, nil
}
