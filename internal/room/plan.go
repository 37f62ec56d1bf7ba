package room

import (
	"os"

	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Plan is a fully prepared sandbox that has not been started. It owns the descriptors for bwrap; Close closes them.
type Plan struct {
	Program Program
	Workdir string // of the payload
	// Found is the program that PATH selects for the command in the sandbox, and Instead the one that it selects on the
	// host, if that is another one, which the sandbox hides.
	Found, Instead string
	// Closed are read-only binds by root that the sandbox cannot read, because only their owner can.
	Closed []string
	// Devices are the names of the sandbox's devices: see [Policy].
	Devices []string
	// LeftOut are the errors of devices' nodes that the sandbox could not open, while it can open others of the device.
	LeftOut []error
	// Bounds apply to the command. The caller sets them.
	Bounds proc.Bounds

	hold     []*os.File // Policy.Hold, and the locks of overlays
	command  []string
	path     string // PATH of the payload
	env      []values.Var
	words    []string // bwrap's options, for the room
	ops      []op
	overlays []*Overlay   // of the policy
	devices  *devices.Set // nil for none
	places   int          // number of places below enter.LayersDir
	trees    []string     // directories that are bound in enter.LayersDir, from which parts are cloned
	cred     *proc.Cred
	// identity are bwrap's options for the payload's identity inside.
	identity []string
	hostname string
	noUserns bool // processes in the room cannot create user namespaces
	// mapOwners: the user did not request cred, so written files get the owner of their bind.
	mapOwners bool
	hostNet   bool
	ownNet    bool // the command has its own network namespace, and the room the caller's
	terminal  bool
	filter    seccomp.Filter
}

// Caller describes the calling process.
type Caller struct {
	Path  string // PATH
	Home  string // HOME
	Dir   string // PWD: the path of the current directory, perhaps with links
	Bwrap string // the user's choice of bwrap: [ProgramVariable]
	UID   int    // effective
	GID   int
}

// ThisCaller describes this process.
func ThisCaller() Caller {
	return Caller{Path: os.Getenv("PATH"), Home: os.Getenv("HOME"), Dir: os.Getenv("PWD"), Bwrap: os.Getenv(ProgramVariable), UID: os.Geteuid(), GID: os.Getegid()}
}

// Prepare plans a sandbox. It examines and opens files of the host, and creates and starts nothing.
// Errors are *[result.Error].
func Prepare(p Policy, c Caller) (_ *Plan, err error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if p.TmpSize == 0 {
		p.TmpSize = DefaultTmpSize
	}
	if p.Hostname == "" {
		p.Hostname = DefaultHostname
	}
	plan := &Plan{command: p.Command, Devices: p.Devices, hold: p.Hold, hostNet: p.Network == NetHost, terminal: p.Terminal}
	plan.ownNet = p.Alone && !plan.hostNet && len(p.Command) > 0
	defer func() {
		if err != nil {
			plan.Close()
		}
	}()
	user := plan.identify(&p, c)
	if err := checkIDs(user, p.Outside(c), p.User != nil); err != nil {
		return nil, err
	}
	if p.Tools != "" {
		c.Path = p.Tools
	}
	users := len(p.Mounts)
	if plan.Workdir, err = currentDirectory(&p, c.Home); err != nil {
		return nil, err
	}
	cwd := ""
	if len(p.Mounts) > users {
		cwd = p.Mounts[users].Source
	}
	if plan.Program, err = Find(c, cwd, p.Mounts); err != nil {
		return nil, err
	}
	if err := p.protect(plan.Workdir); err != nil {
		return nil, err
	}
	var root *op
	if m := p.rootMount(); m != nil {
		o, err := rootOp(&p, m, c.Home)
		if err != nil {
			return nil, err
		}
		if err := plan.open(&o); err != nil {
			return nil, err
		}
		o.place, root = plan.place(), &o
		plan.ops = []op{o} // closed if layout fails
	}
	if err := plan.findDevices(&p, root); err != nil {
		return nil, err
	}
	if plan.ops, err = layout(&p, c, user, p.Hostname, root); err != nil {
		return nil, err
	}
	for i := range plan.ops {
		if err := plan.open(&plan.ops[i]); err != nil {
			return nil, err
		}
	}
	if err := plan.checkDevices(); err != nil {
		return nil, err
	}
	if err := checkDests(plan.ops, plan.ops); err != nil {
		return nil, err
	}
	plan.linkDevices()
	if root == nil {
		plan.linkPath(plan.Workdir)
	}
	if sameDirectory(c.Dir, ".") {
		plan.linkPath(c.Dir)
	}
	plan.placeMounts()
	if err := plan.layOverlays(); err != nil {
		return nil, err
	}
	if plan.cred != nil {
		if err := plan.stage(!p.NoFilter); err != nil {
			return nil, err
		}
	}
	v := view(plan.ops)
	if err := checkWorkdir(v, plan.Workdir, plan.cred); err != nil {
		return nil, err
	}
	sandboxPath, given := p.Env.Lookup("PATH")
	if !given {
		sandboxPath, given = p.Base.Lookup("PATH")
	}
	switch {
	case given:
	case v.rooted():
		sandboxPath = defaultPath
	default:
		sandboxPath = sandboxPathOf(v, c.Path)
	}
	if len(p.Command) > 0 {
		found, err := "", error(nil)
		if !p.puts(p.Command[0], plan.Workdir) {
			found, err = checkCommand(v, p.Command[0], plan.Workdir, sandboxPath, c)
		}
		if err != nil && !v.inLayer(p.Command[0], plan.Workdir, sandboxPath) {
			return nil, err
		}
		if found != "" && !given && !v.rooted() {
			plan.Found, plan.Instead = found, insteadOf(v, found, sandboxPath, c.Path)
		}
	}
	plan.environment(&p, sandboxPath)
	if err := plan.build(&p); err != nil {
		return nil, err
	}
	return plan, nil
}

// NoUserns reports whether processes in the room cannot create user namespaces, regardless of the filter.
func (p *Plan) NoUserns() bool { return p.noUserns }

// Alone reports whether the network namespace belongs to the command and not to the room: see [Policy].
func (p *Plan) Alone() bool { return p.ownNet }

// Cred returns the identity of bwrap; nil if it is the same as sbxrun's.
func (p *Plan) Cred() *proc.Cred { return p.cred }

// Fresh returns the writable directories in memory, for [enter.Entry.Fresh]. It returns none if one of them contains a
// mount, which would be hidden.
func (p *Plan) Fresh() (list []enter.Tmpfs) {
	for _, o := range p.ops {
		if o.kind != opTmpfs {
			continue
		}
		for _, other := range p.ops {
			if other.kind != opTmpfs && values.Within(other.dst, o.dst) {
				return nil
			}
		}
		if o.base != "" { // commands may replace directories in its path
			return nil
		}
		list = append(list, o.tmpfs())
	}
	return list
}

// Close closes the plan's descriptors, which are not needed after Start.
func (p *Plan) Close() {
	for _, o := range p.ops {
		o.from.Close() // Close of a nil file only returns an error
	}
	for _, o := range p.overlays {
		o.Close()
	}
	p.ops, p.overlays = nil, nil
}

func (p *Plan) those(which func(*op) bool) (list []*op) {
	for i := range p.ops {
		if which(&p.ops[i]) {
			list = append(list, &p.ops[i])
		}
	}
	return list
}
