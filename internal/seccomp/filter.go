// Package seccomp makes the filter for the system calls of a payload (seccomp(2)).
//
// It is a list of what is refused: what reaches beyond the sandbox, which is the
// kernel's keyrings; and parts of the kernel that are large, that no ordinary program
// needs, and that have had more than their share of holes. Most of them want a
// capability that a payload does not have: then the filter is the second lock. Everything
// else is allowed, debuggers and sanitizers included. It is no list of what is allowed,
// because that breaks programs with every new C library.
//
// Nothing is killed for a call: it fails with EPERM, or, where programs have another way
// that they take when the kernel is too old, with ENOSYS.
package seccomp

import (
	"encoding/binary"
	"fmt"
	"runtime"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Filter is which calls are refused.
type Filter struct {
	// Namespaces: those that make user namespaces as well, and enter any. For where
	// bubblewrap cannot switch that off. clone3 is gone then, because a filter cannot
	// look at its arguments; C libraries take clone.
	Namespaces bool
}

// Name is the filter in one word, for [ByName]; "off" for nil, which is none.
func (f *Filter) Name() string {
	switch {
	case f == nil:
		return "off"
	case f.Namespaces:
		return "namespaces"
	}
	return "default"
}

// ByName is the filter that has said this name.
func ByName(name string) (*Filter, error) {
	switch name {
	case "off":
		return nil, nil
	case "namespaces":
		return &Filter{Namespaces: true}, nil
	case "default":
		return &Filter{}, nil
	}
	return nil, fmt.Errorf("no filter is called %.20q", name)
}

// architecture is one set of numbers that a process can make its calls by: on most
// kernels a program of the 32-bit sibling runs, too.
type architecture struct {
	audit uint32 // of seccomp_data.arch
	calls []call
	clone uint32
}

type call struct {
	number uint32
	answer uint32
	spaces bool // only with Filter.Namespaces
}

// Offsets in struct seccomp_data. A number of 64 bits begins with its lower half on the
// machines that architectures knows.
const (
	numberAt   = 0
	archAt     = 4
	firstArgAt = 16
)

// x32 marks the numbers of an ABI of x86-64 that hardly anybody has in his kernel.
const x32 = 0x40000000

// Known says whether there is a filter for this machine.
func Known() bool { return len(architectures()) > 0 }

// architectures are those of this machine, its own first.
func architectures() []architecture {
	switch runtime.GOARCH {
	case "amd64":
		return []architecture{of(x86_64, unix.AUDIT_ARCH_X86_64, 56), of(i386, unix.AUDIT_ARCH_I386, 120)}
	case "arm64":
		return []architecture{of(arm64, unix.AUDIT_ARCH_AARCH64, 220), of(arm, unix.AUDIT_ARCH_ARM, 120)}
	}
	return nil
}

// Program is the filter as the kernel takes it, an array of struct sock_filter; nil for
// none.
func (f *Filter) Program() ([]byte, error) {
	if f == nil {
		return nil, nil
	}
	program := []bpf.Instruction{bpf.LoadAbsolute{Off: archAt, Size: 4}}
	for _, a := range architectures() {
		block := f.block(a)
		program = append(program,
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.audit, SkipTrue: 1},
			bpf.Jump{Skip: uint32(len(block))})
		program = append(program, block...)
	}
	// Calls by numbers that we do not know.
	program = append(program, bpf.RetConstant{Val: missing})
	raw, err := bpf.Assemble(program)
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, 8*len(raw))
	for _, i := range raw {
		out = binary.NativeEndian.AppendUint16(out, i.Op)
		out = append(out, i.Jt, i.Jf)
		out = binary.NativeEndian.AppendUint32(out, i.K)
	}
	return out, nil
}

// block judges a call of one architecture.
func (f *Filter) block(a architecture) []bpf.Instruction {
	list := []bpf.Instruction{bpf.LoadAbsolute{Off: numberAt, Size: 4}}
	if a.audit == unix.AUDIT_ARCH_X86_64 {
		list = append(list, bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: x32, SkipFalse: 1}, bpf.RetConstant{Val: missing})
	}
	for _, c := range a.calls {
		if !c.spaces || f.Namespaces {
			list = append(list, bpf.JumpIf{Cond: bpf.JumpEqual, Val: c.number, SkipFalse: 1}, bpf.RetConstant{Val: c.answer})
		}
	}
	if f.Namespaces {
		list = append(list,
			bpf.JumpIf{Cond: bpf.JumpEqual, Val: a.clone, SkipFalse: 3},
			bpf.LoadAbsolute{Off: firstArgAt, Size: 4},
			bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: unix.CLONE_NEWUSER, SkipFalse: 1},
			bpf.RetConstant{Val: refused})
	}
	return append(list, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
}
