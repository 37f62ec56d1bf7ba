// Package enter enters a room that bwrap has built. It runs a command there in a new PID namespace ([Entry]), or sends
// a signal to all processes of all commands there at once ([Signal]). The commands of run, start and exec all enter
// their room this way.
//
// A Go process has threads, so it cannot join a user namespace (setns(2): EINVAL). Therefore processes of the helper
// (internal/helper) enter, by a script that this package lays out, below a keeper (package proc), which stays outside and
// always kills and reaps them:
//
//	sbxrun            decides the deadline; holds pidfds of keeper and init
//	└─ keeper         outside; parent of the processes below
//	   ├─ enters      joins the room's namespaces and exits
//	   ├─ inside      is created in the room's PID namespace and exits
//	   └─ init        PID 1 of a new PID namespace below that: reaps, delivers signals
//	      └─ payload  and reports the payload's exit status
//
// sbxrun and init share a SOCK_SEQPACKET socket. sbxrun sends a pidfd of the room's PID 1 and signals; the processes
// send [helper.Report]s, to which the kernel adds the sender's PID. The payload waits for a byte at a pipe, the gate, and
// exits at end-of-file. If bwrap is still building the room, the entering process first makes the command's network
// namespace, if it has its own, waits at a second pipe for a byte from the room's PID 1, and then furnishes the room
// ([Furnishing]).
//
// A payload has only the descriptors 0, 1 and 2; all others are closed before or by its exec. init is undumpable, so
// processes with its UID can neither trace it nor read its memory, and blocks all signals.
//
// None of these processes is a child of the room's PID 1. Nevertheless that PID 1 does not exit before all processes in
// the PID namespaces below its own are reaped (pid_namespaces(7)), which the keeper does.
//
// Needs Linux 5.9: setns(2) on a pidfd (5.8), close_range(2).
package enter
