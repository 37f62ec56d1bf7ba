// Command bench measures sbxrun from outside, from the start of a process to its exit, against the
// same work without sbxrun and against another build. It runs the alternatives in turn, round by
// round: machines differ and are noisy, so only the ratios mean something. It never passes or
// fails.
//
// tests/README.md describes the programs, and how to make another build.
package main

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

var (
	binary    = flag.String("sbxrun", "bin/sbxrun", "the program to measure")
	old       = flag.String("old", "", "another build of it, to compare with")
	oldCommit = flag.String("old-commit", "", "build that from a commit of the repository in the current directory")
	pairs     = flag.Int("n", 0, "how many rounds to measure; 0: each program's default")
	only      = flag.String("only", "startup,exec,teardown,idle,fork", "which programs to run, of these and limits, hogs, budget, network, http, stream, snapshot, python, density, cp, overlay, image; all for all")
	trees     = flag.String("trees", "1,100,1000", "teardown: how many processes the trees have")
	sandboxes = flag.Int("sandboxes", 200, "idle: how many sandboxes there are at once")
	sessions  = flag.Int("sessions", 1000, "density: how many sessions there are at once")
	megabytes = flag.Int("megabytes", 1024, "stream, network: how much")
	clients   = flag.String("clients", "1,4", "http: how many clients call at once")
	judge     = flag.String("judge", "", "http: a go-judge to compare with")
	rawFile   = flag.String("raw", "", "write each measurement to a file (program, round, what, ms) and do not print them")
)

type program struct {
	name string
	run  func([]*build)
}

var programs = []program{
	{"startup", startup}, {"exec", execs}, {"teardown", teardown}, {"idle", idle}, {"fork", forkCost},
	{"limits", limitsCost}, {"hogs", hogs}, {"budget", budget},
	{"network", networks}, {"http", httpCalls}, {"stream", streams}, {"snapshot", snapshotted}, {"python", interpreters}, {"density", density}, {"cp", copies}, {"overlay", overlays}, {"image", images},
}

// ctx ends with SIGINT or SIGTERM. That kills every command with all its descendants, because of
// keepers and --die-with-parent.
var ctx = context.Background()

// self is the path of this program, which runs itself for some measurements.
var self string

// roles are what this program does when it runs itself, by the first argument.
var roles = map[string]func(words []string){
	forkServer:  func(words []string) { serveForks(words[0]) },
	netClient:   beNetClient,
	diskClient:  func(words []string) { beDiskClient(words[0], words[1]) },
	holder:      hold,
	floorServer: func(words []string) { serveFloor(words[0], words[1]) },
}

func main() {
	if len(os.Args) > 2 && roles[os.Args[1]] != nil {
		measure.Exit(caught(func() { roles[os.Args[1]](os.Args[2:]) }))
	}
	measure.Main(func(c context.Context) error {
		ctx = c
		unsetPassed()
		return caught(bench)
	})
}

// unsetPassed removes the variables that sbxrun passes on to a command and plain bwrap here does
// not. With LANG, sleep maps a dozen more files, and a tree of it takes a fifth longer to end.
func unsetPassed() {
	for _, pair := range os.Environ() {
		name, _, _ := strings.Cut(pair, "=")
		if strings.HasPrefix(name, "LC_") || slices.Contains([]string{"LANG", "LANGUAGE", "TERM", "TZ"}, name) {
			_ = os.Unsetenv(name) // cannot fail: the name has no = and no NUL
		}
	}
}

func bench() {
	self = got(os.Executable())
	wanted := strings.Split(*only, ",")
	for _, name := range wanted {
		if name != "all" && !slices.ContainsFunc(programs, func(p program) bool { return p.name == name }) {
			fail("there is no program %q", name)
		}
	}
	if *oldCommit != "" {
		dir := got(os.MkdirTemp("", "sbxrun-old-"))
		defer os.RemoveAll(dir)
		buildOld(dir)
	}
	if *rawFile != "" {
		f := got(os.Create(*rawFile))
		defer f.Close()
		raw = f
	}
	var builds []*build
	for i, path := range []string{*binary, *old} {
		if path == "" {
			continue
		}
		b := &build{letter: []string{"A", "B"}[i], name: []string{"sbxrun", "sbxrun, old"}[i]}
		defer b.close()
		b.copy(path)
		builds = append(builds, b)
	}
	// Supervisors become our children, so that none stays as a zombie under a PID 1 that does not
	// reap.
	must(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	if *judge != "" {
		*judge = got(filepath.Abs(*judge))
	}
	// Every sandbox shows this directory without a bind.
	must(os.Chdir("/usr"))
	must(measure.PrintMachine())
	for _, p := range programs {
		if slices.Contains(wanted, "all") || slices.Contains(wanted, p.name) {
			if err := caught(func() { p.run(builds) }); err != nil {
				fail("%s: %w", p.name, err)
			}
		}
	}
}

// buildOld builds the commit in a temporary directory.
func buildOld(dir string) {
	run := func(in, name string, args ...string) {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Dir, cmd.Env, cmd.Stderr = in, append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
		if err := cmd.Run(); err != nil {
			fail("build %s: %s: %w", *oldCommit, name, err)
		}
	}
	archive := filepath.Join(dir, "archive.tar")
	run("", "git", "archive", "--output", archive, *oldCommit)
	run(dir, "tar", "-xf", archive)
	*old = filepath.Join(dir, "bin", "sbxrun")
	run(dir, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Dir(*old)+"/", "./cmd/...")
}

// reapOrphans reaps processes that were left to this subreaper, such as bwrap's PID 1. No other
// goroutine may wait for a command in the meantime.
func reapOrphans() {
	for {
		if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
			return
		}
	}
}
