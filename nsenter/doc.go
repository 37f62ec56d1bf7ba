// Package nsenter runs commands in rooms that are there already: sandboxes that `sbxrun
// start` keeps, by their names, and rooms that package bwrap has built.
//
// Each [Command] has an init of its own in the room: process 1 of a PID namespace below the
// room's. The init cannot be signalled or traced from inside, and commands in one room do
// not see each other's processes. To end a command is to kill that init: the kernel then
// kills all that the command has started, wherever it hid, and init is not gone before all
// of it is (pid_namespaces(7)). So Wait has proof when it returns, and the result says so.
//
// Should this process be killed, at whatever moment, a keeper outside of the room ends the
// command.
//
//	cmd := &nsenter.Command{Sandbox: "box", Args: []string{"make", "test"}, Timeout: time.Minute, Stdout: os.Stdout}
//	result, err := cmd.Run(ctx)
//	if err != nil {
//		return err // it never ran, or could not be proven gone
//	}
//	if result.Cause == "timeout" { ... }
//
// docs/guides/library.md says what it asks of a program: Linux 5.11, amd64 or arm64, and bubblewrap;
// that it does not wait for any child (wait4(2) with -1); and that it becomes a child
// subreaper. Builds with cgo, position-independent ones, and large heaps are fine.
package nsenter
