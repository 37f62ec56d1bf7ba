// Package proc identifies processes reliably and starts the keeper.
//
// The kernel reuses PIDs: between reading a PID and using it, the process may have ended and another may have the PID.
// So a process is held as a [Process]: a pidfd (pidfd_open(2)) and values verified while the pidfd was open. Signals go
// through the pidfd and never reach another process.
//
// The keeper is a process of the helper (internal/helper). It is a child subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) in
// its own session and the parent of bwrap ([Program]) and of the processes that enter a room ([Way], package enter). All
// processes that these leave behind become its children:
//
//	sbxrun ── keeper ─┬─ bwrap's monitor ── PID 1 of the room
//	                  └─ init ── payload
//
// It reaps children until wait4(2) fails with ECHILD, reports that, and exits. This is the second part of the proof that
// all processes of a sandbox have exited, and leaves no zombies to a PID 1 that does not reap. The keeper kills all its
// children, whose PIDs cannot be reused while they are unreaped, when
//
//   - sbxrun's end of their socket is shut down, or closes because sbxrun has died;
//   - bwrap's monitor has ended, and with it the room;
//   - the deadline set by [Keeper.EndAt] has passed, in case sbxrun is stopped.
//
// After sbxrun's death it restores the caller's terminal. At its end it removes the cgroups.
//
// [Kept] is a keeper together with the processes whose end proves its end.
package proc
