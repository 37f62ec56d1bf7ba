package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// takeSnapshot keeps what a sandbox has written. A sandbox that runs stands still meanwhile, if it
// has a cgroup that can be frozen; the manifest says whether it did. SIGSTOP is no substitute: a
// process can undo it for another (SIGCONT), and every parent is told of it (SIGCHLD).
func takeSnapshot(store *snapshots.Store, flags *cli.Snapshot, name string) error {
	m, err := snapshots.NewManifest(string(flags.Name), time.Duration(flags.TTL))
	if err != nil {
		return err
	}
	dir, err := state.Look(state.Mine())
	if err != nil {
		return err
	}
	defer dir.Close()
	e, err := dir.Find(name)
	if err != nil {
		return err
	}
	overlays, err := sandbox.Overlays(e)
	if err != nil {
		return err
	}
	defer func() {
		for _, o := range overlays {
			o.Close()
		}
	}()
	if len(overlays) == 0 {
		return noOverlays(e)
	}
	m.Sandbox, m.SandboxName, m.Workdir = e.ID, e.Record.Name, e.Record.Workdir
	p := packing{store: store, m: m, most: int64(flags.MaxSize), drafts: map[string]*snapshots.Draft{}}
	defer p.close()
	if err := p.still(e, func() error { return p.pack(e.Record.Overlays, overlays) }); err != nil {
		return err
	}
	if err := store.Add(m, p.drafts, p.most); err != nil {
		return err
	}
	if m.LeftOut > 0 {
		fmt.Fprintf(os.Stderr, "sbxrun: warning: %d sockets, named pipes and devices are left out\n", m.LeftOut)
	}
	return printSnapshot(m, flags.JSON)
}

func noOverlays(e *state.Entry) error {
	err := &result.Error{Code: "usage", Message: "the sandbox " + e.Title() + " has no overlay, so there is nothing to keep", Hint: "start it with --overlay, or --cwd overlay"}
	if !e.Lives() {
		err.Code, err.Message, err.Hint = "ended", "the sandbox "+e.Title()+" has ended, and no layer of it is on disk", "take the snapshot while it runs, or start it with --upper"
	}
	return err
}

// packing is the making of one snapshot.
type packing struct {
	store  *snapshots.Store
	m      *snapshots.Manifest
	most   int64
	drafts map[string]*snapshots.Draft
}

func (p *packing) close() {
	for _, d := range p.drafts {
		d.Close()
	}
}

// pack packs what was written to each overlay.
func (p *packing) pack(known []state.Overlay, overlays []*room.Overlay) error {
	left := p.most
	for i, o := range overlays {
		d, err := p.store.NewFile()
		if err != nil {
			return err
		}
		l, leftOut, err := layers.Write(d.File, o.Layer, left)
		if errors.Is(err, unix.EACCES) && os.Geteuid() != 0 {
			l, leftOut, err = writeAsRoot(d.File, o.Layer, left, err)
		}
		if err != nil {
			d.Close()
			return err
		}
		left -= l.Bytes
		p.m.LeftOut += leftOut
		t := snapshots.Tree{Dest: o.Dest, Source: o.Source, Layers: append([]snapshots.Layer(nil), known[i].Layers...)}
		if l.Entries == 0 && len(t.Layers) > 0 || p.drafts[l.SHA256] != nil {
			d.Close()
		} else {
			p.drafts[l.SHA256] = d
		}
		if l.Entries > 0 || len(t.Layers) == 0 {
			t.Layers = append(t.Layers, l)
		}
		if len(t.Layers) > snapshots.MaxLayers {
			return &result.Error{Code: "too-large", Message: fmt.Sprintf("%s has %d layers already, one for each snapshot that it was started from", o.Dest, snapshots.MaxLayers),
				Hint: "start from the original directory, and copy the files in"}
		}
		p.m.Trees = append(p.m.Trees, t)
	}
	return nil
}

// packWord is the first argument of the process that packs a layer as root of a user namespace.
const packWord = "pack-layer"

// packed is what that process says.
type packed struct {
	Layer   snapshots.Layer
	LeftOut int
	Err     *result.Error
}

// writeAsRoot is layers.Write for a layer that has files which their modes close even to their
// owner: root of a user namespace in which the owner has an id may read them (capabilities(7),
// CAP_DAC_OVERRIDE; user_namespaces(7)). denied is returned where there are no such namespaces.
func writeAsRoot(file, upper *os.File, most int64, denied error) (l snapshots.Layer, leftOut int, err error) {
	if err := file.Truncate(0); err != nil {
		return l, 0, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return l, 0, err
	}
	c := exec.Command("/proc/self/exe", packWord, strconv.FormatInt(most, 10))
	c.ExtraFiles, c.Stderr = []*os.File{file, upper}, os.Stderr // 3 and 4
	mapped := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapped(os.Geteuid()), GidMappings: mapped(os.Getegid()), Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // whose end is what Pdeathsig is about (prctl(2))
	defer runtime.UnlockOSThread()
	out, err := c.Output()
	var p packed
	if err != nil || json.Unmarshal(out, &p) != nil {
		return l, 0, denied
	}
	if p.Err != nil {
		err = p.Err
	}
	return p.Layer, p.LeftOut, err
}

// packCommand is that process.
func packCommand(args []string) int {
	most, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return fail(err)
	}
	var p packed
	if p.Layer, p.LeftOut, err = layers.Write(os.NewFile(3, "snapshot"), os.NewFile(4, "layer"), most); err != nil {
		p.Err = &result.Error{Code: "failed", Message: err.Error()}
		if e := (*result.Error)(nil); errors.As(err, &e) {
			p.Err.Code, p.Err.Hint = e.Code, e.Hint
		}
	}
	if err := printJSON(p); err != nil {
		return fail(err)
	}
	return 0
}

// still runs f while nothing runs in the sandbox, as far as that can be had.
func (p *packing) still(e *state.Entry, f func() error) error {
	if !e.Lives() {
		p.m.Frozen = true
		return f()
	}
	use, err := sandbox.Enter(e.ID) // it does not become idle meanwhile
	if err != nil {
		return err
	}
	defer use.Close()
	dirs := use.Access.Cgroups
	if len(dirs) == 0 {
		return f()
	}
	thaw, err := guard(dirs)
	if err != nil {
		return err
	}
	const within = 2 * time.Second
	if p.m.Frozen, err = limits.Freeze(dirs, within); err == nil {
		err = f()
	}
	return result.All(err, thaw())
}

// guardWord is the first argument of the process that thaws a sandbox.
const guardWord = "thaw-when-closed"

// guard starts a process that thaws cgroups when this one has ended: killed in the midst of it, this
// one leaves nothing that stands still for ever. thaw does so now, and ends the other.
func guard(dirs []string) (thaw func() error, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command("/proc/self/exe", append([]string{guardWord}, dirs...)...)
	c.Stdin, c.Stderr, c.SysProcAttr = r, os.Stderr, &unix.SysProcAttr{Setsid: true} // no Ctrl-C is for it
	if err := c.Start(); err != nil {
		w.Close()
		return nil, err
	}
	return func() error {
		err := limits.ThawDirs(dirs) // by itself: the other may have been killed
		w.Close()
		_ = c.Wait() // it has found nothing to do, or is dead
		return err
	}, nil
}

// thawWhenClosed is that process.
func thawWhenClosed(dirs []string) int {
	var b [1]byte
	_, _ = os.Stdin.Read(b[:]) // an end is all that comes
	if err := limits.ThawDirs(dirs); err != nil {
		return fail(err)
	}
	return 0
}

// unpackCommand unpacks the layers of a snapshot for the sandbox that start makes: for the user
// whose ids follow, if they do.
func unpackCommand(args []string) int {
	var owner *layers.Owner
	if len(args) == 3 {
		owner = &layers.Owner{}
		if _, err := fmt.Sscan(strings.Join(args[1:], " "), &owner.UID, &owner.GID); err != nil {
			return fail(err)
		}
	}
	store, err := openStore(snapshots.Open)
	if err != nil {
		return fail(err)
	}
	defer store.Close()
	m, err := store.Find(args[0])
	if err != nil {
		return fail(err)
	}
	for _, t := range m.Trees {
		for _, l := range t.Layers {
			u, err := layers.Ensure(store, l, owner)
			if err != nil {
				return fail(err)
			}
			u.Close()
		}
	}
	return 0
}
