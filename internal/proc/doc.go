// Package proc knows one process for certain, and forks the keeper.
//
// A pid is only a number: between reading it and using it the process may have
// ended and the number may belong to somebody else. So a process is held as a
// [Process]: a pidfd (pidfd_open(2)) plus what was verified about it while the
// pidfd was open. Signals go through the pidfd and can never reach a stranger.
//
// The keeper is a bare fork of sbxrun: clone(2) without exec. It is a child
// subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) in a session of its own and the
// parent of bwrap, or of what enters a sandbox (package nsenter), so everything
// that this starts and abandons becomes its child. It does three things only:
//
//   - it reaps all it has, until wait4(2) says ECHILD, and then exits. That is
//     the second half of the proof that a sandbox is gone, and the reason why
//     nothing is left for a PID 1 that does not reap;
//   - when sbxrun's end of the socket between them is shut down or closes, because
//     sbxrun says so or has died, it kills all it has. They are its own unreaped
//     children, so none of their pids can have been recycled;
//   - it puts back the caller's terminal, if there is one, when sbxrun has died.
//
// The processes of a run:
//
//	sbxrun ── keeper ── bwrap monitor ── init ── payload
package proc
