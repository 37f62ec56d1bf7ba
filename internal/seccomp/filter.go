// Package seccomp makes the filter for the system calls of a payload (seccomp(2)).
//
// It is a list of what is refused: what reaches beyond the sandbox, which is the
// kernel's keyrings, sockets of families that have no network namespaces, leases on the
// caller's files, sockets whose close waits, and programs with S_ISUID or S_ISGID on a writable bind; the limits and
// the scheduling of the sandbox's init; what can keep a process from ending that was killed; and parts of the kernel
// that are large, that no ordinary program needs, and that have had more than their share of holes. Most of these
// want a capability that a payload does not have: then the filter is the second lock.
// Everything else is allowed, debuggers and sanitizers included. It is no list of what is
// allowed, because that breaks programs with every new C library.
//
// Nothing is killed for a call: it fails with EPERM, or, where programs have another way
// that they take when the kernel is too old, with ENOSYS.
package seccomp

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"

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
	column int    // of table
	audit  uint32 // of seccomp_data.arch
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

// architectures are those of this machine, its own first. There are no others (package arch).
func architectures() []architecture {
	if runtime.GOARCH == "arm64" {
		return []architecture{{arm64, unix.AUDIT_ARCH_AARCH64}, {arm, unix.AUDIT_ARCH_ARM}}
	}
	return []architecture{{x86_64, unix.AUDIT_ARCH_X86_64}, {i386, unix.AUDIT_ARCH_I386}}
}

// Program is the filter as the kernel takes it; nil for none.
func (f *Filter) Program() []unix.SockFilter {
	if f == nil {
		return nil
	}
	p := make(program, 0, 360) // made for every payload, and so at once
	p.load(archAt)
	for _, a := range architectures() {
		p.jump(unix.BPF_JEQ, a.audit, 1, 0)
		other := p.add(unix.BPF_JMP|unix.BPF_JA, 0)
		p.judge(a, f.Namespaces)
		p[other].K = p.since(other)
	}
	// Calls by numbers that we do not know.
	p.answer(missing)
	return p
}

// program is a filter in the making (seccomp(2), the kernel's networking/filter.rst).
type program []unix.SockFilter

// add appends an instruction, and returns where it is.
func (p *program) add(code uint16, k uint32) int {
	*p = append(*p, unix.SockFilter{Code: code, K: k})
	return len(*p) - 1
}

// since is how many instructions have come after one.
func (p *program) since(at int) uint32 { return uint32(len(*p) - 1 - at) }

func (p *program) load(at uint32)       { p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, at) }
func (p *program) answer(action uint32) { p.add(unix.BPF_RET|unix.BPF_K, action) }

// jump goes on so many instructions further, by what compares the number that is loaded
// with k.
func (p *program) jump(compare uint16, k uint32, ifTrue, ifFalse uint8) {
	at := p.add(unix.BPF_JMP|compare|unix.BPF_K, k)
	(*p)[at].Jt, (*p)[at].Jf = ifTrue, ifFalse
}

// among begins what is run only if the number that is loaded is one of these, of which
// there is one at least; it ends with otherwise.
func (p *program) among(numbers []uint32) (last int) {
	for i, n := range numbers {
		p.jump(unix.BPF_JEQ, n, uint8(len(numbers)-1-i), 0)
	}
	return len(*p) - 1
}

// otherwise is where numbers go on that were not among those looked for.
func (p *program) otherwise(last int) { (*p)[last].Jf = uint8(p.since(last)) }

// judge judges a call of one architecture.
func (p *program) judge(a architecture, namespaces bool) {
	p.load(numberAt)
	if a.audit == unix.AUDIT_ARCH_X86_64 {
		p.jump(unix.BPF_JGE, x32, 0, 1)
		p.answer(missing)
	}
	calls := make([]judged, 0, len(table))
	for i := range table {
		number, r := table[i].number[a.column], table[i].rule
		if number != none && (r < refuseSpace || namespaces) {
			calls = append(calls, judged{number, r, 0})
		}
	}
	slices.SortFunc(calls, func(a, b judged) int { return cmp.Compare(a.number, b.number) })
	p.search(calls)
	for r := range flags0 + 1 {
		at := len(*p)
		for _, c := range calls {
			if c.rule == r {
				(*p)[c.at].Jt = uint8(at - c.at - 1)
			}
		}
		if slices.ContainsFunc(calls, func(c judged) bool { return c.rule == r }) {
			p.verdict(r)
		}
	}
}

// judged is a call for which there is a rule.
type judged struct {
	number uint32
	rule   rule
	at     int // where the program goes on to the rule
}

// search looks for the number that is loaded among the calls, which are sorted, and allows
// it if it is none of them. When a filter is loaded the kernel tries it with every number
// there is, to remember which calls are allowed whatever their arguments (Linux 5.11): to
// ask for one number after the other takes it ten times as long.
func (p *program) search(calls []judged) {
	const few = 8
	if len(calls) > few {
		half := len(calls) / 2
		at := p.add(unix.BPF_JMP|unix.BPF_JGE|unix.BPF_K, calls[half].number)
		p.search(calls[:half])
		(*p)[at].Jt = uint8(p.since(at))
		p.search(calls[half:])
		return
	}
	for i := range calls {
		calls[i].at = p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, calls[i].number)
	}
	p.answer(unix.SECCOMP_RET_ALLOW)
}

// verdict returns from the filter as a rule says.
func (p *program) verdict(r rule) {
	// Of an argument only the lower half counts: the kernel takes these as int or less.
	argument := func(n uint32) { p.load(argsAt + 8*n) }
	// The answer is this if the argument is one of these.
	answerIf := func(n uint32, numbers []uint32, action uint32) {
		argument(n)
		last := p.among(numbers)
		p.answer(action)
		p.otherwise(last)
	}
	refuseIfSet := func(n, bits uint32) {
		argument(n)
		p.jump(unix.BPF_JSET, bits, 0, 1)
		p.answer(refused)
	}
	opening := func(flags uint32) {
		// O_TMPFILE is O_DIRECTORY and a bit of its own, which nothing else has.
		const makes = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
		argument(flags)
		p.jump(unix.BPF_JSET, makes, 1, 0)
		p.answer(unix.SECCOMP_RET_ALLOW)
		refuseIfSet(flags+1, setID)
	}
	otherwise := uint32(unix.SECCOMP_RET_ALLOW)
	switch r {
	case lack, lackSpace:
		otherwise = missing
	case mode1:
		refuseIfSet(1, setID)
	case mode2:
		refuseIfSet(2, setID)
	case flags1mode2:
		opening(1)
	case flags2mode3:
		opening(2)
	case flags0:
		refuseIfSet(0, unix.CLONE_NEWUSER)
	case family:
		answerIf(0, families[:], unix.SECCOMP_RET_ALLOW)
		otherwise = foreign
	case option:
		for _, o := range options {
			argument(1)
			level := p.among([]uint32{o.level})
			answerIf(2, []uint32{o.name}, o.answer)
			p.otherwise(level)
		}
	case terminal:
		answerIf(1, ioctls[:], refused)
	case lease:
		answerIf(1, []uint32{unix.F_SETLEASE, unix.F_SETDELEG}, refused) // Linux 6.19 has the second
	case ofInit:
		answerIf(0, []uint32{1}, refused)
	case limit:
		answerIf(0, []uint32{unix.RLIMIT_CORE}, ignored)
	case limitOf:
		answerIf(0, []uint32{1}, refused)
		argument(1)
		core := p.among([]uint32{unix.RLIMIT_CORE})
		argument(2) // a pointer: both halves count
		p.jump(unix.BPF_JEQ, 0, 0, 2)
		p.load(argsAt + 8*2 + 4)
		p.jump(unix.BPF_JEQ, 0, 1, 0)
		p.answer(ignored)
		p.otherwise(core)
	case priority:
		answerIf(0, []uint32{unix.PRIO_USER}, refused)
		answerIf(1, []uint32{1}, refused)
	case tracing:
		argument(0)
		request := p.among(traceOptions[:])
		refuseIfSet(3, unix.PTRACE_O_TRACEEXIT)
		p.otherwise(request)
	case multiplexed:
		answerIf(0, socketcalls[:], missing)
	default:
		otherwise = refused
	}
	p.answer(otherwise)
}

// setID is what a file's mode must not be given.
const setID = unix.S_ISUID | unix.S_ISGID
