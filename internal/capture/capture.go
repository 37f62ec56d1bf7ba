// Package capture takes snapshots of overlays. While it does, it freezes the sandbox if that has a cgroup.
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

// Source is the sandbox of a snapshot.
type Source struct {
	Overlays []*room.Overlay
	Layers   map[string][]snapshots.Layer // lower layers by mount point
	Cgroups  []string                     // of its processes; empty if it cannot be frozen
	Ended    bool                         // no processes are left
}

// Take packs the overlays' upper layers and adds the snapshot to the store. It fails if the store's snapshots
// would exceed most bytes. After an error, which is the cause of ctx if that is done, the store is unchanged.
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

// packing is a snapshot in progress.
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

// pack packs the upper layer of each overlay.
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
		t := snapshots.Tree{Dest: o.Dest, Source: o.Source, Image: o.Image, Since: o.Since.Format(time.RFC3339Nano), Layers: append([]snapshots.Layer(nil), from.Layers[o.Dest]...)}
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

// PackArg is the first argument of the process that packs a layer as root of a user namespace.
const PackArg = "pack-layer"

// packed is the output of that process.
type packed struct {
	Layer   snapshots.Layer
	LeftOut int
	Err     *result.Error
}

// writeAsRoot is layers.Write for a layer with files whose modes deny access even to their owner. Root of a
// user namespace in which the owner has an ID may read them (capabilities(7), CAP_DAC_OVERRIDE;
// user_namespaces(7)). It returns denied if such namespaces are not available.
func writeAsRoot(ctx context.Context, file, upper *os.File, most int64, denied error) (l snapshots.Layer, leftOut int, err error) {
	if err := file.Truncate(0); err != nil {
		return l, 0, err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return l, 0, err
	}
	c := exec.CommandContext(ctx, "/proc/self/exe", PackArg, strconv.FormatInt(most, 10))
	c.ExtraFiles, c.Stderr = []*os.File{file, upper}, os.Stderr // descriptors 3 and 4
	mapped := func(id int) []syscall.SysProcIDMap { return []syscall.SysProcIDMap{{HostID: id, Size: 1}} }
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: mapped(os.Geteuid()), GidMappings: mapped(os.Getegid()), Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // Pdeathsig refers to the thread (prctl(2))
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

// Pack is the main function of that process. Its argument is the limit, descriptors 3 and 4 are the file and
// the layer, and it writes the result to stdout.
func Pack(args []string) error {
	if len(args) != 1 {
		return errors.New("pack-layer: want one argument, the limit")
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

// still runs f while the sandbox is frozen, if it can be; the manifest records whether it was.
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

// ThawArg is the first argument of the process that thaws a sandbox.
const ThawArg = "thaw-when-closed"

// startThaw starts a process that thaws the cgroups when this process ends, so that a crash leaves nothing
// frozen. That process holds the lock; if both are killed, the lock is free and cleanup thaws the cgroups.
// thaw thaws them now and ends the process.
func startThaw(dirs []string, lock *os.File) (thaw func() error, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	c := exec.Command("/proc/self/exe", append([]string{ThawArg}, dirs...)...)
	c.ExtraFiles, c.Stdin, c.Stderr, c.SysProcAttr = []*os.File{lock}, r, os.Stderr, &unix.SysProcAttr{Setsid: true} // not interrupted by Ctrl-C
	if err := c.Start(); err != nil {
		w.Close()
		return nil, err
	}
	return func() error {
		err := limits.ThawDirs(dirs) // not left to the process, which may have been killed
		w.Close()
		_ = c.Wait() // it has nothing to do, or is dead
		return err
	}, nil
}

// Thaw is the main function of that process. It thaws the cgroups in dirs at the end of its stdin.
func Thaw(dirs []string) error {
	var b [1]byte
	_, _ = os.Stdin.Read(b[:]) // only an end of file arrives
	return limits.ThawDirs(dirs)
}
