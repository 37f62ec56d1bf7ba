package nsenter_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/bwrap"
	"github.com/sbxrun/sbxrun/nsenter"
)

// For a sandbox of `sbxrun start --name box`, set Sandbox: "box" instead of Room.
func Example() {
	ctx := context.Background()
	room := &bwrap.Room{}
	if err := room.Start(ctx); err != nil {
		log.Fatal(err)
	}
	defer room.Close()
	way := room.Way()
	cmd := &nsenter.Command{
		Room:    &way,
		Args:    []string{"sh", "-c", "echo process $$ of its own namespace; exit 4"},
		Stdout:  os.Stdout,
		Timeout: 30 * time.Second,
	}
	result, err := cmd.Run(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Cause, result.ExitCode(), result.Verdict)
	// Output:
	// process 2 of its own namespace
	// exited 4 proven
}

// Concurrent commands end independently, each with all its processes.
func ExampleCommand_timeout() {
	ctx := context.Background()
	room := &bwrap.Room{}
	if err := room.Start(ctx); err != nil {
		log.Fatal(err)
	}
	defer room.Close()
	other := room.Command("sleep", "1000")
	if err := other.Start(ctx); err != nil {
		log.Fatal(err)
	}
	cmd := room.Command("sh", "-c", "setsid sleep 1000 & sleep 1000")
	cmd.Timeout = 100 * time.Millisecond
	result, err := cmd.Run(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Cause, result.Verdict)
	if _, err := room.Close(); err != nil {
		log.Fatal(err)
	}
	result, err = other.Wait()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Cause, result.Verdict)
	// Output:
	// timeout proven
	// killed proven
}
