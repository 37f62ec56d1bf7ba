// Package proc identifies one process for certain, and forks the keeper.
//
// A pid is only a number: between reading it and using it the process may have
// ended and the number may belong to somebody else. So a process is held as a
// [Process]: a pidfd (pidfd_open(2)) plus what was verified about it while the
// pidfd was open. Signals go through the pidfd and can never reach a stranger.
//
// The keeper is a bare fork of sbxrun: clone(2) without exec. It is a child
// subreaper (prctl(2), PR_SET_CHILD_SUBREAPER) in a session of its own and the
// parent of bwrap ([Program]) and of what enters a room ([Way], package enter), so
// everything that these start and abandon becomes its child:
//
//	sbxrun ── keeper ─┬─ bwrap's monitor ── PID 1 of the room
//	                  └─ init ── payload
//
// It reaps all it has, until wait4(2) says ECHILD, reports that, and exits: the second
// half of the proof that a sandbox is gone, and the reason why nothing is left for a
// PID 1 that does not reap. It kills all it has, which are its own unreaped children, so
// that none of their pids can have been recycled, when
//
//   - sbxrun's end of the socket between them is shut down or closes, because sbxrun
//     says so or has died;
//   - bwrap's monitor has ended, and the room with it;
//   - a deadline is over that sbxrun has given it ([Keeper.EndAt]), for when sbxrun is
//     stopped.
//
// When sbxrun has died it restores the caller's terminal, and in the end it removes the
// cgroups.
//
// All memory of the keeper and its children is a [Block], laid out before the fork.
// Their code calls only nosplit functions that make raw system calls: see bareFork. Its
// children share its memory, each with a stack of its own, until they execute a program.
//
// [Kept] is a keeper together with the processes that stand for its end.
package proc
