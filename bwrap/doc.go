// Package bwrap runs untrusted commands in sandboxes built by bubblewrap. When Run or Wait returns, all processes that
// the command started are proven to have exited.
//
// The API follows os/exec. A [Command] runs in a new sandbox, which ends with it:
//
//	cmd := &bwrap.Command{Args: []string{"python3", "job.py"}, Timeout: 5 * time.Second}
//	result, err := cmd.Run(ctx)
//
// A [Room] is built once and runs any number of commands, sequentially or concurrently, each with its own deadline and
// limits. Files that they write remain until the room ends:
//
//	room := &bwrap.Room{Timeout: time.Hour}
//	if err := room.Start(ctx); err != nil {
//		return err
//	}
//	defer room.Close()
//	result, err := room.Command("pip", "list").Run(ctx)
//
// A sandbox shows the system's programs and libraries read-only, an empty home and /tmp in memory, and the additions
// of [Policy]. It gets nothing of this process's environment (except PATH), directory or descriptors.
//
// An error is an [*Error] with a hint. It means that a command never ran, that its teardown is unproven, or that output
// was lost. A command that fails or is killed is not an error: the [Result] has its cause, exit code, resource usage,
// and the verdict of the proof.
//
// docs/guides/library.md lists the requirements for programs and shows a back end.
package bwrap
