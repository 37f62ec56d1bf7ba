package room

import (
	"cmp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/enter"
)

// furnishing returns the work of the entering process in the new room.
func (p *Plan) furnishing() *enter.Furnishing {
	f := &enter.Furnishing{ReadOnly: ownMounts, NoUserns: p.noUserns, OwnNet: p.ownNet}
	for i := range p.ops {
		o := &p.ops[i]
		switch o.kind {
		case opTmpfs:
			t := o.tmpfs()
			t.Dest = o.at()
			f.Tmpfs = append(f.Tmpfs, t)
		case opCopy:
			f.Files = append(f.Files, enter.File{Dest: o.at(), Data: o.data})
		}
		m := enter.Mount{Dest: o.dst, Base: o.base, File: o.kind == opCopy || o.st != nil && o.st.Mode&unix.S_IFMT != unix.S_IFDIR, Bind: o.bind()}
		if o.kind == opOverlay {
			m.Base, m.Overlay = cmp.Or(o.base, "/"), o.overlay
		}
		if o.tree != "" {
			f.Clones = append(f.Clones, enter.Clone{Source: p.treePlace(o.tree) + strings.TrimPrefix(o.src, o.tree), Dest: o.dst, File: o.file})
			continue
		}
		if m.Base != "" || o.host() && o.mount != nil && !o.layer {
			f.Mounts = append(f.Mounts, m)
		}
	}
	if f.Root = p.root(); f.Root != nil && p.ops[0].overlay != nil {
		f.ReadOnly = []string{"/dev"}
	}
	return f
}

// tmpfs describes an opTmpfs for the entering process.
func (o *op) tmpfs() enter.Tmpfs {
	return enter.Tmpfs{Dest: o.dst, Mode: tmpfsMode(o.dst), Size: o.size}
}

// tmpfsMode returns the mode that programs expect.
func tmpfsMode(dst string) uint32 {
	switch dst {
	case "/tmp", "/var/tmp", "/dev/shm":
		return 0o1777
	case Home:
		return 0o700
	}
	return 0o755
}
