// Package capture takes snapshots of what sandboxes have written to their overlays, while they stand
// still if they have a cgroup that can be frozen.
package capture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// Source is what a snapshot is taken of.
type Source struct {
	Overlays []*room.Overlay
	Layers   map[string][]snapshots.Layer // that were below, by the overlays' destinations
	Cgroups  []string                     // of what runs there; none if it cannot be frozen
	Ended    bool                         // nothing does
}

// Take packs what was written to the overlays, and gives the snapshot its name. All snapshots of the
// store may then have most bytes together. After an error, which is the cause of ctx when that is done, the
// store is as it was.
func Take(ctx context.Context, store *snapshots.Store, m *snapshots.Manifest, from Source, most int64) error {
	p := packing{store: store, m: m, drafts: map[string]*snapshots.Draft{}}
	defer p.close()
	err := from.still(m, func() error { return p.pack(ctx, from, most) })
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return store.Add(m, p.drafts, most)
}

// packing is the making of one snapshot.
type packing struct {
	store  *snapshots.Store
	m      *snapshots.Manifest
	drafts map[string]*snapshots.Draft
}

func (p *packing) close() {
	for _, d := range p.drafts {
		d.Close()
	}
}

// pack packs what was written to each overlay.
func (p *packing) pack(ctx context.Context, from Source, left int64) error {
	for _, o := range from.Overlays {
		d, err := p.store.NewFile()
		if err != nil {
			return err
		}
		l, leftOut, err := layers.Write(ctx, d.File, o.Layer, left)
		if errors.Is(err, unix.EACCES) && os.Geteuid() != 0 {
			l, leftOut, err = writeAsRoot(ctx, d.File, o.Layer, left, err)
		}
		if err != nil {
			d.Close()
			return err
		}
		left -= l.Bytes
		p.m.LeftOut += leftOut
		t := snapshots.Tree{Dest: o.Dest, Source: o.Source, Since: o.Since.Format(time.RFC3339Nano), Layers: append([]snapshots.Layer(nil), from.Layers[o.Dest]...)}
		var layer, source unix.Stat_t
		if unix.Fstat(proc.Descriptor(o.Layer), &layer) == nil && unix.Stat(o.Source, &source) == nil && layer.Mode&0o777 != source.Mode&0o777 {
			t.Mode = fmt.Sprintf("%04o", layer.Mode&0o777)
		}
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

// PackWord is the first argument of the process that packs a layer as root of a user namespace.
const PackArg = "pack-layer"

// packed is what that process says.
type packed struct {
	Layer   snapshots.Layer
	LeftOut int
	Err     *result.Error
}

// writeAsRoot is layers.Write for a layer that has files which their modes close even to their
// owner: root of a user namespace in which the owner has an id may read them (capabilities(7),
// CAP_DAC_OVERRIDE; user_namespaces(7)). denied is returned where there are no such namespaces.
func writeAsRoot(ctx context.Context, file, upper *os.File, most int64, denied error) (l snapshots.Layer, leftOut int, err error) {
	if err := file.Truncate(0); err != nil {
		return l, 0, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return l, 0, err
	}
	c := exec.CommandContext(ctx, "/proc/self/exe", PackArg, strconv.FormatInt(most, 10))
	c.ExtraFiles, c.Stderr = []*os.File{file, upper}, os.Stderr // 3 and 4
	mapped := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapped(os.Geteuid()), GidMappings: mapped(os.Getegid()), Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // whose end is what Pdeathsig is about (prctl(2))
	defer runtime.UnlockOSThread()
	out, err := c.Output()
	var p packed
	if ctx.Err() != nil {
		return l, 0, context.Cause(ctx)
	}
	if err != nil || json.Unmarshal(out, &p) != nil {
		return l, 0, denied
	}
	if p.Err != nil {
		err = p.Err
	}
	return p.Layer, p.LeftOut, err
}

// Pack is that process: with the bound as argument, the file and the layer as descriptors 3 and 4,
// and what comes of it on stdout.
func Pack(args []string) error {
	if len(args) != 1 {
		return errors.New("pack-layer takes a bound")
	}
	most, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return err
	}
	var p packed
	if p.Layer, p.LeftOut, err = layers.Write(context.Background(), os.NewFile(3, "snapshot"), os.NewFile(4, "layer"), most); err != nil {
		p.Err = &result.Error{Code: "failed", Message: err.Error()}
		if e := (*result.Error)(nil); errors.As(err, &e) {
			p.Err.Code, p.Err.Hint = e.Code, e.Hint
		}
	}
	b, err := result.JSON(p)
	if err == nil {
		_, err = os.Stdout.Write(b)
	}
	return err
}

// still runs f while nothing runs in the sandbox, if that can be had; the manifest says whether.
func (s Source) still(m *snapshots.Manifest, f func() error) error {
	m.Frozen = s.Ended
	if s.Ended || len(s.Cgroups) == 0 {
		return f()
	}
	const within = 2 * time.Second
	lock, err := limits.LockFreezer(s.Cgroups, within)
	if errors.Is(err, unix.EAGAIN) {
		return &result.Error{Code: "busy", Message: "another snapshot of the sandbox is being taken", Hint: "try again when it is done"}
	}
	if err != nil {
		return err
	}
	if lock == nil {
		return f()
	}
	defer lock.Close()
	thaw, err := startThaw(s.Cgroups, lock)
	if err != nil {
		return err
	}
	if m.Frozen, err = limits.Freeze(s.Cgroups, within); err == nil {
		err = f()
	}
	return result.All(err, thaw())
}

// GuardWord is the first argument of sbxrund that makes it the process that thaws a sandbox.
const ThawArg = "thaw-when-closed"

// guard starts a process that thaws cgroups when this one has ended: killed in the midst of it, this
// one leaves nothing that stands still for ever. It has the lock until then: should both be killed at
// once, nobody has it, and cleanup thaws them. thaw does so now, and ends the other.
func startThaw(dirs []string, lock *os.File) (thaw func() error, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command("/proc/self/exe", append([]string{ThawArg}, dirs...)...)
	c.ExtraFiles, c.Stdin, c.Stderr, c.SysProcAttr = []*os.File{lock}, r, os.Stderr, &unix.SysProcAttr{Setsid: true} // no Ctrl-C is for it
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

// Guard is that process: with the cgroups as arguments, it thaws them at the end of its stdin.
func Thaw(dirs []string) error {
	var b [1]byte
	_, _ = os.Stdin.Read(b[:]) // an end is all that comes
	return limits.ThawDirs(dirs)
}
