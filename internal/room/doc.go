// Package room turns a policy into bubblewrap's arguments and lets it build a room: the namespaces and mounts of a
// sandbox, with a PID 1 that only waits. Package enter runs the command in it.
//
// From a [Policy] to a [Room], each step in its own files:
//
//	policy.go     the requested sandbox, and checks that need no host
//	plan.go       Prepare: decides everything and opens every source; nothing runs yet
//	  find.go       bwrap
//	  identity.go   the command's uid and environment
//	  workdir.go    its current and working directories
//	  protect.go, rootfs.go, devices.go, overlay.go, upper.go
//	                further mounts of the policy
//	  mounts.go     all mounts as one list of operations, parents first
//	  view.go       maps paths in the sandbox to the host, for checks of the plan
//	  sources.go    opens and stages the sources of binds
//	  command.go    whether the command can be executed
//	  options.go    the operations as bwrap's arguments
//	  furnishing.go the operations as work of the entering process
//	room.go       Start: starts the keeper, which starts bwrap (builder.go) and, for the plan's
//	              command, the entering process. Returns when the room's PID 1 and the command's
//	              init are verified and held by pidfds; the payload waits for its release
//
// Descriptors of bwrap, after 0, 1 and 2, which are all the command's stderr:
//
//	args    its arguments, for --args
//	info    its report of the PID of the room's PID 1, as JSON, for --info-fd
//	ready   gets a byte from the room's PID 1 when the room is built
//	hold    the program of the room's PID 1, in memory, executed as /proc/self/fd/N
//
// bwrap closes the descriptors that it has read. The room's PID 1 inherits the rest and closes them before it waits. It
// is executed after the last mount, so its byte means that the room is complete. If bwrap fails, ready is closed
// without a byte, and bwrap has printed the reason on stderr.
package room
