package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/sbxrun/sbxrun/tests/check"
)

// State is a state directory of one test. At the end of the test it kills all its sandboxes, and asserts that
//
//   - all their processes have exited, and every supervisor with 0;
//   - after sbxrun cleanup the directory contains only its lock and no names.
type State struct {
	Dir  string
	Work string // default current directory
	// Wrap is put in front of every sbxrun, to run it as another user.
	Wrap []string

	T  T
	mu sync.Mutex // for tests that start many sandboxes at once
	// The sandboxes and execs that were started in the background.
	sandboxes []*Sandbox
	detached  []*Detached
}

func NewState(t T) *State {
	t.Helper()
	Binary(t) // build it now, so that measured times don't include that
	s := &State{Dir: filepath.Join(SharedDir(t), "state"), Work: Dir(t), T: t}
	t.Cleanup(s.finish)
	return s
}

// Run runs a command on sandboxes, with arguments as given.
func (s *State) Run(args ...string) *Result {
	s.T.Helper()
	return s.Start(Options{}, args...).Wait()
}

// Start starts a command on sandboxes. The test must call Wait.
func (s *State) Start(o Options, args ...string) *Process {
	s.T.Helper()
	o.Bare, o.others = true, true
	if len(args) > 0 && args[0] == "kill" {
		args = slices.Concat(args[:1], Proof(), args[1:])
	}
	return Start(s.T, s.options(o), args...)
}

func (s *State) options(o Options) Options {
	o.Env = append([]string{"SBXRUN_STATE_DIR=" + s.Dir, "SBXRUN_DATA_DIR=" + s.Dir + "-data"}, o.Env...)
	o.Wrap = append(slices.Clone(s.Wrap), o.Wrap...)
	if o.Dir == "" {
		o.Dir = s.Work
	}
	return o
}

// Sandbox starts a sandbox, and fails the test if that fails. args are start's flags and the
// command, none for an idle sandbox.
func (s *State) Sandbox(o Options, args ...string) *Sandbox {
	s.T.Helper()
	b, r := s.TrySandbox(o, args...)
	check.Require(s.T, b != nil && r.ExitCode == 0, "start %q: exit code %d: %s", args, r.ExitCode, r.Stderr)
	return b
}

// TrySandbox starts a sandbox; nil if absent.
func (s *State) TrySandbox(o Options, args ...string) (b *Sandbox, r *Result) {
	s.T.Helper()
	marker := newMarker()
	// The deadline ends the sandbox if the test process is killed.
	own := []string{"start", "--json", "--timeout", "1h", "--env", MarkerName + "=" + marker, "--env", fixtureSeconds(), "--ro-bind", fixturesBind(s.T)}
	own = append(own, Proof()...)
	o = s.options(o)
	o.Bare, o.others = true, true
	o.handover = func(stdout string) {
		var said struct {
			ID            string `json:"id"`
			Name          string `json:"name"`
			SupervisorPID int    `json:"supervisor_pid"`
		}
		if json.Unmarshal([]byte(stdout), &said) != nil || said.ID == "" {
			return // not started; the member error says why
		}
		b = &Sandbox{ID: said.ID, Name: said.Name, Marker: marker, State: s}
		var err error
		if b.Supervisor, err = Adopt(said.SupervisorPID); err != nil {
			s.T.Errorf("supervisor: %v", err)
			b = nil
		}
	}
	r = Start(s.T, o, append(own, args...)...).Wait()
	if b == nil {
		return nil, r
	}
	s.mu.Lock()
	s.sandboxes = append(s.sandboxes, b)
	s.mu.Unlock()
	b.know()
	return b, r
}

// finish ends all sandboxes and execs of the test, and asserts that they have ended.
func (s *State) finish() {
	s.T.Helper()
	if slices.ContainsFunc(s.sandboxes, func(b *Sandbox) bool { return !b.Supervisor.Ended() }) {
		r := s.Run("kill", "--all", "--grace", "0")
		check.That(s.T, r.ExitCode == 0, "kill --all: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	for _, b := range s.sandboxes {
		b.finish()
	}
	for _, d := range s.detached {
		d.gone()
		d.Supervisor.Close()
	}
	r := s.Run("cleanup")
	check.That(s.T, r.ExitCode == 0, "cleanup: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	s.empty()
}

// empty asserts that the state directory looks unused.
func (s *State) empty() {
	s.T.Helper()
	var found []string
	err := filepath.WalkDir(s.Dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch name, _ := filepath.Rel(s.Dir, path); {
		case name == ".", name == "lock", name == "names":
		case name == "queue", name == "admission", strings.HasPrefix(name, "slot-"):
		default:
			found = append(found, name)
		}
		return nil
	})
	check.That(s.T, err == nil || os.IsNotExist(err), "state directory: %v", err)
	check.That(s.T, len(found) == 0, "left in the state directory after cleanup: %q", found)
}

// As returns a command for Wrap that runs another as an unprivileged user. It needs root.
func As(uid int) []string {
	id := fmt.Sprint(uid)
	return []string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups"}
}

// Shared returns the same directory for another user, who should not get access.
func Shared(s *State) *State { return &State{Dir: s.Dir, Work: s.Work, T: s.T} }
