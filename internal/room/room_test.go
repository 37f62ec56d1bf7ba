package room

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// play runs a policy with the identity of the tests until all processes have exited. It returns the payload's output
// and wait status, nil if that is unknown.
func play(t *testing.T, p Policy) (stdout string, end *result.Payload) {
	t.Helper()
	plan := prepare(t, p, os.Getuid())
	r, w := harness.Pipe(t)
	null := harness.Null(t)
	sb, err := plan.Start(t.Context(), [3]*os.File{null, w, os.Stderr}, nil, false)
	w.Close()
	check.Must(t, err)
	defer sb.Close()
	text := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(r) // after an error, the test compares the partial output
		text <- string(b)
	}()
	sb.Exec.Release()
	deadline := time.Now().Add(20 * time.Second)
	select {
	case <-sb.Exec.Exited():
		end, _, err = sb.Exec.ExitStatus()
		check.That(t, err == nil, "the payload's end: %v", err)
	case <-time.After(time.Until(deadline)):
		t.Error("the payload does not end")
	}
	sb.Keeper.Kill()
	_, err = sb.Keeper.Empty(deadline)
	check.Must(t, err)
	check.Must(t, sb.Keeper.Reap(deadline))
	return <-text, end
}

func shell(script string) []string { return []string{"sh", "-c", script} }

// Mounts in a writable bind without links appear at their destinations with the right contents.
func TestStartMountInWritableBind(t *testing.T) {
	top := laidOut(t, "w/dir/", "ro/file")
	everybody(t, top+"/w")
	everybody(t, top+"/w/dir")
	p := Policy{Workdir: "/w", Command: shell("echo new >/w/dir/f && cat /w/new/ro/file >/dev/null && ls -R /w && touch /w/x"), Mounts: []Mount{
		{Kind: ReadWrite, Source: top + "/w", Dest: "/w"},
		{Kind: Tmpfs, Dest: "/w/dir"},
		{Kind: ReadOnly, Source: top + "/ro", Dest: "/w/new/ro"},
	}}
	want := "/w:\ndir\nnew\n\n/w/dir:\nf\n\n/w/new:\nro\n\n/w/new/ro:\nfile\n"
	got, end := play(t, p)
	check.That(t, got == want && end != nil && end.Code() == 0, "got %q, %+v; want %q", got, end, want)
	check.Equal(t, filesBelow(t, top+"/w"), "dir new new/ro x", "on the host afterwards")
}

// everybody makes a directory writable for everybody. If root runs the tests, the directory then belongs to the
// payload's uid, so the bind needs no idmapping, which some file systems do not support.
func everybody(t *testing.T, dir string) {
	t.Helper()
	err := os.Chmod(dir, 0o777)
	if err == nil && os.Geteuid() == 0 {
		err = os.Chown(dir, Nobody, Nobody)
	}
	check.Must(t, err)
}

// directory creates a directory below parent that everybody can reach.
func directory(t *testing.T, parent string) string {
	t.Helper()
	dir, err := os.MkdirTemp(parent, "sbxrun-test-")
	check.Must(t, err)
	t.Cleanup(func() {
		check.OK(t, os.RemoveAll(dir))
	})
	check.Must(t, os.Chmod(dir, 0o755))
	return dir
}

// A source may be a link into /tmp, which the staging directory of root's sources hides.
func TestStartSourceLinksIntoTmp(t *testing.T) {
	data, links := directory(t, "/tmp"), directory(t, "/var/tmp")
	private := laidOut(t, "private/") + "/private"
	err := errors.Join(
		os.WriteFile(data+"/file", []byte("shared\n"), 0o644),
		os.WriteFile(private+"/file", []byte("private\n"), 0o644),
		os.Symlink(data, links+"/link"), os.Symlink("/tmp", links+"/way"), os.Symlink("link", links+"/twice"), os.Symlink(data, private+"/link"),
		os.Chmod(filepath.Dir(private), 0o700),
	)
	check.Must(t, err)
	for _, source := range []string{data, links + "/link", links + "/link/file", links + "/twice", links + "/way/" + filepath.Base(data), private + "/link", private + "/link/file"} {
		dest := "/b"
		if filepath.Base(source) == "file" {
			dest = "/b/file"
		}
		mounts := []Mount{{Source: source, Dest: dest}, {Source: private, Dest: "/a"}}
		p := Policy{Command: []string{"cat", "/b/file", "/a/file"}, Workdir: "/tmp", Mounts: mounts}
		got, end := play(t, p)
		check.That(t, got == "shared\nprivate\n" && end != nil && end.Code() == 0, "%s: got %q, %+v", source, got, end)
		if filepath.Dir(source) == private || filepath.Dir(filepath.Dir(source)) == private {
			continue // tested only with the second mount, which makes root stage all sources
		}
		p.Command, p.Mounts = p.Command[:2], mounts[:1]
		got, end = play(t, p)
		check.That(t, got == "shared\n" && end != nil && end.Code() == 0, "%s alone: got %q, %+v", source, got, end)
	}
}

// reachableFake is a fake bwrap that root's unprivileged uid can execute, too.
func reachableFake(t *testing.T, text string) string {
	t.Helper()
	dir := fake(t, text, 0o755)
	for d := dir; d != filepath.Clean(os.TempDir()) && d != "/"; d = filepath.Dir(d) {
		check.Must(t, os.Chmod(d, 0o755))
	}
	return dir
}

// A failure to enter the room is not reported as a failure of bwrap.
func TestStartCannotEnter(t *testing.T) {
	plan := prepare(t, Policy{Command: []string{"/bin/true"}, Workdir: "/tmp"}, os.Getuid())
	impossible := 5000
	plan.Bounds.OOMScoreAdj = &impossible
	null := harness.Null(t)
	sb, err := plan.Start(t.Context(), [3]*os.File{null, null, null}, nil, false)
	check.That(t, sb == nil && result.CodeOf(err) == "setup" && err.Error() == "cannot set up the sandbox: set oom_score_adj: invalid argument", "got %v, %v", sb, err)
}

// Start fails if the room cannot be furnished, with and without a command.
func TestStartUnfurnished(t *testing.T) {
	const tmpfs = "cannot set up the sandbox: set the size and mode of a tmpfs: "
	const file = "cannot set up the sandbox: copy a file into the room: "
	for _, tt := range []struct {
		name, want string
		op         op
	}{
		{"not there", tmpfs + "no such file or directory", op{kind: opTmpfs, dst: "/none", size: 1}},
		{"no mount", tmpfs + "invalid argument", op{kind: opTmpfs, dst: "/etc", size: 1}},
		{"behind a link", tmpfs + "too many levels of symbolic links", op{kind: opTmpfs, dst: "/proc/self/root", size: 1}},
		{"not a size", tmpfs + "invalid argument", op{kind: opTmpfs, dst: "/tmp", size: -1}},
		{"no such directory", file + "no such file or directory", op{kind: opCopy, dst: "/none/file"}},
		{"there already", file + "file exists", op{kind: opCopy, dst: "/etc/passwd"}},
		{"in what a link leads to", file + "too many levels of symbolic links", op{kind: opCopy, dst: "/proc/self/root/file"}},
	} {
		for _, command := range [][]string{nil, {"/bin/true"}} {
			plan := prepare(t, Policy{Command: command, Workdir: "/tmp"}, os.Geteuid())
			null := harness.Null(t)
			plan.ops = append(plan.ops, tt.op)
			sb, err := plan.Start(t.Context(), [3]*os.File{null, null, null}, nil, false)
			check.That(t, sb == nil && result.CodeOf(err) == "setup" && err.Error() == tt.want, "%s, command %q: got %v, %v", tt.name, command, sb, err)
		}
	}
	left, err := proc.Children(os.Getpid())
	check.That(t, err == nil && len(left) == 0, "left: %v, %v", left, err)
}

// If bwrap exits at once, the error says only that.
func TestStartBwrapExitsAtOnce(t *testing.T) {
	null := harness.Null(t)
	for name, tt := range map[string]struct{ bwrap, want string }{
		"exits":          {script("exit 99"), "bubblewrap could not set up the sandbox: it exited with 99"},
		"tells why":      {script("exit 1"), "bubblewrap could not set up the sandbox"},
		"is killed":      {script("kill -9 $$"), "bubblewrap could not set up the sandbox: it was killed by SIGKILL"},
		"cannot execute": {"#!/none/interpreter\nbubblewrap 0.8.0\x00--as-pid-1\x00", "cannot set up the sandbox: exec bwrap: no such file or directory"},
	} {
		dir := reachableFake(t, tt.bwrap)
		for range 20 {
			plan, err := Prepare(Policy{Command: []string{"/bin/true"}, Workdir: "/tmp"}, Caller{Bwrap: filepath.Join(dir, "bwrap"), UID: os.Getuid(), GID: os.Getgid()})
			check.Must(t, err)
			sb, err := plan.Start(t.Context(), [3]*os.File{null, null, null}, nil, false)
			plan.Close()
			check.Require(t, sb == nil && result.CodeOf(err) == "setup" && err.Error() == tt.want, "%s: got %v, %v; want %s", name, sb, err, tt.want)
			// All processes have exited and been reaped.
			pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
			check.Require(t, err == unix.ECHILD, "%s: left behind: %d, %v", name, pid, err)
		}
	}
}

// Whatever PID bwrap reports, the PID 1 of a room must be a grandchild of the room's keeper and the first process of a
// PID namespace.
func TestVerify(t *testing.T) {
	plan := prepare(t, Policy{Workdir: "/tmp"}, os.Getuid())
	null := harness.Null(t)
	sb, err := plan.Start(t.Context(), [3]*os.File{null, null, os.Stderr}, nil, false)
	check.Must(t, err)
	defer sb.Close()
	verify := func(init, keeper *proc.Process) error {
		r := &Room{Kept: proc.Kept{Room: init, Keeper: &proc.Keeper{Process: proc.Process{PID: keeper.PID}}}}
		err := r.verify()
		if r.Monitor != nil {
			r.Monitor.Close()
		}
		return err
	}
	check.Must(t, verify(sb.Room, &sb.Keeper.Process))
	check.That(t, verify(sb.Room, &proc.Process{PID: os.Getpid()}) != nil, "it is taken for another keeper's")
	check.That(t, verify(sb.Monitor, &proc.Process{PID: os.Getpid()}) != nil, "the monitor is taken for it")
	deadline := time.Now().Add(20 * time.Second)
	sb.Keeper.Kill()
	_, err = sb.Keeper.Empty(deadline)
	check.Must(t, err)
	check.That(t, verify(sb.Room, &sb.Keeper.Process) != nil, "it has ended, and is taken for alive")
	check.Must(t, sb.Keeper.Reap(deadline))
}
