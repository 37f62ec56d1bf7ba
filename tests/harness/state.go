package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// State is a state directory of a test's own. When the test is over all of its
// sandboxes are killed, and it is asserted that
//
//   - nothing of them is left: by PID namespace, by marker, and every supervisor
//     has ended with 0 and was reaped;
//   - after sbxrun cleanup the directory holds its lock and no names, and that
//     is all.
type State struct {
	Dir  string
	Work string // current directory of what is run, unless Options say otherwise
	// Wrap is in front of every sbxrun, for another user's.
	Wrap []string

	T  T
	mu sync.Mutex // for the tests that start many at once
	// Everything that was started in the background.
	sandboxes []*Sandbox
	detached  []*Detached
}

func NewState(t T) *State {
	t.Helper()
	Binary(t) // made now, and not in the time that a test measures
	s := &State{Dir: filepath.Join(SharedDir(t), "state"), Work: Dir(t), T: t}
	t.Cleanup(s.finish)
	return s
}

// Run runs a command that only looks or waits, or kills: its arguments as given.
func (s *State) Run(args ...string) *Result {
	s.T.Helper()
	return s.Start(Options{}, args...).Wait()
}

// Start starts such a command. The test must Wait.
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

// Sandbox starts a sandbox, which must succeed: args are start's flags and the
// command, none for an idle one.
func (s *State) Sandbox(o Options, args ...string) *Sandbox {
	s.T.Helper()
	b, r := s.TrySandbox(o, args...)
	if b == nil || r.ExitCode != 0 {
		s.T.Fatalf("start %q: exit code %d: %s", args, r.ExitCode, r.Stderr)
	}
	return b
}

// TrySandbox starts a sandbox; nil if there is none.
func (s *State) TrySandbox(o Options, args ...string) (b *Sandbox, r *Result) {
	s.T.Helper()
	marker := newMarker()
	// Should the test itself be killed, its sandboxes must not stay for ever.
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
			return // it was not started; why, is in a member error
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

// finish ends all that the test has started here, and asserts that it has ended.
func (s *State) finish() {
	s.T.Helper()
	if slices.ContainsFunc(s.sandboxes, func(b *Sandbox) bool { return !b.Supervisor.Ended() }) {
		if r := s.Run("kill", "--all", "--grace", "0"); r.ExitCode != 0 {
			s.T.Errorf("kill --all: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
		}
	}
	for _, b := range s.sandboxes {
		b.finish()
	}
	for _, d := range s.detached {
		d.gone()
		d.Supervisor.Close()
	}
	if r := s.Run("cleanup"); r.ExitCode != 0 {
		s.T.Errorf("cleanup: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	}
	s.empty()
}

// empty asserts that the state directory is as if it had never been used.
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
	if err != nil && !os.IsNotExist(err) {
		s.T.Errorf("state directory: %v", err)
	}
	if len(found) > 0 {
		s.T.Errorf("left in the state directory after cleanup: %q", found)
	}
}

// As is a command that runs another as an unprivileged user, for Wrap. Only root
// can.
func As(uid int) []string {
	id := fmt.Sprint(uid)
	return []string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups"}
}

// Shared is the same directory for somebody else, who is not expected to get into
// it.
func Shared(s *State) *State { return &State{Dir: s.Dir, Work: s.Work, T: s.T} }
