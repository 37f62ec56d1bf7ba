// Package nsenter runs commands in existing rooms: sandboxes of `sbxrun start`, by name, and rooms that package bwrap
// has built.
//
// Each [Command] has its own init in the room, the PID 1 of a nested PID namespace. Processes in the room can neither
// signal nor trace it, and commands in one room do not see each other's processes. A command is ended by killing its
// init: the kernel then kills all processes of the namespace, and init's own exit completes only after theirs
// (pid_namespaces(7)). So when Wait returns, all processes are proven to have exited.
//
// If the calling process is killed, a keeper outside the room ends the command.
//
//	cmd := &nsenter.Command{Sandbox: "box", Args: []string{"make", "test"}, Timeout: time.Minute, Stdout: os.Stdout}
//	result, err := cmd.Run(ctx)
//	if err != nil {
//		return err // the command never ran, or its teardown is unproven
//	}
//	if result.Cause == "timeout" { ... }
//
// Requirements (docs/guides/library.md): Linux 5.11, amd64 or arm64, and bubblewrap. The program must not wait for arbitrary
// children (wait4(2) with -1), and becomes a child subreaper. Cgo, position-independent
// executables and large heaps are supported.
package nsenter
