// Package faults kills, stops and starves the processes of a run at every step, and asserts that nothing is left.
//
// A run has six processes:
//
//	sbxrun ── keeper ┬─ monitor ── room
//	                 └─ init ── payload
//
// and passes through the phases below. Tests recognise a phase from outside, by the processes below sbxrun and their
// PIDs in the PID namespaces. The system-call tests need no phases: they kill a victim at its first, second, third …
// system call. Two short-lived processes of the set-up are victims only there.
//
//	phase      begins when                           victims
//	started    sbxrun has been started               sbxrun
//	keeper     it has a child                        sbxrun keeper
//	monitor    the keeper has a child                sbxrun keeper monitor
//	bwrap      that child has executed bwrap         sbxrun keeper monitor
//	room       bwrap has created PID 1 of the room   sbxrun keeper monitor room
//	built      that executes its own program         sbxrun keeper monitor room
//	init       PID 1 of the command exists           sbxrun keeper monitor room init
//	held       the payload waits to be released      sbxrun keeper monitor room init
//	running    the command has written a file        sbxrun keeper monitor room init
//	ended      the command has exited                sbxrun keeper
//	grace      SIGTERM has been ignored              sbxrun keeper monitor room init
//	teardown   500 processes are being killed        sbxrun keeper
//	any call   the victim's n-th system call         all of them, enters and inside
//	any time   a random moment                       sbxrun and keeper at once
//
// Each test then asserts:
//
//   - All processes have exited: none has the run's marker in its environment or command line,
//     none is in its PID namespace, and none is below the test process, which is a child
//     subreaper and inherits what is abandoned. If sbxrun exited by itself, this holds at once,
//     zombies included. If sbxrun was killed, it holds soon, and the forks of sbxrun itself
//     (the keeper, or a helper that delivers SIGTERM) may be zombies that sbxrun's parent reaps.
//   - The command has stopped: the files that it appends to do not grow.
//   - The exit code and the report agree. Neither says that a killed command completed, or that
//     a command never started that has left its trace.
//
// Tests of sandboxes and execs have a state directory each ([env]), which holds only its lock in
// the end. Supervisors become children of the test process when their clients exit; the test
// process reaps them, and the zombies of what was killed above others, as init would. Tests kill
// by pidfd, after checking the victim's parent. A bystander runs alongside them and must get no signal.
//
// TestSoak combines everything: it kills and stops processes of every role at random moments of each phase of run,
// start, exec, kill, wait, logs, cleanup and a call of a server, several of one sandbox and several sandboxes in
// parallel, while payloads fight back and the PIDs of killed processes are given to strangers. Its parts have their own
// PID namespaces, so that they see every process that is left.
//
// The tests of this package run one after another, so that everything below the test process belongs to the current
// run. SBXRUN_SOAK=N sets the number of repetitions: 4 by default, 50 in setup.sh check, 10 there as the other user.
// From 1000 on, the system-call tests try every call instead of a sample; with 2000, TestSoak sends 10,000 signals.
package faults
