// Package room turns a policy into bubblewrap's arguments, and has it build a room: the
// namespaces and mounts of a sandbox, with a PID 1 that only waits. The command is run
// in it by package enter.
//
// The way from a [Policy] to a [Room]:
//
//	Prepare   decides everything and opens every descriptor; nothing runs yet
//	Start     forks the keeper, which forks bwrap and, for the plan's command, what
//	          enters the room. Returns when the room's PID 1 and the command's init are
//	          verified and held by pidfds; the payload waits for its release
//
// Descriptors of bwrap, after 0, 1 and 2, which all are the command's stderr:
//
//	args    its arguments, by --args
//	info    where it reports, as JSON, the pid of the room's PID 1, by --info-fd
//	ready   where the room's PID 1 writes a byte when the room is built
//	hold    the program of the room's PID 1, in memory, executed as /proc/self/fd/N
//	...     one for each file that is copied into the room
//
// bwrap closes those that it has read. The room's PID 1 inherits the rest, and closes all
// before it waits: it is executed last, when every mount is there, so its byte says that
// the room is complete. If bwrap fails, ready is closed without a byte, and bwrap has
// said why on stderr.
package room
