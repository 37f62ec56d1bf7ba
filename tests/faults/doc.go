// Package faults kills, stops and starves the processes of a run at every step
// of its way, and counts what is left.
//
// A run has six processes:
//
//	sbxrun ── keeper ┬─ monitor ── room
//	                 └─ init ── payload
//
// and passes through the phases below. A phase is seen from outside, by what
// exists below sbxrun and by its numbers in the PID namespaces; the system-call tests need
// no phase, they kill a victim at its first, second, third … system call, for as many as it
// makes. The two that are there on the way in for some system calls are victims of these.
//
//	phase      begins when                        victims
//	started    sbxrun has been started            sbxrun
//	keeper     it has a child                     sbxrun keeper
//	monitor    the keeper has a child             sbxrun keeper monitor
//	bwrap      that child has executed bwrap      sbxrun keeper monitor
//	room       bwrap has made PID 1 of the room   sbxrun keeper monitor room
//	built      that executes its own program      sbxrun keeper monitor room
//	init       there is PID 1 of the command      sbxrun keeper monitor room init
//	held       the payload waits at the gate      sbxrun keeper monitor room init
//	running    the command has written a file     sbxrun keeper monitor room init
//	ended      the command has ended              sbxrun keeper
//	grace      SIGTERM has been ignored           sbxrun keeper monitor room init
//	teardown   500 processes are being killed     sbxrun keeper
//	any call   the victim's n-th system call      all of them, enters and inside
//	any time   at random, sbxrun and keeper both  the two at once: held_test.go
//
// What is asserted after each of them:
//
//   - nothing is left: no process with the run's marker in its environment or
//     command line, none in its PID namespace, and none below the test process,
//     which is a child subreaper and so inherits whatever is abandoned. If sbxrun
//     returned by itself this must hold at that very moment, zombies included; if
//     it was killed, soon, and then the forks of sbxrun itself (the keeper, or one
//     that was delivering SIGTERM) are zombies that its caller has to reap, as
//     it reaps sbxrun;
//   - the command never goes on: the files it appends to do not grow any more;
//   - the exit code and the report agree, and neither says that a command
//     completed that was killed, or never started that has left its trace.
//
// Sandboxes that live on, and execs in them, have a state directory of their own in
// each test (estate), of which in the end nothing is left but its lock: no process
// below the test, none with its marker, none in one of its PID namespaces, no
// record, no name. Their supervisors become the test's children when their clients
// end; the zombies of these, and of what was killed above others, are the test's to
// reap, which stands for the machine's init. A process is killed by a pidfd, after a
// look at whose child it is; beside it runs a bystander that nobody may signal.
// SBXRUN_SOAK=500 starts as many sandboxes at random.
//
// TestSoak is everything at once: processes of every role are killed and stopped at random
// moments of each phase of run, start, exec, kill, wait, logs, cleanup and a call of a server, several
// of one sandbox and several sandboxes side by side, while the payloads fight back (fighter_test.go)
// and the pids of what was killed are given to strangers. Its parts have PID namespaces of
// their own, so that whatever is left is seen. SBXRUN_SOAK=2000 is 10,000 signals.
//
// The tests of this package run one after the other: that is what makes
// everything below the test process the current run's. SBXRUN_SOAK=N sets the
// number of repetitions, 10 by default and 50 in setup.sh check; from 1000 on, every
// system call is tried and not a sample.
package faults
