package sandbox

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
)

// onRecord returns the records of the overlays, by which other processes find the layers.
func (s *Sandbox) onRecord() (out []state.Overlay) {
	for _, o := range s.Parts.Overlays {
		out = append(out, state.Overlay{Source: o.Source, Dest: o.Dest, Image: o.Image, Since: o.Since.Format(time.RFC3339Nano), Base: o.Base, Index: o.Index, Upper: o.Upper, Lower: o.Lower, Layer: proc.Descriptor(o.Layer), Layers: s.Parts.Layers[o.Dest]})
	}
	return out
}

// recordable returns an error for a path that is not UTF-8. Package json would change it to the path of
// another directory, which diff and apply would then open.
func recordable(list []*room.Overlay) error {
	for _, o := range list {
		for _, name := range append([]string{o.Source, o.Dest, o.Upper}, o.Lower...) {
			if !utf8.ValidString(name) {
				return &result.Error{Code: "usage", Message: fmt.Sprintf("cannot record an overlay path that is not UTF-8: %.200q", name), Hint: "rename the directory, or use sbxrun run with --diff and --apply"}
			}
		}
	}
	return nil
}

// forgetOverlays keeps only layers on disk in the record.
func (s *Sandbox) forgetOverlays() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record.Overlays = nil
	for _, o := range s.onRecord() {
		if o.Layer = 0; o.Upper != "" {
			s.record.Overlays = append(s.record.Overlays, o)
		}
	}
}

// Overlays opens the layers of a sandbox for reading, while commands may be writing to them. For an ended
// sandbox it opens those on disk. The caller closes them.
//
// A layer in memory can only be reached through its supervisor's descriptor, which is reopened
// (proc_pid_fd(5)). That needs ptrace permission, so only the sandbox's owner and root can do it. The
// sandbox itself does not take part in it.
func Overlays(e *state.Entry) (list []*room.Overlay, err error) {
	defer func() {
		if err != nil {
			closeOverlays(list)
			list = nil
		}
	}()
	var supervisor *proc.Process
	if e.Lives() {
		if supervisor, err = e.Record.Supervisor.Open(); err != nil {
			return nil, fmt.Errorf("the supervisor of %s: %w", e.What(), err)
		}
		defer supervisor.Close()
	}
	for _, r := range e.Record.Overlays {
		if supervisor == nil && r.Upper == "" {
			continue // in memory; the supervisor was killed before it could remove it
		}
		o := &room.Overlay{Source: r.Source, Dest: r.Dest, Image: r.Image, Base: r.Base, Index: r.Index, Upper: r.Upper, Lower: r.Lower}
		list = append(list, o)
		if o.Since, err = time.Parse(time.RFC3339Nano, r.Since); err != nil {
			return list, err
		}
		if supervisor == nil {
			o.Layer, err = room.UpperDir(r.Upper)
		} else {
			o.Layer, err = layerOf(supervisor, r.Layer)
		}
		if err != nil {
			return list, &result.Error{Code: "layer", Message: fmt.Sprintf("the layer of %s in %s: %v", r.Dest, e.What(), err), Err: err}
		}
	}
	return list, nil
}

// layerOf opens a directory through a process's descriptor.
func layerOf(p *proc.Process, descriptor int) (*os.File, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(p.PID)+"/fd/"+strconv.Itoa(descriptor), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if p.Exited() { // the PID may have been reused
		if err == nil {
			unix.Close(fd)
		}
		return nil, errors.New("the sandbox has just ended")
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "layer"), nil
}
