package room

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Plain describes a plan for a bwrap that also does sbxrun's work in the room and runs the command itself.
type Plain struct {
	Options []string // of bwrap, without the filter
	Copies  []Copy   // for descriptors from FirstCopy on
	Staged  []Staged // bound below [proc.StageDir], by their numbers
	Filter  []byte   // in bwrap's format; nil for none
	InHost  bool     // it mounts in directories of the host
}

// Copy is a file that bwrap copies.
type Copy struct {
	Source string // on the host; "" for a generated file
	Data   []byte
}

// Staged is a bind that bwrap could not make by its path.
type Staged struct {
	Source string
	Idmap  string // option X-mount.idmap of mount(8), util-linux 2.39; "" for none
}

// Plain returns the plan in this form. Its bwrap must be [Program.Whole].
func (p *Plan) Plain() Plain {
	out := Plain{Options: append(p.options(true), "--new-session", "--chdir", p.Workdir)}
	for _, v := range p.env {
		out.Options = append(out.Options, "--setenv", v.Name, v.Value)
	}
	for i := range p.ops {
		o := &p.ops[i]
		if o.kind == opCopy {
			out.Copies = append(out.Copies, Copy{o.src, o.data})
		}
		if o.staged {
			s := Staged{Source: o.src}
			if o.owner != nil {
				s.Idmap = p.idmap(o.owner)
			}
			out.Staged = append(out.Staged, s)
		}
		out.InHost = out.InHost || o.base != ""
	}
	if program := p.filter.Program(); len(program) > 0 {
		out.Filter = unsafe.Slice((*byte)(unsafe.Pointer(&program[0])), len(program)*unix.SizeofSockFilter)
	}
	return out
}
