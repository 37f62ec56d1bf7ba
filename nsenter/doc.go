// Package nsenter acts inside a running sandbox from outside: it runs a command
// there, in a PID namespace of its own ([Entry]), or sends a signal to all of its
// processes at once ([Signal]).
//
// A Go process cannot enter a user namespace, because it has threads
// (setns(2): EINVAL). A bare fork has one and can. So all that goes in is forked
// below a keeper of its own (package proc), which stays outside and kills and reaps
// it whatever happens:
//
//	sbxrun            owns the deadline; holds pidfds of keeper and init
//	└─ keeper         outside, and parent of all that follows
//	   ├─ enters      joins the sandbox's namespaces, and is over
//	   ├─ inside      is born in its PID namespace, and is over
//	   └─ init        process 1 of a new one below that, our own code: it reaps,
//	      └─ payload  passes signals on, and tells how the payload has ended
//
// Nobody in there is a child of the sandbox's init, which is not gone before all
// in its namespace are reaped (pid_namespaces(7)): the keeper sees to that.
//
// Needs Linux 5.9: setns(2) on a pidfd (5.8), close_range(2).
package nsenter
