package harness

import (
	"encoding/json"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

type Detached struct {
	ID, Handle string
	Marker     string
	Supervisor *Adopted
	report     string
	t          T
}

// Detach starts an exec --detach, and returns when sbxrun has exited. It finds the exec by the
// handle that sbxrun prints, or with --json by the members.
func (b *Sandbox) Detach(flags []string, command ...string) *Detached {
	t := b.State.T
	t.Helper()
	d := &Detached{Marker: newMarker(), report: filepath.Join(Dir(t), "report.json"), t: t}
	args := append([]string{"exec", "--detach", "--report", d.report, "--env", MarkerName + "=" + d.Marker}, flags...)
	o := b.State.options(Options{Bare: true, others: true})
	o.handover = func(stdout string) {
		var said struct {
			ID            string `json:"id"`
			Handle        string `json:"handle"`
			SupervisorPID int    `json:"supervisor_pid"`
		}
		if slices.Contains(flags, "--json") {
			if json.Unmarshal([]byte(stdout), &said) != nil || said.ID == "" {
				return
			}
		} else {
			var rec Record
			said.Handle = strings.TrimSuffix(stdout, "\n")
			said.ID = path.Base(said.Handle)
			data, err := os.ReadFile(filepath.Join(b.State.Dir, b.ID, "execs", said.ID, "record.json"))
			if err != nil || json.Unmarshal(data, &rec) != nil {
				return
			}
			said.SupervisorPID = rec.Supervisor.PID
		}
		d.ID, d.Handle = said.ID, said.Handle
		var err error
		d.Supervisor, err = Adopt(said.SupervisorPID)
		check.Require(t, err == nil, "the supervisor of the detached command: %v", err)
	}
	r := Start(t, o, append(append(args, b.ID, "--"), command...)...).Wait()
	check.Require(t, r.ExitCode == 0 && d.ID != "" && d.Supervisor != nil, "exec --detach: exit code %d: %s%s", r.ExitCode, r.Stdout, r.Stderr)
	b.State.mu.Lock()
	b.State.detached = append(b.State.detached, d)
	b.State.mu.Unlock()
	return d
}

// Ended waits until the detached exec ends, asserts that all its processes have exited, and reads its report.
func (d *Detached) Ended() *Report {
	d.t.Helper()
	d.gone()
	data, err := os.ReadFile(d.report)
	check.Must(d.t, err)
	r, err := ParseReport(data)
	check.Must(d.t, err)
	for _, wrong := range r.check() {
		d.t.Errorf("report: %s; it is %.2000s", wrong, data)
	}
	check.That(d.t, r.ID == d.ID, "exec --detach has printed the id %q, and the report says %q", d.ID, r.ID)
	return r
}

// Kill kills the supervisor; its keeper ends the command.
func (d *Detached) Kill() {
	d.t.Helper()
	killSupervisor(d.t, d.Handle, d.Supervisor)
	goneBy(d.t, d.Marker, 0, time.Now())
}

func (d *Detached) gone() {
	d.t.Helper()
	check.Require(d.t, d.Supervisor.endsIn(Bound), "the detached command still runs after %v", Bound)
	goneBy(d.t, d.Marker, 0, time.Now())
}
