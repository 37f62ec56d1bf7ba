package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// Limits of each command. On top of a deadline come the keeper's delay if sbxrun is stopped, the
// proof, and the time that sbxrun gives a stopped keeper.
const (
	soakGrace   = 100 * time.Millisecond
	soakLate    = 500 * time.Millisecond
	soakInstead = 500 * time.Millisecond
	soakMoment  = 2 * time.Second // how long kill waits for a supervisor
)

var (
	soakDeadline = harness.Deadline(300 * time.Millisecond)
	soakProof    = harness.Deadline(1500 * time.Millisecond)
	soakEnd      = soakDeadline + soakGrace + soakLate + soakProof + soakInstead
	// soakSlack is the allowance for a busy machine, including the start.
	soakSlack = harness.Scaled(3 * time.Second)
)

// soakPart turns TestSoak into one of its parts: "SEED N ENGINE". ENGINE selects [harness.EngineRoot].
const soakPart = "SBXRUN_SOAK_PART"

// TestSoak sends SIGKILL and SIGSTOP to sbxrun, supervisors, keepers, monitors, rooms and inits at random moments of
// each phase of each verb, while the payloads fight back: 500 times with SBXRUN_SOAK=100. It asserts that nothing takes
// longer than deadline and proof, that every proof is true, that no command outlives its keeper, that one cleanup
// removes the rest, and that no bystander is signalled, although bystanders get the PIDs and names of killed processes.
//
// Each part is PID 1 of a PID namespace, so it sees every process that is left and can choose
// PIDs. SBXRUN_SOAK_SEED, which is logged, repeats its choices, but not those of the scheduler.
// Root's last part runs everything as root of a container.
func TestSoak(t *testing.T) {
	if part := os.Getenv(soakPart); part != "" {
		var seed uint64
		var n int64
		var engine bool
		_, err := fmt.Sscan(part, &seed, &n, &engine)
		check.Require(t, err == nil, "%s=%q: %v", soakPart, part, err)
		newSoak(t, seed, engine).run(n)
		return
	}
	hits := scaled(t, 500)
	seed := rand.Uint64N(1e9)
	if text := os.Getenv("SBXRUN_SOAK_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		check.Must(t, err)
	}
	t.Logf("SBXRUN_SOAK_SEED=%d", seed)
	parts := max(1, min(4, hits/15))
	all := soakCount{}
	var mu sync.Mutex
	var work sync.WaitGroup
	for i := range parts {
		n := hits / parts
		if i == 0 {
			n = hits - n*(parts-1)
		}
		work.Go(func() {
			count, out, err := startPart(t, fmt.Sprint(seed+uint64(i), " ", n, " ", i > 0 && i == parts-1 && harness.Root()))
			mu.Lock()
			defer mu.Unlock()
			all.add(count)
			check.That(t, err == nil, "part %d: %v\n%s", i, err, out)
		})
	}
	work.Wait()
	t.Logf("%d tries, %d ran, %d recycled, %d unproven; %v %v %v", all["tries"], all["ran"], all["recycled"], all["unproven"], all.sums(0), all.sums(1), all.sums(2))
	if !t.Failed() {
		all.judge(t)
	}
}

// startPart runs a part to its end, in its own namespaces.
func startPart(t *testing.T, part string) (count soakCount, out string, err error) {
	self, err := os.Executable()
	if err != nil {
		return count, "", err
	}
	var buf bytes.Buffer
	cmd := exec.Command(self, "-test.run=^TestSoak$", "-test.timeout=0", "-test.v")
	cmd.Env = append(os.Environ(), soakPart+"="+part, "SBXRUN_BIN="+harness.Binary(t))
	cmd.Stdout, cmd.Stderr = &buf, &buf
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	if uid, gid := os.Getuid(), os.Getgid(); uid != 0 {
		// An ordinary user in a user namespace: the part itself may mount and choose PIDs, but its children may not.
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
	done, err := harness.StartCommand(cmd)
	if err != nil {
		return count, "", err
	}
	err = cmd.Wait()
	done()
	for line := range strings.Lines(buf.String()) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), soakSays); ok {
			check.OK(t, json.Unmarshal([]byte(text), &count), "%q", line)
		}
	}
	return count, buf.String(), err
}

// soakSays is the prefix of the line in which a part reports its counts.
const soakSays = "soak: "

// The victims.
const (
	soakSbxrun = iota
	soakSupervisor
	soakKeeper
	soakMonitor
	soakRoom
	soakInit
	soakRoles
)

var soakNames = [soakRoles]string{"sbxrun", "supervisor", "keeper", "monitor", "room", "init"}

// The phases.
const (
	soakEarly   = iota // during set-up, or just after the verb has started
	soakRunning        // the command has created its file
	soakEnding         // around the deadline
	soakPhases
)

var phaseNames = [soakPhases]string{"early", "running", "ending"}

// soakVerb is a command of sbxrun, and its processes.
type soakVerb struct {
	name  string
	box   bool // it acts on a sandbox of the try, whose command fights
	roles []int
	args  func(y *soakTry) []string
}

var (
	soakRunRoles  = []int{soakSbxrun, soakKeeper, soakMonitor, soakRoom, soakInit}
	soakAllRoles  = []int{soakSbxrun, soakSupervisor, soakKeeper, soakMonitor, soakRoom, soakInit}
	soakExecRoles = []int{soakSbxrun, soakKeeper, soakInit}
)

var soakVerbs = []soakVerb{
	{"run", false, soakRunRoles, func(y *soakTry) []string { return y.command("run", "--report", y.report) }},
	{"run --json", false, soakRunRoles, func(y *soakTry) []string { return y.command("run", "--json", "--report", y.report) }},
	{"start", false, soakAllRoles, func(y *soakTry) []string { return y.command("start", "--json") }},
	{"start, idle", false, soakAllRoles[:5], func(y *soakTry) []string { return y.terms("start", "--json") }},
	{"start, probed", false, soakAllRoles, func(y *soakTry) []string {
		return y.command("start", "--json", "--wait-ready", "--ready-exec", "test -e /out/ran-"+y.id, "--ready-interval", "0.01")
	}},
	{"exec", false, soakExecRoles, func(y *soakTry) []string { return y.command("exec", "--report", y.report, y.s.host.ID) }},
	{"exec --json", true, soakAllRoles, func(y *soakTry) []string { return y.command("exec", "--json", "--report", y.report, y.box.ID) }},
	{"exec --detach", false, []int{soakSbxrun, soakSupervisor, soakKeeper, soakInit}, func(y *soakTry) []string {
		return y.command("exec", "--detach", "--json", y.s.host.ID)
	}},
	{"kill", true, soakAllRoles, func(y *soakTry) []string {
		return []string{"kill", "--json", "--grace", y.grace, "--proof-timeout", soakProof.String(), y.box.ID}
	}},
	{"wait", true, soakAllRoles, func(y *soakTry) []string { return []string{"wait", y.box.ID} }},
	{"logs", true, soakAllRoles, func(y *soakTry) []string { return []string{"logs", "--follow", y.box.ID} }},
	{"cleanup", true, soakAllRoles, func(*soakTry) []string { return []string{"cleanup"} }},
	{soakServe, false, soakRunRoles, func(y *soakTry) []string { return []string{"serve", "--config", y.config()} }},
}

// soakCount counts hits by verb/role/phase and by signal, tries ("tries"), commands that began ("ran"), PIDs given to
// strangers ("recycled") and unproven teardowns ("unproven").
type soakCount map[string]int64

func (c soakCount) add(d soakCount) {
	for what, n := range d {
		c[what] += n
	}
}

// sums returns the hits by the i-th word of their cells.
func (c soakCount) sums(i int) map[string]int64 {
	sums := map[string]int64{}
	for what, n := range c {
		if cell := strings.Split(what, "/"); len(cell) == 3 {
			sums[cell[i]] += n
		}
	}
	return sums
}

// judge asserts that the soak has hit what it should.
func (c soakCount) judge(t *testing.T) {
	check.That(t, c["ran"] != 0, "no command has begun")
	// A busy machine may need longer than the half second that sbxrun gives a stopped keeper.
	// Everything has exited in the end nevertheless.
	check.That(t, c["unproven"] <= 2+c["tries"]/200, "too often unproven")
	hits := c["SIGKILL"] + c["SIGSTOP"]
	if hits < 500 {
		return
	}
	check.That(t, c["recycled"] != 0, "no pid was given to a stranger")
	verbs, roles, phases := c.sums(0), c.sums(1), c.sums(2)
	for _, v := range soakVerbs {
		check.That(t, verbs[v.name] != 0, "nobody was hit in %s", v.name)
		for _, role := range v.roles {
			n := int64(0)
			for _, phase := range phaseNames {
				n += c[strings.Join([]string{v.name, soakNames[role], phase}, "/")]
			}
			check.That(t, n != 0 || hits < 5000, "%s: no %s was hit", v.name, soakNames[role]) // with fewer hits one may be missing by chance
		}
	}
	for _, name := range soakNames {
		check.That(t, roles[name] != 0, "no %s was hit", name)
	}
	for _, name := range phaseNames {
		check.That(t, phases[name] != 0, "nobody was hit while %s", name)
	}
}

// soaking is one part of the soak.
type soaking struct {
	*env
	seed      uint64
	actor     string
	troupe    *troupe
	host      *sandbox // idle, for execs
	neighbour *sandbox // with a command
	strangers []*decoyed
	mu        sync.Mutex
	count     soakCount
	hits      atomic.Int64
	fresh     []*decoyed // of this round
}

func newSoak(t *testing.T, seed uint64, engine bool) *soaking {
	t.Helper()
	check.Must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	check.Must(t, unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""))
	s := &soaking{env: newEnv(t), seed: seed, actor: actor(t), count: soakCount{}}
	if engine {
		s.wrap = harness.EngineRoot()
	}
	s.troupe = newTroupe(t, s.actor)
	for _, name := range names {
		d, err := s.troupe.decoy(name, 0)
		check.Must(t, err)
		s.strangers = append(s.strangers, d)
	}
	s.host = s.start([]string{"--name", "host", "--timeout", "0", "--ro-bind", s.actor + ":/actor"})
	s.neighbour = s.start([]string{"--name", "neighbour", "--timeout", "0"}, "sleep", "infinity")
	return s
}

// run makes rounds until there are n hits.
func (s *soaking) run(n int64) {
	var cells []soakCell
	for round := uint64(0); s.hits.Load() < n && !s.t.Failed(); round++ {
		rng := rand.New(rand.NewPCG(s.seed, round))
		release := s.receive()
		var tries []*soakTry
		var work sync.WaitGroup
		for i := range 4 {
			if len(cells) == 0 {
				cells = soakCells(rng)
			}
			y := &soakTry{s: s, rng: rand.New(rand.NewPCG(rng.Uint64(), 0)), soakCell: cells[0], id: fmt.Sprintf("%d-%d", round, i)}
			cells = cells[1:]
			tries = append(tries, y)
			work.Go(y.run)
		}
		work.Wait()
		s.settled(tries)
		release()
	}
	for _, d := range s.strangers {
		if p, ok := d.unharmed(); !ok {
			s.t.Errorf("a stranger was signalled: %v, %v", p, d.end())
			continue
		}
		d.end()
	}
	s.clean()
	text := harness.JSON(s.t, s.count)
	fmt.Printf("\n%s%s\n", soakSays, text)
}

// soakCell is a combination to try.
type soakCell struct {
	verb        soakVerb
	role, phase int
}

// soakCells returns all combinations in random order.
func soakCells(rng *rand.Rand) (cells []soakCell) {
	for _, v := range soakVerbs {
		for _, role := range v.roles {
			for phase := range soakPhases {
				cells = append(cells, soakCell{v, role, phase})
			}
		}
	}
	rng.Shuffle(len(cells), func(i, j int) { cells[i], cells[j] = cells[j], cells[i] })
	return cells
}

// others returns all unexpected processes in the PID namespace.
func (s *soaking) others() (found []harness.Proc) {
	keep := map[int]bool{os.Getpid(): true}
	for _, b := range []*sandbox{s.host, s.neighbour} {
		keep[b.PID] = true
		for _, p := range harness.Below(b.PID) {
			keep[p.PID] = true
		}
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || keep[pid] {
			continue
		}
		mine := harness.Registered(pid)
		if p, ok := harness.ReadProc(pid); ok && !mine {
			p.Why = about(pid)
			found = append(found, p)
		}
	}
	return found
}

// about describes an unexpected process, as far as the test may inspect it.
func about(pid int) string {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	words, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	session, _ := unix.Getsid(pid)
	text := fmt.Sprintf("numbers %v, session %d, executes %q, %.200q", harness.PIDs(pid), session, exe, words)
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, fd := range fds {
		to, _ := os.Readlink(fd)
		text += fmt.Sprintf(" %s:%s", filepath.Base(fd), to)
	}
	return text + "\n" + harness.Stuck(pid)
}

// settled asserts after a round that everything has ended: commands by themselves, and empty rooms by one cleanup.
func (s *soaking) settled(tries []*soakTry) {
	s.t.Helper()
	was := func() string {
		text := fmt.Sprintf("SBXRUN_SOAK_SEED=%d\n", s.seed)
		for _, y := range tries {
			text += "\t" + y.String() + "\n"
		}
		return text
	}
	var busy []harness.Proc
	if !within(soakEnd+soakSlack, func() bool {
		reapZombies(s.host, s.neighbour)
		busy = slices.DeleteFunc(s.others(), func(p harness.Proc) bool {
			numbers := harness.PIDs(p.PID)
			return len(numbers) == 2 && numbers[1] == "1" && (p.Parent == os.Getpid() || p.Comm == "sbxrun-room") ||
				len(numbers) == 1 && p.Comm == "bwrap" && p.Parent == os.Getpid() // from a check by doctor whose parent was killed
		})
		return len(busy) == 0
	}) {
		s.t.Errorf("alive without a cleanup:\n%s%s", harness.List(busy), was())
	}
	c := s.do("cleanup")
	check.That(s.t, c.ExitCode == 0 && !strings.Contains(string(c.Stdout), "failed"), "cleanup: %v\n%s", c, was())
	var left []harness.Proc
	if !within(settle, func() bool {
		reapZombies(s.host, s.neighbour)
		left = s.others()
		return len(left) == 0
	}) {
		s.t.Errorf("alive after a cleanup: \n%s%v\n%s", harness.List(left), c, was())
	}
	ids, _ := filepath.Glob(filepath.Join(s.state, "*"))
	for _, path := range ids {
		switch filepath.Base(path) {
		case s.host.ID, s.neighbour.ID, "names", "lock":
		default:
			s.t.Errorf("left in the state directory: %s\n%v\n%s", path, c, was())
		}
	}
	s.host.alive()
	p, ok := harness.ReadProc(s.neighbour.init.PID)
	check.That(s.t, ok && p.State != "Z" && p.State != "T", "a sandbox beside has suffered: %v\n%s", p, was())
	for _, d := range s.fresh {
		if p, ok := d.unharmed(); !ok {
			s.t.Errorf("a stranger with the pid of what was killed was signalled: %v, %v\n%s", p, d.end(), was())
			continue
		}
		d.end()
	}
	s.fresh = nil
	data, err := os.ReadFile(filepath.Join(s.out, "breach"))
	check.That(s.t, err != nil, "a payload has reached its PID 1: %q\n%s", data, was())
	if s.t.Failed() {
		s.t.Logf("that was\n%s", was())
	}
	for _, dir := range []string{s.out, s.top} {
		for _, pattern := range []string{"ran-*", "log", "call-*", "report-*", "serve-*"} {
			names, _ := filepath.Glob(filepath.Join(dir, pattern))
			for _, name := range names {
				_ = os.RemoveAll(name) // the test's directory is removed anyway
			}
		}
	}
	_ = os.Remove(filepath.Join(s.out, "sock"))
}

// soakTry is one run of a verb, with the signals to its processes.
type soakTry struct {
	soakCell
	s      *soaking
	rng    *rand.Rand
	id     string
	report string
	grace  string
	// timeout is the command's deadline, a long one if the verb is kill.
	timeout string
	box     *sandbox // sandbox of this try, if the verb needs one
	client  *harness.Process
	own     seen      // identity of the client, whose PID may be reused
	began   time.Time // when the command had created its file
	super   seen      // supervisor that the client has started
	boxed   seen      // supervisor of box
	done    []string  // log of actions
	killed  []harness.Proc
	struck  bool                 // the client was hit
	asked   chan *harness.Result // receives a server's answer; nil for other verbs
}

func (y *soakTry) String() string {
	return fmt.Sprintf("try %s: %s, %s, %s: %s", y.id, y.verb.name, soakNames[y.role], phaseNames[y.phase], strings.Join(y.done, "; "))
}

func (y *soakTry) errorf(format string, args ...any) {
	y.s.t.Errorf("%v\n%s", y, fmt.Sprintf(format, args...))
}

func (y *soakTry) marker() string { return y.s.marker + "-" + y.id + "-" }

// terms returns the arguments that every command has.
func (y *soakTry) terms(verb string, flags ...string) []string {
	args := []string{verb, "--env", harness.MarkerName + "=" + y.marker(), "--timeout", y.timeout, "--grace", y.grace, "--proof-timeout", soakProof.String()}
	if verb != "exec" {
		args = append(args, "--bind", y.s.out+":/out", "--ro-bind", y.s.actor+":/actor")
	}
	return append(args, flags...)
}

// command returns the arguments of a verb with the hostile payload.
func (y *soakTry) command(verb string, flags ...string) []string {
	return append(append(y.terms(verb, "--env", actEnv+"=fight"), flags...), "--", "/actor", y.id)
}

// ran reports whether the command of the verb, or of the box, has started.
func (y *soakTry) ran() bool {
	if y.began.IsZero() && (y.s.wrote("ran-"+y.id) || y.asked != nil && len(y.commands()) > len(names)) {
		y.began = time.Now()
	}
	return !y.began.IsZero()
}

// run is the whole try.
func (y *soakTry) run() {
	y.report = filepath.Join(y.s.top, "report-"+y.id)
	y.grace = []string{"0", "0", "0.1"}[y.rng.IntN(3)]
	y.timeout = soakDeadline.String()
	if y.verb.name == "kill" {
		y.timeout = lifetime
	}
	if y.verb.box && !y.openBox() {
		return
	}
	if y.verb.name == "cleanup" && y.rng.IntN(2) == 0 {
		y.together(y.boxed.still(), []int{os.Getpid()}) // so that there is something to clean up
	}
	var err error
	if y.client, err = y.s.begin(y.verb.args(y)...); err != nil {
		y.errorf("%v", err)
		return
	}
	p, _ := harness.ReadProc(y.client.PID)
	y.own = seen{y.client.PID, p.Start}
	if y.verb.name == soakServe && !y.ask() {
		return
	}
	y.await()
	held, role := y.strike(y.role, y.action())
	for range y.rng.IntN(3) {
		y.pause(10 * time.Millisecond)
		if other := y.verb.roles[y.rng.IntN(len(y.verb.roles))]; held == nil {
			held, role = y.strike(other, y.action())
		} else if other != role {
			y.strike(other, "kill")
		}
	}
	if y.rng.IntN(2) == 0 {
		y.recycle()
	}
	after := y.follow()
	if held != nil {
		y.resolve(held, role)
		held.Close()
	}
	y.judge(y.end(), after)
	if y.verb.name == "kill" && !y.boxed.ended() { // the kill itself was killed
		if s := y.s.do("kill", "--grace", "0", y.box.ID); s.ExitCode != 0 && s.ExitCode != 125 {
			y.errorf("%v", s)
		}
	}
}

// over reports whether the verb has ended.
func (y *soakTry) over() bool { return y.client.Over() || len(y.asked) > 0 }

// end waits until the verb ends.
func (y *soakTry) end() *harness.Result {
	if y.asked != nil {
		return y.dismiss()
	}
	return y.s.wait(y.client)
}

// limit is the limit of the whole verb.
func (y *soakTry) limit() time.Duration { return soakMoment + soakEnd + soakSlack }

func (y *soakTry) action() string {
	return []string{"kill", "kill", "stop", "stop for a while"}[y.rng.IntN(4)]
}

// pause waits for a random time.
func (y *soakTry) pause(most time.Duration) { time.Sleep(time.Duration(y.rng.Int64N(int64(most)))) }

// openBox starts a sandbox with the hostile payload, or an idle one for execs.
func (y *soakTry) openBox() bool {
	args := y.command("start", "--json")
	exec := strings.HasPrefix(y.verb.name, "exec")
	if exec {
		args = y.terms("start", "--json")
	}
	c, err := y.s.begin(args...)
	if err != nil {
		y.errorf("%v", err)
		return false
	}
	s := y.s.wait(c)
	y.box = &sandbox{e: y.s.env}
	if err := json.Unmarshal(s.Stdout, y.box); err != nil || s.ExitCode != 0 {
		y.errorf("no sandbox: %v", s)
		return false
	}
	y.boxed = y.supervises(y.box.ID, y.box.PID)
	if !exec && !within(soakEnd+soakSlack, func() bool { return y.ran() || y.boxed.ended() }) {
		y.errorf("its command has not begun")
		return false
	}
	return true
}

// await waits until the victim exists, the command runs or its deadline is near, and a random time more.
func (y *soakTry) await() {
	over := y.over
	switch {
	case y.verb.box && y.phase == soakEnding && y.verb.name != "kill":
		for time.Since(y.began) < soakDeadline-10*time.Millisecond && !over() && !y.boxed.ended() {
			time.Sleep(time.Millisecond)
		}
		y.pause(30 * time.Millisecond)
	case y.verb.box && !strings.HasPrefix(y.verb.name, "exec"):
		y.pause([]time.Duration{3, 10, 25}[y.phase] * time.Millisecond)
	case y.phase == soakEarly && y.role == soakSbxrun:
		y.pause(25 * time.Millisecond)
	case y.phase == soakEarly:
		for pids, _ := y.cast(); pids[y.role] == 0 && !over(); pids, _ = y.cast() {
			time.Sleep(300 * time.Microsecond)
		}
		y.pause(8 * time.Millisecond)
	default:
		idle := y.verb.name == "start, idle"
		for !y.ran() && !(over() && (idle || y.asked != nil || y.client.State().ExitCode() != 0)) {
			if time.Since(y.client.Begin) > soakSlack {
				return // reported later
			}
			time.Sleep(time.Millisecond)
		}
		if idle {
			y.began = y.client.Wait().Ended
		}
		if y.phase == soakEnding {
			for time.Since(y.began) < soakDeadline-15*time.Millisecond {
				time.Sleep(time.Millisecond)
			}
			y.pause(40 * time.Millisecond)
		} else {
			y.pause(20 * time.Millisecond)
		}
	}
}

// seen identifies a process. PIDs are reused quickly here.
type seen struct {
	pid   int
	start string
}

// still returns the PID while the process exists, otherwise 0.
func (s seen) still() int {
	if p, ok := harness.ReadProc(s.pid); ok && s.pid > 1 && p.Start == s.start {
		return s.pid
	}
	return 0
}

func (s seen) ended() bool { return s.still() == 0 || harness.Exited(s.pid) }

// supervisor returns the PID of the supervisor that the client has started, as soon as it is known.
func (y *soakTry) supervisor() int {
	if y.super.pid == 0 {
		var said struct {
			ID  string `json:"id"`
			PID int    `json:"supervisor_pid"`
		}
		if below := harness.Children(y.client.PID); len(below) > 0 && !y.client.Over() {
			said.PID = below[0]
		} else if json.Unmarshal([]byte(y.client.Output()), &said) != nil {
			return 0
		}
		y.super = y.supervises(said.ID, said.PID)
	}
	return y.super.still()
}

// supervises identifies the supervisor of a sandbox by its record, or by its PID if there is none.
func (y *soakTry) supervises(id string, pid int) seen {
	var r harness.Record
	if data, err := os.ReadFile(filepath.Join(y.s.state, id, "record.json")); id != "" && err == nil && json.Unmarshal(data, &r) == nil && r.Supervisor.PID == pid {
		return seen{pid, strconv.FormatUint(r.Supervisor.Start, 10)}
	}
	p, _ := harness.ReadProc(pid)
	return seen{pid, p.Start}
}

// cast returns the current PIDs by role, and their possible parents.
func (y *soakTry) cast() (pids [soakRoles]int, parents [soakRoles][]int) {
	me := os.Getpid()
	main, room := 0, 0 // parents of keeper and init, and of the room's keeper
	if !y.client.Over() {
		main = y.client.PID
	}
	pids[soakSbxrun], parents[soakSbxrun] = main, []int{me}
	switch {
	case strings.HasPrefix(y.verb.name, "start"):
		main = y.supervisor()
		pids[soakSupervisor] = main
	case y.verb.name == "exec --detach":
		main = y.supervisor()
		pids[soakSupervisor] = main
	case y.verb.name == "exec":
	case y.verb.box:
		room = y.boxed.still()
		pids[soakSupervisor] = room
		if !strings.HasPrefix(y.verb.name, "exec") {
			main = room
		}
	}
	parents[soakSupervisor] = []int{me, y.client.PID}
	f := family(main)
	pids[soakKeeper], pids[soakInit] = f[roleKeeper], f[roleInit]
	parents[soakKeeper], parents[soakInit] = []int{main}, []int{f[roleKeeper]}
	if room != 0 {
		f = family(room)
	}
	pids[soakMonitor], pids[soakRoom] = f[roleMonitor], f[roleRoom]
	parents[soakMonitor], parents[soakRoom] = []int{f[roleKeeper]}, []int{f[roleMonitor]}
	return pids, parents
}

// hit sends a signal to a process, if its parent is as expected.
func (y *soakTry) hit(role int, pid int, parents []int, sig unix.Signal) *harness.Target {
	for _, parent := range parents {
		p, _ := harness.ReadProc(pid)
		stranger := role != soakSbxrun && harness.Registered(pid) // a decoy has the PID already
		if stranger || role == soakSbxrun && pid == y.own.pid && y.own.still() == 0 {
			return nil
		}
		target, ok := harness.Strike(pid, parent, sig)
		if !ok {
			continue
		}
		y.s.hits.Add(1)
		y.s.mu.Lock()
		y.s.count[strings.Join([]string{y.verb.name, soakNames[role], phaseNames[y.phase]}, "/")]++
		y.s.count[unix.SignalName(sig)]++
		y.s.mu.Unlock()
		y.done = append(y.done, fmt.Sprintf("%v to %s %d", unix.SignalName(sig), soakNames[role], pid))
		if sig == unix.SIGKILL {
			y.killed = append(y.killed, p)
		}
		y.struck = y.struck || role == soakSbxrun
		return target
	}
	return nil
}

// strike does something to one process. It returns the process if it stays stopped.
func (y *soakTry) strike(role int, action string) (held *harness.Target, _ int) {
	pids, parents := y.cast()
	y.s.ns.Remember(pids[soakRoom])
	y.s.ns.Remember(pids[soakInit])
	sig := unix.SIGSTOP
	if action == "kill" {
		sig = unix.SIGKILL
		if role != soakSbxrun && y.rng.IntN(3) == 0 { // together with everything that could end the rest
			main := parents[soakKeeper][0]
			y.together(main, []int{os.Getpid(), y.client.PID})
			return nil, 0
		}
	}
	target := y.hit(role, pids[role], parents[role], sig)
	if target == nil {
		return nil, 0
	}
	switch action {
	case "stop":
		return target, role
	case "stop for a while":
		y.pause(50 * time.Millisecond)
		y.release(target)
	}
	target.Close()
	return nil, 0
}

func (y *soakTry) release(target *harness.Target) {
	if err := target.Signal(unix.SIGCONT); err != nil {
		y.errorf("SIGCONT: %v", err)
	}
}

// together kills sbxrun, or a supervisor, and its keeper at once.
func (y *soakTry) together(main int, parents []int) {
	role := soakSupervisor
	if y.client != nil && main == y.client.PID {
		role = soakSbxrun
	}
	keeper := family(main)[roleKeeper]
	if y.rng.IntN(2) == 0 {
		defer y.drop(y.hit(soakKeeper, keeper, []int{main}, unix.SIGKILL))
		defer y.drop(y.hit(role, main, parents, unix.SIGKILL))
	} else {
		defer y.drop(y.hit(role, main, parents, unix.SIGKILL))
		defer y.drop(y.hit(soakKeeper, keeper, []int{main, os.Getpid()}, unix.SIGKILL))
	}
}

func (y *soakTry) drop(target *harness.Target) {
	if target != nil {
		target.Close()
	}
}

// recycle starts decoys with the PIDs and names of killed processes.
func (y *soakTry) recycle() {
	for _, p := range y.killed {
		if !within(20*time.Millisecond, func() bool {
			reapZombies(y.s.host, y.s.neighbour)
			_, there := harness.ReadProc(p.PID)
			return !there && (p.PID != y.client.PID || y.client.Over())
		}) {
			continue
		}
		d, err := y.s.troupe.decoy(p.Comm, p.PID)
		if err != nil {
			y.errorf("no decoy: %v", err)
			return
		}
		y.s.mu.Lock()
		y.s.fresh = append(y.s.fresh, d)
		if d.cmd.Process.Pid == p.PID {
			y.s.count["recycled"]++
			y.done = append(y.done, fmt.Sprintf("%d is a stranger now", p.PID))
		}
		y.s.mu.Unlock()
	}
}

// follow starts another command on the same sandbox, or none. An exec gets a marker of its own,
// because it may outlive the command of the try.
func (y *soakTry) follow() *harness.Process {
	id := ""
	if y.box != nil {
		id = y.box.ID
	} else if strings.HasPrefix(y.verb.name, "start") {
		id = startedID(y.client)
	}
	if id == "" || y.rng.IntN(2) == 0 {
		return nil
	}
	then := [][]string{
		{"kill", "--grace", "0", "--proof-timeout", soakProof.String(), id}, {"kill", "--grace", "0.1", "--proof-timeout", soakProof.String(), id}, {"wait", "--timeout", "1", id},
		{"inspect", id}, {"ps", "--all"}, {"logs", id}, {"exec", "--env", harness.MarkerName + "=" + y.s.marker + "-after-" + y.id, "--timeout", "0.2", "--proof-timeout", soakProof.String(), id, "sleep", "9"}, {"cleanup"},
	}
	args := then[y.rng.IntN(len(then))]
	y.done = append(y.done, "then "+args[0])
	c, err := y.s.begin(args...)
	if err != nil {
		y.errorf("%v", err)
	}
	return c
}

// resolve waits until the command has ended despite the stopped process, and then continues or kills that process.
func (y *soakTry) resolve(held *harness.Target, role int) {
	switch {
	case !y.ran() && (y.verb.name != "start, idle" || !y.client.Over() || y.struck):
		// Before the command starts, the long limit of the set-up applies, and the test does not wait for it.
		y.pause(30 * time.Millisecond)
		if y.rng.IntN(2) == 0 && !y.client.Over() {
			y.done = append(y.done, "SIGTERM to sbxrun")
			y.client.Signal(unix.SIGTERM)
			if role != soakSbxrun && role != soakSupervisor && !within(soakProof+soakInstead+soakSlack, y.client.Over) && !y.verb.box {
				y.errorf("SIGTERM to sbxrun is without effect while the %s is stopped", soakNames[role])
			}
		}
	case y.verb.name == "kill" && y.struck: // nobody ends it
	default:
		var commands []harness.Proc
		if !within(y.limit(), func() bool {
			reapZombies(y.s.host, y.s.neighbour)
			commands = y.commands()
			return len(commands) == 0
		}) {
			y.errorf("while the %s is stopped the command lives on:\n%s", soakNames[role], harness.List(commands))
		}
		if role != soakSbxrun && role != soakSupervisor && !within(y.limit(), y.over) {
			y.errorf("while the %s is stopped sbxrun does not end:\n%s", soakNames[role], harness.List(harness.Below(y.client.PID)))
		}
	}
	if y.rng.IntN(3) == 0 {
		y.done = append(y.done, "SIGKILL to who is stopped")
		if err := held.Signal(unix.SIGKILL); err != nil {
			y.errorf("%v", err)
		}
		y.struck = y.struck || role == soakSbxrun
		return
	}
	y.done = append(y.done, "SIGCONT")
	y.release(held)
}

// commands returns the living processes of the try's commands; of an idle sandbox, the room.
func (y *soakTry) commands() []harness.Proc {
	if y.verb.name == "start, idle" {
		pids, _ := y.cast()
		if p, ok := harness.ReadProc(pids[soakRoom]); ok && p.State != "Z" && p.State != "X" {
			return []harness.Proc{p}
		}
		return nil
	}
	return slices.DeleteFunc(harness.Find(y.marker(), func(uint64) bool { return false }), func(p harness.Proc) bool {
		return p.State == "Z" || p.State == "X" || len(harness.PIDs(p.PID)) < 3
	})
}

// judge asserts that the client and the command after it ended in time and reported the truth.
func (y *soakTry) judge(o *harness.Result, after *harness.Process) {
	alive := y.commands() // before anything else
	y.s.mu.Lock()
	y.s.count["tries"]++
	if y.ran() {
		y.s.count["ran"]++
	}
	y.s.mu.Unlock()
	limit := y.limit()
	if o.Elapsed > limit {
		y.errorf("it took %v: %v", o.Elapsed, o)
	}
	if o.Signal == 0 && !slices.Contains([]int{0, 123, 124, 125, 137, 143}, o.ExitCode) {
		y.errorf("%v", o)
	}
	told := string(o.Stdout)
	if data, err := os.ReadFile(y.report); err == nil && o.Signal == 0 {
		told = string(data)
	}
	if (strings.Contains(told, `"verdict":"proven"`) || y.verb.name == "kill" && o.ExitCode == 0) && len(alive) > 0 {
		y.errorf("proven, and these live: %v\n%s", o, harness.List(alive))
	}
	if o.ExitCode == 123 || strings.Contains(told, `"verdict":"unproven"`) {
		y.s.mu.Lock()
		y.s.count["unproven"]++
		y.s.mu.Unlock()
	}
	if after != nil {
		if s := y.s.wait(after); s.Elapsed > limit || s.Signal != 0 || s.ExitCode != 0 && !slices.Contains([]int{123, 124, 125, 137, 143}, s.ExitCode) {
			y.errorf("%v took %v", s, s.Elapsed)
		}
	}
}

// startedID returns the ID that start has printed, "" if it has not yet.
func startedID(c *harness.Process) string {
	var told struct {
		ID string `json:"id"`
	}
	_ = json.Unmarshal([]byte(c.Output()), &told) // the output may still be incomplete
	return told.ID
}

// soakServe is a verb of the soak: a call to a new server with one warm room. The server has the role of sbxrun. The
// payload sees /out read-only, so the test looks for its processes to know that it runs, and at its output for a breach.
const soakServe = "serve"

// config writes the configuration of the try's server.
func (y *soakTry) config() string {
	dir := filepath.Join(y.s.top, "serve-"+y.id)
	check.Must(y.s.t, os.Mkdir(dir, 0o700))
	text := fmt.Sprintf("listen = [%q]\nstate_dir = %q\ndrain_timeout = \"1ms\"\nproof_timeout = %q\n[rooms]\nmin = 1\nmax = 1\n[sandbox]\nmounts = [%q, %q]\n",
		"unix:"+filepath.Join(dir, "socket"), filepath.Join(dir, "state"), soakProof, y.s.out+":/out", y.s.actor+":/actor")
	name := filepath.Join(dir, "config.toml")
	check.Must(y.s.t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

// ask makes the call when the room is warm, and reports whether it is. The server creates the room
// after the first call.
func (y *soakTry) ask() bool {
	client := &http.Client{Timeout: bound, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(y.s.top, "serve-"+y.id, "socket"))
	}}}
	send := func(call api.Call) (answer *harness.Result) {
		body := harness.JSON(y.s.t, call)
		begin := time.Now()
		answer = &harness.Result{}
		defer func() { answer.Elapsed = time.Since(begin) }()
		r, err := client.Post("http://sbxrun/v1/run", "application/json", bytes.NewReader(body))
		if err != nil {
			answer.Stderr = []byte(err.Error()) // the server is not ready, or was killed
			return answer
		}
		defer r.Body.Close()
		answer.Stdout, err = io.ReadAll(r.Body)
		answer.Stderr = fmt.Append(nil, r.Status, err)
		return answer
	}
	tried := &harness.Result{}
	if !within(bound, func() bool {
		if !strings.Contains(string(tried.Stdout), `"proven"`) {
			tried = send(api.Call{Argv: []string{"true"}})
		}
		r, err := client.Get("http://sbxrun/v1/status")
		if err != nil {
			return y.client.Over()
		}
		defer r.Body.Close()
		var st api.Status
		return json.NewDecoder(r.Body).Decode(&st) == nil && st.Machine != nil && st.Machine.Rooms.Idle > 0
	}) || y.client.Over() {
		y.client.Signal(unix.SIGKILL)
		y.errorf("no warm room: %v, %v", y.s.wait(y.client), tried)
		return false
	}
	timeout, err := time.ParseDuration(y.timeout)
	check.Must(y.s.t, err)
	grace, err := time.ParseDuration(y.grace + "s")
	check.Must(y.s.t, err)
	y.asked = make(chan *harness.Result, 1)
	y.client.Begin = time.Now()
	go func() {
		answer := send(api.Call{Argv: []string{"/actor", y.id}, Env: map[string]string{harness.MarkerName: y.marker(), actEnv: "fight"},
			TimeoutMS: float64(timeout.Milliseconds()), GraceMS: float64(grace.Milliseconds())})
		if alive := y.commands(); strings.Contains(string(answer.Stdout), `"verdict":"proven"`) && len(alive) > 0 {
			y.errorf("proven, and these live: %v\n%s", answer, harness.List(alive))
		}
		if strings.Contains(string(answer.Stdout), "/out/breach") {
			y.errorf("a payload has reached its PID 1: %v", answer)
		}
		client.CloseIdleConnections()
		y.asked <- answer
	}()
	return true
}

// dismiss waits for the answer, and then ends the server.
func (y *soakTry) dismiss() *harness.Result {
	answer := &harness.Result{}
	select {
	case answer = <-y.asked:
	case <-time.After(bound):
		y.errorf("no answer")
	}
	y.client.Signal(unix.SIGTERM)
	server := y.s.wait(y.client)
	answer.ExitCode, answer.Signal = server.ExitCode, server.Signal
	if server.Signal == 0 && server.ExitCode != 0 {
		y.errorf("the server: %v", server)
	}
	return answer
}

// window is a bit longer than a run takes until its teardown.
const window = 30 * time.Millisecond

// killAfter kills sbxrun some time after its start.
func killAfter(t *testing.T, after time.Duration, flags, payload []string) {
	t.Helper()
	r := start(t, harness.Options{}, slices.Concat(flags, []string{"--timeout", "15"}, payload)...)
	// Wait busily, because sleeping is too coarse. While waiting, note the namespace, which later
	// identifies the run's processes.
	for time.Since(r.Begin) < after && !r.Over() {
		r.processes()
	}
	r.signal(unix.SIGKILL)
	r.Wait()
}

// When sbxrun is killed at a random moment, the run ends completely: also one that exits by itself, one with an idmapped
// mount, for which a helper process exists for a moment, and one with both streams captured.
func TestKilledRandomly(t *testing.T) {
	for range soak(t) {
		killAfter(t, rand.N(window), nil, busy)
	}
	for range scaled(t, 40) {
		killAfter(t, rand.N(window), nil, leaver)
		killAfter(t, rand.N(window/2), []string{"--bind", harness.Dir(t) + ":/mapped"}, leaver)
		killAfter(t, rand.N(window), []string{"--json"}, []string{"sh", "-c", `: >/out/ran; setsid sleep 600 & while :; do echo x; done`})
	}
}

// The same with a terminal, whose state is restored. As under a shell, sbxrun is not the session leader: when that dies,
// the kernel hangs up the terminal, and nothing can restore it.
func TestKilledRandomlyTerminal(t *testing.T) {
	ptmx, tty, err := pty.Open()
	check.Must(t, err)
	defer ptmx.Close()
	defer tty.Close()
	before := termios(t, tty)
	raw := 0
	for i := range scaled(t, 30) {
		o := harness.Options{Stdin: tty, Stdout: tty}
		r := start(t, o, append([]string{"--tty", "--timeout", "15"}, busy...)...)
		// Kill it at a random moment: after its start, or immediately or shortly after the switch to raw mode.
		after := rand.N(window)
		if i%3 > 0 {
			for !r.Over() && termios(t, tty).Lflag&unix.ICANON != 0 && time.Since(r.Begin) < bound {
			}
			raw++
			after *= time.Duration(i%3 - 1)
		}
		for from := time.Now(); time.Since(from) < after && !r.Over(); {
			r.processes()
		}
		r.signal(unix.SIGKILL)
		r.Wait()
		if now := termios(t, tty); now != before {
			t.Errorf("try %d: the terminal was left as it was not before: flags %#x %#x %#x, were %#x %#x %#x",
				i, now.Iflag, now.Oflag, now.Lflag, before.Iflag, before.Oflag, before.Lflag)
			check.Must(t, unix.IoctlSetTermios(int(tty.Fd()), unix.TCSETS, &before))
		}
	}
	t.Logf("%d times in raw mode", raw)
}

func termios(t *testing.T, tty *os.File) unix.Termios {
	t.Helper()
	state, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	check.Must(t, err)
	return *state
}

// A run survives the end of the threads of sbxrun. The kernel kills bwrap with the thread that has
// started it (PR_SET_PDEATHSIG), and Go ends threads at will. So the test uses few processors, a
// garbage collection for every megabyte of captured output, and a signal every millisecond.
func TestThreadChurn(t *testing.T) {
	seconds := "0.5"
	switch n := soak(t); {
	case n >= 1000:
		seconds = "10"
	case n >= enough:
		seconds = "2"
	}
	for _, procs := range []string{"1", "8"} {
		r := start(t, harness.Options{Env: []string{
			"GOMAXPROCS=" + procs, "GOGC=1", "GODEBUG=gctrace=1,gcstoptheworld=1,asyncpreemptoff=0",
		}}, "--json", "--timeout", lifetime, "sh", "-c", ": >/out/ran; timeout "+seconds+" yes; yes | head -c 1M; setsid sleep 600 & exit 7")
		for beat := time.NewTicker(time.Millisecond); ; {
			select {
			case <-beat.C:
				// Both only cause work for the runtime.
				r.signal(unix.SIGURG)
				r.signal(unix.SIGWINCH)
				continue
			case <-r.Exited():
			}
			beat.Stop()
			break
		}
		o := r.Wait()
		if o.ExitCode != 7 || o.Report == nil || o.Report.Cause != "exited" || o.Report.Teardown.Verdict != "proven" {
			t.Errorf("GOMAXPROCS=%s: want 7: %v", procs, o)
			continue
		}
		check.That(t, *o.Report.StdoutBytes > 1<<20, "only %d bytes of output", *o.Report.StdoutBytes)
	}
}
