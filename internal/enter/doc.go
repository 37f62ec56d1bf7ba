// Package enter is the way into a room that bwrap has built, from outside: it runs a
// command there, in a PID namespace of its own ([Entry]), or sends a signal to all
// processes of all commands there at once ([Signal]). The command of a run or a start
// goes in this way, as that of an exec does.
//
// A Go process cannot enter a user namespace, because it has threads
// (setns(2): EINVAL). A bare fork has one and can. So all that goes in is forked
// below a keeper (package proc), which stays outside and kills and reaps it whatever
// happens:
//
//	sbxrun            decides the deadline; holds pidfds of keeper and init
//	└─ keeper         outside, and parent of all that follows
//	   ├─ enters      joins the room's namespaces, and exits
//	   ├─ inside      is born in the room's PID namespace, and exits
//	   └─ init        process 1 of a new one below that: it reaps, delivers signals,
//	      └─ payload  and reports how the payload has ended
//
// Between sbxrun and init is a SOCK_SEQPACKET socket: a pidfd of the room's PID 1 and
// signals go in, [message]s come out, with the sender's pid added by the kernel. The
// payload waits at a pipe, the gate, for a byte; end-of-file makes it exit. If the room is
// still being built, what enters waits at a second pipe for a byte from its PID 1, and then
// furnishes the room ([Furnishing]). Before, it makes the command's network namespace, if that is
// not to be the room's.
//
// A payload finds its files, its 0, 1 and 2, and nothing else: every other descriptor is
// closed before, or by its exec. init is undumpable, so that nothing with its uid can
// trace it or read it, and blocks every signal.
//
// None of these is a child of the room's PID 1, and that is nevertheless not gone before
// all in the namespaces below its own are reaped (pid_namespaces(7)): the keeper sees to
// that.
//
// Needs Linux 5.9: setns(2) on a pidfd (5.8), close_range(2).
package enter
