package cleanup

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/tests/check"
)

// The tests create what crashes leave behind: records without a supervisor, and abandoned sandboxes. The processes
// run this binary, with a role in sweepRole, and the program of a sandbox's PID 1. All run in a separate PID namespace:
// a sweep by root ends every abandoned sandbox that it sees, and other packages' tests sweep, too.
const sweepRole = "SBXRUN_SWEEP_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(sweepRole)
	if role == "" || role == "first" {
		runtime.LockOSThread() // capabilities belong to a thread, and a child dies with the thread that started it
	}
	switch role {
	case "":
		attr := &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
		if uid, gid := os.Getuid(), os.Getgid(); uid != 0 {
			attr.Cloneflags |= unix.CLONE_NEWUSER
			attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
			attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
			attr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN} // for mount
		}
		os.Exit(again("first", attr))
	case "first": // PID 1, which cannot be in a record
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("proc", "/proc", "proc", 0, ""),
			unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(again("tests", &syscall.SysProcAttr{}))
	case "tests":
		os.Exit(runTests(m))
	default:
		os.Exit(play(role))
	}
}

// again executes this binary with a role and the same arguments, and returns its exit code.
func again(role string, attr *syscall.SysProcAttr) int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), sweepRole+"="+role)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	attr.Pdeathsig = unix.SIGKILL
	cmd.SysProcAttr = attr
	if err := cmd.Run(); cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

func runTests(m *testing.M) int {
	// Orphans are reparented to this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	// A sweep takes processes with its own executable for sbxrun.
	dir, err := os.MkdirTemp("", "sweep")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	text, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "stranger"), text, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "hold"), []byte(helper.HoldProgram()), 0o755)
	}
	if err = errors.Join(err, os.Setenv(sweepFiles, dir), os.Setenv("SBXRUN_DATA_DIR", dir+"/data")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// play plays a role until stdin ends: it starts the remaining roles as its child and then waits. "name:" sets the
// process name.
func play(roles string) int {
	role, rest, _ := strings.Cut(roles, ",")
	if name, found := strings.CutPrefix(role, "name:"); found {
		if err := os.WriteFile("/proc/self/comm", []byte(name), 0); err != nil {
			return 1
		}
	}
	if role != "keeper" && role != "monitor" {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return 1
		}
	}
	if rest != "" {
		child, err := actor(rest)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 2
		}
		child.Stdin = os.Stdin
		said, out, err := os.Pipe()
		if err != nil {
			return 3
		}
		child.Stdout = out
		for len(child.ExtraFiles) < 2 {
			child.ExtraFiles = append(child.ExtraFiles, os.Stderr)
		}
		// PID 1 reports on descriptor 5 that it is running.
		child.ExtraFiles = slices.Insert(child.ExtraFiles, 2, out)
		if err := child.Start(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 4
		}
		out.Close()
		if _, err := said.Read(make([]byte, 32)); err != nil {
			return 5
		}
	}
	fmt.Println("ready")
	os.Stdin.Read(make([]byte, 1)) // ends with the test
	return 0
}

// actor is a process that plays the roles, each as a child of the one before. A keeper makes a session, and its
// descendants outlive it. "room" is PID 1 of a PID namespace and executes the program of a sandbox's PID 1, "about to"
// is the bwrap before that, and "waits" a bwrap of doctor. The other roles resemble these.
func actor(roles string) (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{sweepRole + "=" + roles}
	role, _, _ := strings.Cut(roles, ",")
	if role == "stranger" || strings.HasPrefix(role, "name:") {
		cmd.Path = filepath.Join(os.Getenv(sweepFiles), "stranger")
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: role == "keeper" || role == "apart"}
	first := func() {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID
		if os.Geteuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
			// Root in there, so that it can do the same again.
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}}
		}
	}
	switch role {
	case "room", "about to", "waits", "mapped", "other", "twin", "copy", "second", "apart":
		hold, err := helper.HoldFile()
		if err != nil {
			return nil, err
		}
		if role == "other" || role == "twin" {
			text := []byte(helper.HoldProgram())
			if role == "other" {
				text = append(text, 0)
			} else { // an unused byte (elf(5), EI_PAD)
				text[15] = 1
			}
			if hold, err = helper.MemoryFile("room", string(text)); err != nil {
				return nil, err
			}
		}
		cmd.ExtraFiles = []*os.File{hold, os.Stderr}
		cmd.Path, cmd.Args = "/proc/self/fd/3", []string{"/proc/self/fd/6"}
		if role == "copy" {
			cmd.Path = filepath.Join(os.Getenv(sweepFiles), "hold")
		}
		if role == "about to" || role == "waits" || role == "mapped" {
			cmd.Path, cmd.Args = "/proc/self/exe", []string{"bwrap"}
			cmd.ExtraFiles = []*os.File{os.Stderr, os.Stderr, hold} // descriptors 3, 4 and 6, with 5 in between
		}
		switch role {
		case "second":
		case "mapped":
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}}
			fallthrough
		case "waits":
			cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER
		default:
			first()
		}
	case "nest", "plain init":
		first()
	case "name:sbxrun-room":
		cmd.Args = []string{"bwrap", "/proc/self/fd/6"}
		first()
	}
	cmd.Env = append(cmd.Env, sweepFiles+"="+os.Getenv(sweepFiles))
	return cmd, nil
}

// sweepFiles names the directory with "stranger", a copy of the test binary, and "hold", the program of a
// sandbox's PID 1.
const sweepFiles = "SBXRUN_SWEEP_FILES"

// cast starts actors and returns the PID of the innermost one in the host's namespace.
func cast(t *testing.T, roles string) (inner *proc.Process) {
	t.Helper()
	inner, _ = castBelow(t, roles)
	return inner
}

// castBelow returns all of them, from the outermost on.
func castBelow(t *testing.T, roles string) (inner *proc.Process, all []*proc.Process) {
	t.Helper()
	cmd, err := actor(roles)
	check.Must(t, err)
	stdin, err := cmd.StdinPipe()
	check.Must(t, err)
	out, err := cmd.StdoutPipe()
	check.Must(t, err)
	cmd.Stderr = os.Stderr
	check.Must(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill() // may have ended
		_ = cmd.Wait()
		for _, p := range all {
			_ = p.Signal(unix.SIGKILL) // may have ended
			check.OK(t, p.Wait(time.Now().Add(time.Minute)))
			_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil) // if it is our child by now
			p.Close()
		}
	})
	_, err = out.Read(make([]byte, 32))
	check.Require(t, err == nil, "no word of %s: %v", roles, err)
	pid := cmd.Process.Pid
	for i := range 1 + strings.Count(roles, ",") {
		if i > 0 {
			children, err := proc.Children(pid)
			check.Require(t, err == nil && len(children) != 0, "%s: %d has no child: %v", roles, pid, err)
			pid = children[0]
		}
		inner, err = proc.Open(pid)
		check.Must(t, err)
		all = append(all, inner)
	}
	return inner, all
}

// findings returns the findings of a sweep about one process.
func findings(found []Finding, pid int) (mine []Finding) {
	for _, f := range found {
		if f.PID == pid {
			mine = append(mine, f)
		}
	}
	return mine
}

// unkeep kills the keeper of a cast and waits for its end.
func unkeep(t *testing.T, roles string, all []*proc.Process) {
	t.Helper()
	keeper := all[slices.Index(strings.Split(roles, ","), "keeper")]
	check.Must(t, keeper.Signal(unix.SIGKILL))
	check.Must(t, keeper.Wait(time.Now().Add(time.Minute)))
}

// A sandbox is ended when its keeper is dead and no sbxrun is above it. Similar processes never are. Each case is
// also tried with the keeper alive, when nothing may be touched.
func TestAbandoned(t *testing.T) {
	for _, test := range []struct {
		roles     string
		abandoned bool
	}{
		{"stranger,keeper,room", true},
		{"stranger,keeper,monitor,room", true}, // its monitor is dying
		{"stranger,keeper,about to", true},
		{"stranger,keeper,monitor,about to", true},
		{"stranger,keeper,waits", true},
		{"stranger,keeper,monitor,waits", true},
		{"name:sbxrun,keeper,monitor,waits", false},
		{"name:sbxrun,keeper,room", false}, // sbxrun will end it
		{"name:sbxrun,keeper,monitor,room", false},
		{"name:" + proc.KeeperName + ",keeper,room", false},
		{"parent,keeper,room", false}, // sbxrun under another name
		{"parent,keeper,monitor,room", false},
		// Decoys.
		{"stranger,keeper,name:sbxrun-room", false},         // same name, arguments and number 1, but another program
		{"stranger,keeper,monitor,name:sbxrun-room", false}, //
		{"stranger,keeper,nest,room", false},                // in a nested namespace, as a command can make
		{"stranger,keeper,nest,about to", false},
		{"stranger,keeper,second", false},     // not the first of its namespace
		{"stranger,keeper,mapped", false},     // bwrap's child, which ends by itself
		{"stranger,keeper,nest,waits", false}, // in a nested namespace
		{"stranger,keeper,other", false},      // another program in a memfd of that name
		{"stranger,keeper,twin", false},       // the same with the same size
		{"stranger,keeper,copy", false},       // the program in a file
		{"stranger,keeper,apart", false},      // in its own session
		{"stranger,keeper,plain init", false}, // another program's
	} {
		t.Run(test.roles, func(t *testing.T) {
			room, all := castBelow(t, test.roles)
			s := sweep{}
			s.process(room.PID)
			check.Require(t, len(s.found) == 0 && !room.Exited(), "touched, with its keeper alive: %+v", s.found)
			unkeep(t, test.roles, all)
			s = sweep{Options: Options{DryRun: true}}
			s.process(room.PID)
			got := len(findings(s.found, room.PID)) == 1
			check.Require(t, got == test.abandoned, "found %+v, want abandoned: %v", s.found, test.abandoned)
			check.Require(t, !room.Exited(), "a look has ended it")
			s = sweep{}
			s.process(room.PID)
			mine := findings(s.found, room.PID)
			if !test.abandoned {
				check.That(t, len(mine) == 0 && !room.Exited(), "touched: %+v", mine)
				return
			}
			check.That(t, len(mine) == 1 && mine[0].Done && mine[0].Kind == "held-init" && mine[0].Err == "" && room.Exited(), "not ended: %+v", mine)
			s = sweep{}
			s.process(room.PID) // a zombie by now, or reaped
			for _, f := range findings(s.found, room.PID) {
				check.That(t, f.Kind == "zombie", "ended twice: %+v", f)
			}
		})
	}
}

// A process started by hand that executes the program of a sandbox's PID 1 has no keeper that could be dead.
func TestAbandonedByHand(t *testing.T) {
	for _, roles := range []string{"parent,room", "stranger,room", "parent,about to", "stranger,about to"} {
		room := cast(t, roles)
		s := sweep{}
		s.process(room.PID)
		check.That(t, len(s.found) == 0 && !room.Exited(), "%s: touched: %+v", roles, s.found)
	}
}

// Concurrent sweeps all succeed.
func TestAbandonedRace(t *testing.T) {
	for range 5 {
		room, all := castBelow(t, "stranger,keeper,room")
		unkeep(t, "stranger,keeper,room", all)
		done := make(chan []Finding)
		const n = 4
		for range n {
			go func() {
				s := sweep{}
				s.process(room.PID)
				done <- s.found
			}()
		}
		for range n {
			for _, f := range <-done {
				check.That(t, f.Err == "", "%+v", f)
			}
		}
		check.That(t, room.Exited(), "not ended")
	}
}

// A zombie is reported with the parent, which alone can reap it.
func TestZombie(t *testing.T) {
	zombie := cast(t, "name:"+proc.KeeperName)
	check.Must(t, zombie.Signal(unix.SIGKILL))
	check.Must(t, zombie.Wait(time.Now().Add(time.Minute)))
	for _, dry := range []bool{true, false} {
		s := sweep{Options: Options{DryRun: dry}}
		s.process(zombie.PID)
		check.That(t, len(s.found) == 1 && s.found[0].Kind == "zombie" && !s.found[0].Done && strings.Contains(s.found[0].What, strconv.Itoa(os.Getpid())), "%+v", s.found)
		st, err := proc.ReadStat(zombie.PID)
		check.Require(t, err == nil && st.State == "Z", "it was collected, and that is its parent's to do: %+v, %v", st, err)
	}
}

// record describes a record to create.
type record struct {
	init, supervisor proc.Identity
	report           *result.Report
	created          time.Time
	alive            bool
}

// recorded creates a state directory with one sandbox in it.
func recorded(t *testing.T, r record) (*state.Dir, string) {
	t.Helper()
	root := filepath.Join(t.TempDir(), "state")
	dir, err := state.Open(state.Caller{StateDir: root, UID: os.Geteuid()})
	check.Must(t, err)
	t.Cleanup(func() { dir.Close() })
	const id = "0123456789abcdef"
	own, err := dir.Create(id, "box")
	check.Must(t, err)
	rec := state.Record{Phase: state.Running, Supervisor: r.supervisor, Argv: []string{}, CreatedAt: r.created.UTC().Format(result.TimeFormat), Report: r.report}
	if r.report != nil {
		rec.Phase = state.Ended
	}
	if r.init.PID != 0 {
		rec.Init = &r.init
	}
	check.Must(t, own.Write(rec))
	if r.alive {
		t.Cleanup(func() { own.Close() })
	} else if err := own.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, filepath.Join(root, id)
}

func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
	return err == nil
}

// noProc returns the findings about records. Other tests have processes and cgroups.
func noProc(dir *state.Dir, o Options) []Finding {
	s := sweep{Options: o}
	s.all(dir)
	return slices.DeleteFunc(s.found, func(f Finding) bool { return f.Kind == "held-init" || f.Kind == "zombie" || f.Kind == "cgroup" })
}

func TestSweepRecords(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	check.Must(t, err)
	bystander, other := cast(t, "plain init"), cast(t, "parent")
	stranger, err := proc.Identify(other.PID)
	check.Must(t, err)
	exact, err := proc.Identify(bystander.PID)
	check.Must(t, err)
	changed := func(f func(*proc.Identity)) proc.Identity {
		id := exact
		f(&id)
		return id
	}
	now := time.Now()
	hour := func(n time.Duration) time.Time { return now.Add(-n * time.Hour) }
	report := func(d time.Duration) *result.Report {
		r := result.Result{Cause: result.Killed, Verdict: result.Proven, StartedAt: now, Duration: d}.Report("0123456789abcdef", []string{})
		return &r
	}
	gone := changed(func(id *proc.Identity) { id.Start-- })
	for _, test := range []struct {
		name    string
		record  record
		o       Options
		removed bool
	}{
		{"dead", record{init: gone, created: now}, Options{}, true},
		{"never had an init", record{created: now}, Options{}, true},
		{"ended", record{init: gone, report: report(time.Second), created: now}, Options{}, true},
		{"alive", record{init: gone, created: hour(100), alive: true}, Options{}, false},
		{"dry run", record{init: gone, created: now}, Options{DryRun: true}, false},
		{"quick", record{init: gone, created: hour(100)}, Options{Quick: true}, false},
		{"records are kept", record{init: gone, created: hour(100)}, Options{KeepRecords: true}, false},
		{"young", record{created: hour(1)}, Options{OlderThan: 2 * time.Hour}, false},
		{"old", record{created: hour(3)}, Options{OlderThan: 2 * time.Hour}, true},
		{"old, ended lately", record{report: report(2 * time.Hour), created: hour(3)}, Options{OlderThan: 2 * time.Hour}, false},
		{"old, ended long ago", record{report: report(time.Minute), created: hour(3)}, Options{OlderThan: 2 * time.Hour}, true},
		{"of the future", record{created: hour(-100)}, Options{OlderThan: time.Hour}, false},
		{"another start time", record{init: changed(func(id *proc.Identity) { id.Start++ }), created: now}, Options{}, true},
		{"another boot", record{init: changed(func(id *proc.Identity) { id.BootID = "x" }), created: now}, Options{}, true},
		{"another namespace", record{init: changed(func(id *proc.Identity) { id.PIDNS++ }), created: now}, Options{}, true},
		{"no init", record{init: stranger, created: now}, Options{}, true},
		{"exact, but alive", record{init: exact, created: now, alive: true}, Options{}, false},
		{"exact, dry run", record{init: exact, created: now}, Options{DryRun: true}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.record.supervisor = self
			dir, path := recorded(t, test.record)
			found := noProc(dir, test.o)
			removed := !exists(t, path)
			check.That(t, removed == test.removed, "removed: %v, want %v; found %+v", removed, test.removed, found)
			for _, f := range found {
				check.That(t, f.Err == "" && (!f.Done || !test.o.DryRun), "%+v", f)
			}
			check.Require(t, !bystander.Exited() && !other.Exited(), "a stranger was ended: %+v", found)
		})
	}
	t.Run("unreadable time", func(t *testing.T) {
		dir, path := recorded(t, record{supervisor: self, created: now})
		edit(t, path, func(r map[string]any) { r["created_at"] = "\x1b" })
		noProc(dir, Options{OlderThan: time.Hour})
		check.That(t, !exists(t, path), "a record without a time is kept for ever")
	})
	// Its sandbox may still exist, and could not be found without the record.
	t.Run("cannot be verified", func(t *testing.T) {
		tasks, err := os.ReadDir("/proc/self/task")
		check.Must(t, err)
		tid, err := strconv.Atoi(tasks[len(tasks)-1].Name())
		check.Must(t, err)
		thread, err := proc.Identify(tid) // threads have no pidfd (pidfd_open(2))
		check.Must(t, err)
		dir, path := recorded(t, record{init: thread, supervisor: self, created: now})
		found := noProc(dir, Options{})
		check.That(t, len(found) == 1 && found[0].Kind == "init" && found[0].PID == tid && found[0].Err != "" && !found[0].Done, "%+v", found)
		check.That(t, exists(t, path), "the record was removed")
	})
	// Last, because the others must not do this.
	t.Run("exact", func(t *testing.T) {
		dir, path := recorded(t, record{init: exact, supervisor: self, created: now})
		found := noProc(dir, Options{Quick: true})
		check.That(t, bystander.Exited() && len(found) == 1 && found[0].Done, "an init without its supervisor was not ended: %+v", found)
		check.That(t, exists(t, path), "a quick sweep has removed a record")
		noProc(dir, Options{})
		check.That(t, !exists(t, path), "the record is still there")
	})
}

func edit(t *testing.T, path string, change func(map[string]any)) {
	t.Helper()
	name := filepath.Join(path, "record.json")
	data, err := os.ReadFile(name)
	check.Must(t, err)
	var r map[string]any
	check.Must(t, json.Unmarshal(data, &r))
	change(r)
	data, err = json.Marshal(r)
	check.Must(t, err)
	check.Must(t, os.WriteFile(name, data, 0o600))
}

// A sweep removes the files of a killed apply with its note, unless it is quick.
func TestSweepApplies(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	check.Must(t, err)
	dir, path := recorded(t, record{supervisor: self, created: time.Now()})
	source := t.TempDir()
	left, note := filepath.Join(source, ".sbxrun-left"), filepath.Join(filepath.Dir(path), "apply-0123456789abcdef")
	kept, old := filepath.Join(source, ".sbxrun-apply"), filepath.Join(filepath.Dir(path), "apply-0123456789abcdee")
	for _, dir := range []string{left, kept} {
		check.Must(t, errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "1"), nil, 0o600)))
	}
	top, err := os.Open(left)
	check.Must(t, err)
	defer top.Close()
	id, err := tree.Identity(int(top.Fd()))
	check.Must(t, err)
	text, err := result.JSON(overlay.Staging{Source: []byte(source), Name: filepath.Base(left), Identity: id})
	check.Must(t, errors.Join(err, os.WriteFile(note, text, 0o600), os.WriteFile(old, []byte(source), 0o600)))
	noProc(dir, Options{KeepRecords: true})
	check.That(t, exists(t, left) && exists(t, note), "a sweep for processes has removed something")
	found := noProc(dir, Options{})
	check.That(t, !exists(t, left) && !exists(t, note) && !exists(t, old), "something is left: %+v", found)
	check.That(t, exists(t, filepath.Join(kept, "1")), "a directory that no note has the identity of was emptied")
}

// With KeepRecords a sweep still ends processes, with or without a record.
func TestSweepKeepsRecords(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	check.Must(t, err)
	known := cast(t, "plain init")
	unknown, all := castBelow(t, "stranger,keeper,room")
	unkeep(t, "stranger,keeper,room", all)
	id, err := proc.Identify(known.PID)
	check.Must(t, err)
	dir, path := recorded(t, record{init: id, supervisor: self, created: time.Now()})
	found, err := Sweep(Options{StateDir: dir.Path(), KeepRecords: true})
	check.Must(t, err)
	check.That(t, known.Exited() && unknown.Exited() && exists(t, path), "ended: %v, %v; the record is there: %v; found %+v", known.Exited(), unknown.Exited(), exists(t, path), found)
}

// A damaged record of a dead sandbox is removed, and one of a living sandbox stays. Sandboxes that are being made
// or removed are left alone.
func TestSweepDamaged(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	check.Must(t, err)
	for _, alive := range []bool{true, false} {
		dir, path := recorded(t, record{supervisor: self, created: time.Now(), alive: alive})
		check.Must(t, os.WriteFile(filepath.Join(path, "record.json"), []byte("{"), 0o600))
		hidden := filepath.Join(filepath.Dir(path), ".fedcba9876543210")
		check.Must(t, os.Mkdir(hidden, 0o700))
		found := noProc(dir, Options{DryRun: true})
		check.That(t, exists(t, path) && exists(t, hidden), "a look has removed something")
		check.That(t, len(found) != 0, "nothing was found")
		noProc(dir, Options{KeepRecords: true})
		check.That(t, exists(t, path) && exists(t, hidden), "a sweep for processes has removed something")
		found = noProc(dir, Options{})
		check.That(t, exists(t, path) == alive && !exists(t, hidden), "alive %v: is there: %v, %v; found %+v", alive, exists(t, path), exists(t, hidden), found)
		for _, f := range found {
			check.That(t, !f.Done || !alive || !strings.Contains(f.What, filepath.Base(path)), "said to be removed, and is not: %+v", f)
		}
	}
}
