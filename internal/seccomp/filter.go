// Package seccomp makes the filter for the system calls of a payload (seccomp(2)).
//
// It is a list of what is refused: what reaches beyond the sandbox, which is the
// kernel's keyrings, sockets of families that have no network namespaces, and programs
// with S_ISUID or S_ISGID on a writable bind; and parts of the kernel that are large, that
// no ordinary program needs, and that have had more than their share of holes. Most of
// them want a capability that a payload does not have: then the filter is the second lock.
// Everything else is allowed, debuggers and sanitizers included. It is no list of what is
// allowed, because that breaks programs with every new C library.
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
	calls map[rule][]uint32
}

// Offsets in struct seccomp_data. A number of 64 bits begins with its lower half on the
// machines that architectures knows.
const (
	numberAt = 0
	archAt   = 4
	argsAt   = 16 // 8 bytes each
)

// x32 marks the numbers of an ABI of x86-64 that hardly anybody has in his kernel.
const x32 = 0x40000000

// Known says whether there is a filter for this machine.
func Known() bool { return len(architectures()) > 0 }

// architectures are those of this machine, its own first.
func architectures() []architecture {
	switch runtime.GOARCH {
	case "amd64":
		return []architecture{of(x86_64, unix.AUDIT_ARCH_X86_64), of(i386, unix.AUDIT_ARCH_I386)}
	case "arm64":
		return []architecture{of(arm64, unix.AUDIT_ARCH_AARCH64), of(arm, unix.AUDIT_ARCH_ARM)}
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
	// The kernel remembers which calls are allowed whatever their arguments (Linux 5.11).
	// So those whose arguments count come first.
	rules := []rule{flags2mode3, flags1mode2, family, mode1, mode2, terminal, multiplexed, refuse, lack}
	if f.Namespaces {
		rules = append(rules, refuseSpace, lackSpace, flags0)
	}
	for _, r := range rules {
		list = append(list, among(a.calls[r], verdict(r))...)
	}
	return append(list, bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW})
}

// among runs then, which must return, if the number that is loaded is one of these.
func among(numbers []uint32, then []bpf.Instruction) (list []bpf.Instruction) {
	for i, n := range numbers {
		if last := i == len(numbers)-1; last {
			list = append(list, bpf.JumpIf{Cond: bpf.JumpEqual, Val: n, SkipFalse: uint8(len(then))})
		} else {
			list = append(list, bpf.JumpIf{Cond: bpf.JumpEqual, Val: n, SkipTrue: uint8(len(numbers) - 1 - i)})
		}
	}
	if list == nil {
		return nil
	}
	return append(list, then...)
}

// verdict returns from the filter as a rule says.
func verdict(r rule) []bpf.Instruction {
	// Of an argument only the lower half counts: the kernel takes these as int or less.
	load := func(arg uint32) bpf.Instruction { return bpf.LoadAbsolute{Off: argsAt + 8*arg, Size: 4} }
	allow := bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
	unlessSet := func(bits uint32) []bpf.Instruction {
		return []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: bits, SkipFalse: 1}, bpf.RetConstant{Val: refused}, allow}
	}
	opening := func(flags uint32) []bpf.Instruction {
		// O_TMPFILE is O_DIRECTORY and a bit of its own, which nothing else has.
		const makes = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
		return append([]bpf.Instruction{load(flags), bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: makes, SkipTrue: 1}, allow, load(flags + 1)}, unlessSet(setID)...)
	}
	switch r {
	case lack, lackSpace:
		return []bpf.Instruction{bpf.RetConstant{Val: missing}}
	case mode1:
		return append([]bpf.Instruction{load(1)}, unlessSet(setID)...)
	case mode2:
		return append([]bpf.Instruction{load(2)}, unlessSet(setID)...)
	case flags1mode2:
		return opening(1)
	case flags2mode3:
		return opening(2)
	case flags0:
		return append([]bpf.Instruction{load(0)}, unlessSet(unix.CLONE_NEWUSER)...)
	case family:
		return append([]bpf.Instruction{load(0)}, append(among(families[:], []bpf.Instruction{allow}), bpf.RetConstant{Val: foreign})...)
	case terminal:
		return append([]bpf.Instruction{load(1)}, append(among(ioctls[:], []bpf.Instruction{bpf.RetConstant{Val: refused}}), allow)...)
	case multiplexed:
		const socket, socketpair = 1, 8 // socketcall(2)
		return append([]bpf.Instruction{load(0)}, append(among([]uint32{socket, socketpair}, []bpf.Instruction{bpf.RetConstant{Val: missing}}), allow)...)
	}
	return []bpf.Instruction{bpf.RetConstant{Val: refused}}
}

// setID is what a file's mode must not be given.
const setID = unix.S_ISUID | unix.S_ISGID
