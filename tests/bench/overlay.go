package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// diskClient is the first argument of the measuring process in a sandbox; what to do and where
// follow.
const diskClient = "disk-client"

// Sizes of what the client reads and writes.
const (
	diskSmall  = 2000 // files of 4 KiB
	diskWrites = 20_000
	diskBlock  = 4096
)

// overlays compares an overlay whose layer is on disk with a bind of a directory on the same disk.
// One sandbox has both, and the client in it measures. The floor is a kernel overlay without a
// sandbox. Files that are read are in the page cache; files that are written were created by the
// client, and each round starts after a sync.
func overlays(builds []*build) {
	dir := got(os.MkdirTemp("/var/tmp", "sbxrun-bench-")) // on a disk (hier(7))
	defer os.RemoveAll(dir)
	for _, sub := range []string{"under", "plain"} {
		must(os.MkdirAll(filepath.Join(dir, sub, "small"), 0o755))
		noise(filepath.Join(dir, sub, "big"), 256)
		for i := range diskSmall {
			must(os.WriteFile(filepath.Join(dir, sub, "small", fmt.Sprint(i)), make([]byte, diskBlock), 0o644))
		}
	}
	b := builds[0]
	b.do("start", "--name", "disk", "--cwd", "none", "--ro-bind", self+":/bench", "--overlay", dir+"/under:/overlay", "--upper", dir+"/upper",
		"--bind", dir+"/plain:/plain", "--timeout", "1800")
	defer func() { _ = caught(func() { b.killAll() }) }()
	disk := got(os.Open(dir))
	defer disk.Close()
	alone := func(what, place string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, self, diskClient, what, place)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
		if os.Geteuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
		}
		return cmd
	}
	inside := func(what, place string) *exec.Cmd {
		return b.command("exec", "disk", "--", "/bench", diskClient, what, place)
	}
	in := func(how func(what, place string) *exec.Cmd, what, place string) func() time.Duration {
		return func() time.Duration {
			must(unix.Syncfs(int(disk.Fd())))
			return told(how(what, place))
		}
	}
	for _, m := range []struct{ what, title string }{
		{"read", "256 MiB are read, CPU time; ratios of rates are the inverse"},
		{"small", fmt.Sprintf("%d files of 4 KiB are opened and read, CPU time", diskSmall)},
		{"write", fmt.Sprintf("%d random writes of 4 KiB to a file that is in the layer, CPU time", diskWrites)},
		{"sync", fmt.Sprintf("%d random writes of 4 KiB, and fdatasync", diskWrites)},
	} {
		compare("overlay", m.title, rounds(9), 1, []variant{{"A", "overlay", in(inside, m.what, "/overlay")}, {"C", "bind", in(inside, m.what, "/plain")},
			{"D", "overlayfs alone", in(alone, m.what, mounted+dir)}, {"E", "the directory alone", in(alone, m.what, dir+"/plain")}})
	}
}

// mounted is the prefix of a place that the client mounts itself: an overlay over a directory
// "under", with its layer next to it, in its own mount namespace.
const mounted = "overlay:"

func mountOverlay(dir string) (place string) {
	place = filepath.Join(dir, "alone")
	options := fmt.Sprintf("lowerdir=%[1]s/under,upperdir=%[1]s/alone-upper,workdir=%[1]s/alone-work", dir)
	if inner, err := os.ReadFile("/proc/self/uid_map"); err != nil || !strings.HasSuffix(strings.TrimSpace(string(inner)), "4294967295") {
		options += ",userxattr" // in a user namespace (Linux 5.11)
	}
	for _, name := range []string{place, place + "-upper", place + "-work"} {
		must(os.MkdirAll(name, 0o755))
	}
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(unix.Mount("overlay", place, "overlay", 0, options))
	return place
}

// beDiskClient is the process in a sandbox. It prints the time.
func beDiskClient(what, place string) {
	if dir, ok := strings.CutPrefix(place, mounted); ok {
		place = mountOverlay(dir)
	}
	begin := used(what)
	switch what {
	case "read":
		readAway(filepath.Join(place, "big"))
	case "small":
		for i := range diskSmall {
			readAway(filepath.Join(place, "small", fmt.Sprint(i)))
		}
	default:
		begin = writeAbout(filepath.Join(place, "written"), what)
	}
	fmt.Println(used(what) - begin)
}

// used returns the CPU time of this process, which other processes affect least, or the wall-clock
// time for what waits for the disk.
func used(what string) time.Duration {
	var now unix.Timespec
	clock := int32(unix.CLOCK_PROCESS_CPUTIME_ID)
	if what == "sync" {
		clock = unix.CLOCK_MONOTONIC
	}
	_ = unix.ClockGettime(clock, &now) // cannot fail
	return time.Duration(now.Nano())
}

func readAway(name string) {
	f := got(os.Open(name))
	defer f.Close()
	// Without WriteTo, to measure read(2).
	got(io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 128<<10)))
}

// writeAbout creates the file block by block in the first round, starts writing at random, and
// returns the start time. Block by block, the page cache has single pages (/proc/kpageflags). A
// file written in megabytes has folios of 1 MiB, and one that was copied up of 64 KiB (Linux 6.18,
// ext4): a write of 4 KiB then takes 8 to 18 µs or 4 µs of CPU instead of 2, on an overlay and
// without. The result would compare folios.
func writeAbout(name, what string) (begin time.Duration) {
	f := got(os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o644))
	defer f.Close()
	const size = 256 << 20
	if got(f.Stat()).Size() < size {
		for range size / diskBlock {
			got(f.Write(make([]byte, diskBlock)))
		}
	}
	b := make([]byte, diskBlock)
	begin = used(what)
	for range diskWrites {
		got(f.WriteAt(b, rand.Int64N(size/diskBlock)*diskBlock))
	}
	if what == "sync" {
		must(unix.Fdatasync(int(f.Fd())))
	}
	return begin
}
