package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// diskClient is the first argument of the process in a sandbox that overlay measures by; what to do
// and where follow.
const diskClient = "disk-client"

// Of what the client reads and writes.
const (
	diskSmall  = 2000 // files of 4 KiB
	diskWrites = 20_000
	diskBlock  = 4096
)

// overlays compares an overlay, whose layer is on disk, with a bind of a directory beside it. One
// sandbox shows both, and the client in it measures by itself. What is read is in the page cache;
// what is written was made by the client, and each round begins with nothing that waits to be written.
func overlays(builds []*build) error {
	dir, err := os.MkdirTemp("/var/tmp", "sbxrun-bench-") // on a disk (hier(7))
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, sub := range []string{"under", "plain"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, sub, "small"), 0o755), noise(filepath.Join(dir, sub, "big"), 256)); err != nil {
			return err
		}
		for i := range diskSmall {
			if err := os.WriteFile(filepath.Join(dir, sub, "small", fmt.Sprint(i)), make([]byte, diskBlock), 0o644); err != nil {
				return err
			}
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	b := builds[0]
	if out, err := b.command("start", "--name", "disk", "--cwd", "none", "--ro-bind", self+":/bench", "--overlay", dir+"/under:/overlay", "--upper", dir+"/upper",
		"--bind", dir+"/plain:/plain", "--timeout", "1800").CombinedOutput(); err != nil {
		return fmt.Errorf("start: %w: %s", err, out)
	}
	defer func() { _, _ = b.killAll() }()
	disk, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer disk.Close()
	in := func(what, place string) func() (time.Duration, error) {
		return func() (time.Duration, error) {
			if err := unix.Syncfs(int(disk.Fd())); err != nil {
				return 0, err
			}
			cmd := b.command("exec", "disk", "--", "/bench", diskClient, what, place)
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return 0, err
			}
			return time.ParseDuration(strings.TrimSpace(string(out)))
		}
	}
	for _, m := range []struct{ what, title string }{
		{"read", "256 MiB are read; ratios of rates are the inverse"},
		{"small", fmt.Sprintf("%d files of 4 KiB are opened and read", diskSmall)},
		{"write", fmt.Sprintf("%d random writes of 4 KiB to a file that is in the layer", diskWrites)},
		{"sync", fmt.Sprintf("%d random writes of 4 KiB, and fdatasync", diskWrites)},
	} {
		if _, err := compare("overlay", m.title, rounds(9), 1, []variant{{"A", "overlay", in(m.what, "/overlay")}, {"C", "bind", in(m.what, "/plain")}}); err != nil {
			return err
		}
	}
	return nil
}

// beDiskClient is the process in a sandbox. It prints how long it took.
func beDiskClient(what, place string) error {
	begin := time.Now()
	var err error
	switch what {
	case "read":
		err = readAway(filepath.Join(place, "big"))
	case "small":
		for i := range diskSmall {
			err = errors.Join(err, readAway(filepath.Join(place, "small", fmt.Sprint(i))))
		}
	default:
		begin, err = writeAbout(filepath.Join(place, "written"), what == "sync")
	}
	if err != nil {
		return err
	}
	_, err = fmt.Println(time.Since(begin))
	return err
}

func readAway(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	// Not by WriteTo, so that it is read(2) that is measured.
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 128<<10))
	return err
}

// writeAbout returns when it has begun to write at random, to a file that it has made in the first
// round: to one that was copied up, writes were several times slower (Linux 6.18, ext4), which would
// compare how the files were made.
func writeAbout(name string, sync bool) (begin time.Time, err error) {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o644)
	if err != nil {
		return begin, err
	}
	defer f.Close()
	const size = 256 << 20
	if st, err := f.Stat(); err != nil || st.Size() < size {
		for range size >> 20 {
			if _, err := f.Write(make([]byte, 1<<20)); err != nil {
				return begin, err
			}
		}
	}
	b := make([]byte, diskBlock)
	begin = time.Now()
	for range diskWrites {
		if _, err := f.WriteAt(b, rand.Int64N(size/diskBlock)*diskBlock); err != nil {
			return begin, err
		}
	}
	if sync {
		err = unix.Fdatasync(int(f.Fd()))
	}
	return begin, err
}
