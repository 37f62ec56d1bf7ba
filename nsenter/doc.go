// Package nsenter acts inside a running sandbox from outside: it sends a signal
// to all of its processes at once.
//
// A Go process cannot enter a user namespace, because it has threads
// (setns(2): EINVAL). A bare fork of it has one and can:
//
//	sbxrun ── A, enters the user and PID namespaces of init with one setns(2)
//	          └─ B, born inside the PID namespace, which acts and exits
//
// Two processes, since setns(2) moves only the children of its caller into a
// PID namespace. A waits for B and sbxrun for A, so that nothing of ours is
// left in the namespace to keep it from ending (pid_namespaces(7): init is not
// gone before everybody in it is reaped).
//
// Needs Linux 5.8, which brought setns(2) on a pidfd.
package nsenter
