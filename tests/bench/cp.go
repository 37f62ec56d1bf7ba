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
func copies(builds []*build) {
	for _, place := range []struct{ name, above string }{{"memory", "/dev/shm"}, {"disk", "/var/tmp"}} {
		copiesIn(builds[0], place.name, place.above)
	}
}

func copiesIn(b *build, place, above string) {
	dir := got(os.MkdirTemp(above, "sbxrun-bench-"))
	defer os.RemoveAll(dir)
	from, to, inside := filepath.Join(dir, "from"), filepath.Join(dir, "to"), filepath.Join(dir, "inside")
	noise(from, *megabytes)
	must(os.Mkdir(inside, 0o700))
	args := []string{"start", "--name", "cp", "--cwd", "none", "--timeout", "1800"}
	if place == "disk" {
		args = append(args, "--bind", inside+":/tmp/inside")
	} else {
		args = append(args, "--tmpfs", fmt.Sprintf("/tmp/inside:%dM", 2*(*megabytes+1)))
	}
	b.do(args...)
	defer func() { _ = caught(func() { b.killAll() }) }()
	disk := got(os.Open(dir))
	defer disk.Close()
	b.do("cp", "--max-size", "0", from, "cp:/tmp/inside/out")
	once := func(cmd *exec.Cmd, before ...*exec.Cmd) time.Duration {
		_ = os.Remove(to) // it may not exist
		for _, c := range before {
			must(c.Run())
		}
		must(unix.Syncfs(int(disk.Fd())))
		return elapsed(cmd)
	}
	compare("cp", fmt.Sprintf("%d MiB from %s to %[2]s", *megabytes, place), rounds(5), 1, []variant{
		{"A", "sbxrun cp into a sandbox", func() time.Duration {
			return once(b.command("cp", "--max-size", "0", from, "cp:/tmp/inside/x"), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
		{"B", "sbxrun cp out of it", func() time.Duration {
			return once(b.command("cp", "--max-size", "0", "cp:/tmp/inside/out", to), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
		{"C", "cp(1)", func() time.Duration {
			return once(exec.CommandContext(ctx, "cp", from, to), b.command("exec", "cp", "rm", "-f", "/tmp/inside/x"))
		}},
	})
}

// noise writes a file that no file system can compress.
func noise(name string, megabytes int) {
	f := got(os.Create(name))
	defer f.Close()
	source := rand.NewChaCha8([32]byte{})
	b := make([]byte, 1<<20)
	for range megabytes {
		_, _ = source.Read(b) // cannot fail
		got(f.Write(b))
	}
}
