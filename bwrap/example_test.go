package bwrap_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/sbxrun/sbxrun/bwrap"
)

func Example() {
	var out bytes.Buffer
	cmd := &bwrap.Command{
		Args:      []string{"sh", "-c", "echo from the sandbox; exit 3"},
		Stdout:    &out,
		MaxOutput: 1 << 20,
		Timeout:   30 * time.Second,
	}
	result, err := cmd.Run(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(out.String())
	fmt.Println(result.Cause, result.ExitCode(), result.Verdict)
	// Output:
	// from the sandbox
	// exited 3 proven
}

// A timeout ends all processes of the command, including those that left its session and ignore signals.
func ExampleCommand_timeout() {
	cmd := &bwrap.Command{
		Args:    []string{"sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000"},
		Timeout: 100 * time.Millisecond,
	}
	result, err := cmd.Run(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Cause, result.Status(), result.Verdict, len(result.Survivors))
	// Output: timeout killed proven 0
}

// If the command never ran, the error has a code for programs and a hint for people.
func ExampleError() {
	_, err := (&bwrap.Command{Args: []string{"no-such-program"}}).Run(context.Background())
	if e, ok := errors.AsType[*bwrap.Error](err); ok {
		fmt.Println(e.Code)
	}
	// Output: not-found
}

func ExamplePolicy() {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		log.Fatal(err)
	}
	cmd := &bwrap.Command{
		Policy: bwrap.Policy{
			Mounts: []bwrap.Mount{
				{Source: dir, Dest: "/work"},       // cannot be written to
				{Dest: "/scratch", Size: 16 << 20}, // in memory
			},
			Env: []string{"MODE=test"},
			Dir: "/work",
		},
		Args:   []string{"sh", "-c", "pwd; echo $MODE; touch x 2>/dev/null || echo read-only; touch /scratch/x && echo written"},
		Stdout: os.Stdout,
	}
	if _, err := cmd.Run(context.Background()); err != nil {
		log.Fatal(err)
	}
	// Output:
	// /work
	// test
	// read-only
	// written
}

// A room is built once. Its commands see each other's files, but not each other's processes.
func ExampleRoom() {
	ctx := context.Background()
	room := &bwrap.Room{Timeout: time.Minute}
	if err := room.Start(ctx); err != nil {
		log.Fatal(err)
	}
	for _, script := range []string{"echo kept > /tmp/file", "cat /tmp/file"} {
		cmd := room.Command("sh", "-c", script)
		cmd.Stdout = os.Stdout
		cmd.Timeout = 30 * time.Second
		if _, err := cmd.Run(ctx); err != nil {
			log.Fatal(err)
		}
	}
	result, err := room.Close()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Cause, result.Verdict)
	// Output:
	// kept
	// killed proven
}
