// Package bwrap runs untrusted commands in sandboxes that bubblewrap builds, and leaves
// nothing behind: when Run or Wait returns, everything that the command has started is gone,
// and that is proven.
//
// There are two ways to use it, in the manner of os/exec. A [Command] has a sandbox of its
// own, which ends with it:
//
//	cmd := &bwrap.Command{Args: []string{"python3", "job.py"}, Timeout: 5 * time.Second}
//	result, err := cmd.Run(ctx)
//
// A [Room] is built once, and commands are run in it, one after the other or side by side, each
// with a deadline and limits of its own. What they write outlives them, as long as the room
// does:
//
//	room := &bwrap.Room{Timeout: time.Hour}
//	if err := room.Start(ctx); err != nil {
//		return err
//	}
//	defer room.Close()
//	result, err := room.Command("pip", "list").Run(ctx)
//
// A sandbox shows the system's programs and libraries read-only, an empty home and /tmp in
// memory, and what [Policy] adds: the zero Policy is the strictest. Nothing of this process's
// environment (but for PATH), directory or descriptors is in it.
//
// An error says that a command never ran, or that something could not be proven or told, and
// is an [*Error] with a remedy for people. That a command has failed, or was ended, is no
// error: the [Result] has its cause, exit code, use of resources, and the verdict of the
// proof.
//
// docs/guides/library.md says what it asks of a program, and shows a back end.
package bwrap
