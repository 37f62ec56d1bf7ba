package room

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Overlay is a copy-on-write view of a host directory: changes go to a separate layer.
type Overlay struct {
	Source string `json:"source"` // on the host, without links
	Dest   string `json:"dest"`   // in the sandbox
	// Image is the digest of the image whose tree the source is; "" for another directory.
	Image string `json:"image,omitempty"`
	// Since is the time when the source was first examined, before anything was written to the layer. The timestamp that
	// a file system records for a change may be one tick (up to 10 ms) earlier than the change, but never later.
	Since time.Time `json:"since"`
	// Base is the source's identity ([tree.Identity]) at that time; "" if unknown.
	Base string `json:"base,omitempty"`
	// Index is the digest of the source's git index ([hostfiles.GitIndex]) at that time; "" if it has no index.
	Index string `json:"index,omitempty"`
	// Upper is the directory on disk that contains the layer as [enter.UpperName]; "" for a layer in memory, which
	// vanishes with its last descriptor.
	Upper string `json:"upper,omitempty"`
	// Lower are read-only layers between the source and the changes, the uppermost first.
	Lower []string `json:"-"`

	// Layer is the layer's directory, once the room is built.
	Layer *os.File    `json:"-"`
	lock  *os.File    // locked file of the directory on disk
	disk  *os.File    // Upper, held open (O_PATH) until the plan is closed
	upper unix.Stat_t // status of the layer's directory in Upper
	mount *enter.Overlay
}

// Compared returns the time since which changes of the source conflict with the layer. The tree of an image does not change,
// but its files get a new ctime when another image shares them.
func (o *Overlay) Compared() time.Time {
	if o.Image != "" {
		return time.Now()
	}
	return o.Since
}

// Close closes the descriptors of the layer. A layer in memory is then lost.
func (o *Overlay) Close() {
	for _, f := range []*os.File{o.Layer, o.lock, o.disk} {
		f.Close() // a directory and a lock; Close of a nil file only returns an error
	}
}

// layOverlays prepares the layers of the overlays.
func (p *Plan) layOverlays() error {
	used := map[string][]*Overlay{} // by Upper
	list := p.those(func(o *op) bool { return o.kind == opOverlay })
	list = append(list, p.those(func(o *op) bool { return o.kind == opRoot && o.mount.Kind == Overlaid })...) // mounted last
	for _, op := range list {
		o, err := p.newOverlay(op)
		if err != nil {
			return err
		}
		p.overlays = append(p.overlays, o)
		if dir := op.mount.Upper; dir != "" {
			used[dir] = append(used[dir], o)
		}
	}
	for dir, list := range used {
		if err := p.openUpper(dir, list); err != nil {
			return err
		}
	}
	return p.addLayers()
}

// newOverlay checks a single overlay.
func (p *Plan) newOverlay(o *op) (*Overlay, error) {
	refuse := func(format string, args ...any) (*Overlay, error) {
		return nil, &result.Error{Code: "overlay", Message: fmt.Sprintf("cannot lay an overlay over %q: ", o.src) + fmt.Sprintf(format, args...)}
	}
	for _, other := range p.ops {
		if o.kind == opOverlay && other.dst != o.dst && values.Within(other.dst, o.dst) {
			return refuse("%s is mounted within, and would be hidden", other.dst)
		}
	}
	real, err := realPath(o.from)
	if err != nil {
		return refuse("%v", err)
	}
	if o.st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return refuse("it is not a directory")
	}
	mode := o.st.Mode & 0o1777
	if given, err := strconv.ParseUint(o.mount.Mode, 8, 32); err == nil {
		mode = mode&^0o777 | uint32(given)&0o777
	}
	since := time.Now()
	base, index, err := identity(real)
	if err != nil {
		return refuse("%v", err)
	}
	if first := o.mount.Since; !first.IsZero() && first.Before(since) {
		since, index = first, "" // the index at that time is unknown
	}
	o.overlay = &enter.Overlay{Lower: []enter.Bind{o.bind()}, Size: o.size, Mode: mode}
	return &Overlay{Source: real, Dest: o.dst, Image: o.mount.Image, Since: since.UTC().Round(0), Base: base, Index: index, Lower: o.mount.Lower, mount: o.overlay}, nil
}

// identity returns the [tree.Identity] of a directory, and the digest of its git index.
func identity(name string) (base, index string, err error) {
	fd, err := unix.Open(name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", "", err
	}
	defer unix.Close(fd)
	base, err = tree.Identity(fd)
	return base, hostfiles.GitIndex(fd), err
}

// addLayers adds the binds of the overlays' further layers to the plan.
func (p *Plan) addLayers() error {
	bind := func(kind opKind, src string, from *os.File) (enter.Bind, error) {
		o := op{kind: kind, src: src, dst: p.place(), mount: new(Mount), from: from, layer: true}
		err := p.open(&o)
		p.ops = append(p.ops, o)
		return o.bind(), err
	}
	for _, o := range p.overlays {
		for i, lower := range o.Lower {
			b, err := bind(opBind, lower, nil)
			if err != nil {
				return err
			}
			o.mount.Lower = slices.Insert(o.mount.Lower, i, b)
		}
		if o.Upper != "" {
			b, err := bind(opBindRW, o.Upper, o.disk)
			if err != nil {
				return err
			}
			o.mount.Upper = &b
		}
	}
	return nil
}

// adopt assigns the layers that the room has sent to the overlays, and verifies that those on disk are the directories
// that were opened.
func adopt(overlays []*Overlay, layers []*os.File) error {
	if len(layers) != len(overlays) {
		return fmt.Errorf("received %d of %d layers", len(layers), len(overlays))
	}
	for i, o := range overlays {
		o.Layer = layers[i]
		if o.Upper == "" {
			continue
		}
		var is unix.Stat_t
		if err := unix.Fstat(proc.Descriptor(o.Layer), &is); err != nil {
			return err
		}
		if is.Dev != o.upper.Dev || is.Ino != o.upper.Ino {
			return fmt.Errorf("%s was replaced", o.Upper)
		}
	}
	return nil
}

// overlayError explains why an overlay could not be mounted. It returns nil for other errors.
func overlayError(step *proc.StartError) *result.Error {
	e := &result.Error{Code: "overlay", Message: "cannot mount the overlay: " + step.Error(), Err: step}
	switch {
	case step.Step == enter.StepXattr && (errors.Is(step.Err, unix.EOPNOTSUPP) || errors.Is(step.Err, unix.EPERM)):
		e.Message = "cannot mount the overlay: its layer needs extended attributes, which directories in memory have from Linux 6.6 on"
		e.Hint = "--upper DIR keeps the layer on disk"
	case step.Step == enter.StepLayer && errors.Is(step.Err, unix.EINVAL):
		e.Message = "cannot mount the overlay: another file system is mounted within the directory"
		e.Hint = "lay it over a directory that has no mount below it"
	case step.Step == enter.StepOverlay && errors.Is(step.Err, unix.ENODEV):
		e.Message, e.Hint = "cannot mount the overlay: this kernel has no overlayfs", "modprobe overlay"
	case step.Step == enter.StepOverlay && (errors.Is(step.Err, unix.EPERM) || errors.Is(step.Err, unix.ENOSYS)):
		e.Hint = "overlays of ordinary users need Linux 5.11"
	case step.Step == enter.StepOverlay && errors.Is(step.Err, unix.EINVAL):
		e.Hint = "overlayfs may not support the file system of the directory or of --upper"
	case step.Step != enter.StepOverlay && step.Step != enter.StepLayer && step.Step != enter.StepXattr:
		return nil
	}
	return e
}
