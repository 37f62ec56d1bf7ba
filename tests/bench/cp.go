package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// copies compares sbxrun cp with cp(1): of a large file, from memory into a sandbox's memory and
// back, where no disk that others use decides.
func copies(builds []*build) error {
	dir, err := os.MkdirTemp("/dev/shm", "sbxrun-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := noise(from, *megabytes); err != nil {
		return err
	}
	b := builds[0]
	start := b.command("start", "--name", "cp", "--cwd", "none", "--tmp-size", fmt.Sprintf("%dM", *megabytes+1), "--timeout", "1800")
	if err := start.Run(); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	defer func() { _, _ = b.killAll() }()
	once := func(cmd *exec.Cmd, before ...*exec.Cmd) (time.Duration, error) {
		_ = os.Remove(to) // it may not be there
		for _, c := range before {
			if err := c.Run(); err != nil {
				return 0, err
			}
		}
		return elapsed(cmd)
	}
	_, err = compare("cp", fmt.Sprintf("%d MiB from memory to memory", *megabytes), rounds(5), 1, []variant{
		{"A", "sbxrun cp into a sandbox", func() (time.Duration, error) {
			return once(b.command("cp", "--max-size", "0", from, "cp:/tmp/x"), b.command("exec", "cp", "rm", "-f", "/tmp/x"))
		}},
		{"B", "sbxrun cp out of it", func() (time.Duration, error) { return once(b.command("cp", "--max-size", "0", "cp:/tmp/x", to)) }},
		{"C", "cp(1)", func() (time.Duration, error) { return once(exec.CommandContext(ctx, "cp", from, to)) }},
	})
	return err
}

// noise writes a file that no file system makes smaller.
func noise(name string, megabytes int) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	source := rand.NewChaCha8([32]byte{})
	b := make([]byte, 1<<20)
	for range megabytes {
		_, _ = source.Read(b) // it cannot fail
		if _, err := f.Write(b); err != nil {
			f.Close()
			return err
		}
	}
	return f.Close()
}
