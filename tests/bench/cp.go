package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// copies compares sbxrun cp with cp(1) for a large file: between memory and a sandbox's memory,
// where no disk matters; and on a disk, from the page cache to a new file, after a sync.
func copies(builds []*build) error {
	for _, place := range []struct{ name, above string }{{"memory", "/dev/shm"}, {"disk", "/var/tmp"}} {
		if err := copiesIn(builds[0], place.name, place.above); err != nil {
			return err
		}
	}
	return nil
}

func copiesIn(b *build, place, above string) error {
	dir, err := os.MkdirTemp(above, "sbxrun-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	from, to, inside := filepath.Join(dir, "from"), filepath.Join(dir, "to"), filepath.Join(dir, "inside")
	if err := noise(from, *megabytes); err != nil {
		return err
	}
	if err := os.Mkdir(inside, 0o700); err != nil {
		return err
	}
	args := []string{"start", "--name", "cp", "--cwd", "none", "--timeout", "1800"}
	if place == "disk" {
		args = append(args, "--bind", inside+":/tmp/inside")
	} else {
		args = append(args, "--tmpfs", fmt.Sprintf("/tmp/inside:%dM", 2*(*megabytes+1)))
	}
	if out, err := b.command(args...).CombinedOutput(); err != nil {
		return fmt.Errorf("start: %w: %s", err, out)
	}
	defer func() { _, _ = b.killAll() }()
	disk, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer disk.Close()
	if err := b.command("cp", "--max-size", "0", from, "cp:/tmp/inside/out").Run(); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	once := func(cmd *exec.Cmd, before ...*exec.Cmd) (time.Duration, error) {
		_ = os.Remove(to) // it may not exist
		for _, c := range before {
			if err := c.Run(); err != nil {
				return 0, err
			}
		}
		if err := unix.Syncfs(int(disk.Fd())); err != nil {
			return 0, err
		}
		return elapsed(cmd)
	}
	_, err = compare("cp", fmt.Sprintf("%d MiB from %s to %[2]s", *megabytes, place), rounds(5), 1, []variant{
		{"A", "sbxrun cp into a sandbox", func() (time.Duration, error) {
			return once(b.command("cp", "--max-size", "0", from, "cp:/tmp/inside/x"), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
		{"B", "sbxrun cp out of it", func() (time.Duration, error) {
			return once(b.command("cp", "--max-size", "0", "cp:/tmp/inside/out", to), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
		{"C", "cp(1)", func() (time.Duration, error) {
			return once(exec.CommandContext(ctx, "cp", from, to), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
	})
	return err
}

// noise writes a file that no file system can compress.
func noise(name string, megabytes int) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	source := rand.NewChaCha8([32]byte{})
	b := make([]byte, 1<<20)
	for range megabytes {
		_, _ = source.Read(b) // cannot fail
		if _, err := f.Write(b); err != nil {
			f.Close()
			return err
		}
	}
	return f.Close()
}
