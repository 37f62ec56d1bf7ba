// Package seccomp builds the filter for the system calls of a payload (seccomp(2)).
//
// The filter is a deny list. It refuses calls that reach beyond the sandbox: the kernel's keyrings, sockets of families
// without network namespaces, leases on the caller's files, sockets whose close blocks, and setuid or setgid files on a
// writable bind. It protects the limits and the scheduling of the sandbox's init, refuses calls that can keep a killed
// process from ending, and blocks large parts of the kernel that ordinary programs do not need and that had many
// vulnerabilities. Most of these calls also require a capability that a payload does not have.
// Everything else is allowed, including debuggers and sanitizers. An allow list would break programs with every new
// C library.
//
// No call kills the process. A refused call fails with EPERM, or with ENOSYS if programs have a fallback for
// older kernels.
package seccomp

import (
	"cmp"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// Filter selects the refused calls. An empty or unknown Filter is the strictest, Namespaces.
type Filter string

const (
	Off     Filter = "off" // no filter
	Default Filter = "default"
	// Namespaces also refuses to create user namespaces and to enter any namespace, for machines where bubblewrap
	// cannot disable them. clone3 then fails with ENOSYS, because a filter cannot read its arguments; C libraries
	// fall back to clone.
	Namespaces Filter = "namespaces"
)

// architecture is a set of system call numbers. Most kernels also run programs of the 32-bit sibling.
type architecture struct {
	column int    // of table
	audit  uint32 // of seccomp_data.arch
}

// Offsets in struct seccomp_data. All supported machines are little-endian.
const (
	numberAt = 0
	archAt   = 4
	argsAt   = 16 // 8 bytes each
)

// armPrivate is the first private call of 32-bit ARM (__ARM_NR_BASE).
const armPrivate = 0x0f0000

// architectures returns the architectures of a machine, the native one first. Package arch excludes other machines.
func architectures(goarch string) []architecture {
	if goarch == "arm64" {
		return []architecture{{arm64, unix.AUDIT_ARCH_AARCH64}, {arm, unix.AUDIT_ARCH_ARM}}
	}
	return []architecture{{x86_64, unix.AUDIT_ARCH_X86_64}, {i386, unix.AUDIT_ARCH_I386}}
}

// Program returns the filter in the kernel's form; nil for Off.
func (f Filter) Program() []unix.SockFilter {
	if f == Off {
		return nil
	}
	return f.program(runtime.GOARCH)
}

func (f Filter) program(goarch string) program {
	p := make(program, 0, 430) // allocate once: every payload needs it
	// Jumps to the rules, which the architectures share.
	var ways [2 * rules]struct {
		rule rule
		at   int
	}
	n := 0
	p.load(archAt)
	for _, a := range architectures(goarch) {
		p.jump(unix.BPF_JEQ, a.audit, 1, 0)
		other := p.add(unix.BPF_JMP|unix.BPF_JA, 0)
		calls := p.judge(a, f != Default)
		for r := range rules {
			at := len(p)
			for _, c := range calls {
				if c.rule == r {
					p[c.at].Jt = near(uint32(at - c.at - 1))
				}
			}
			if slices.ContainsFunc(calls, func(c judged) bool { return c.rule == r }) {
				ways[n].rule, ways[n].at = r, p.add(unix.BPF_JMP|unix.BPF_JA, 0)
				n++
			}
		}
		p[other].K = p.since(other)
	}
	// Calls of unknown architectures.
	p.answer(missing)
	for r := range rules {
		at, used := len(p), false
		for _, w := range ways[:n] {
			if w.rule == r {
				p[w.at].K, used = uint32(at-w.at-1), true
			}
		}
		if used {
			p.verdict(r)
		}
	}
	return p
}

// program is an unfinished filter (seccomp(2), the kernel's networking/filter.rst).
type program []unix.SockFilter

// add appends an instruction and returns its index.
func (p *program) add(code uint16, k uint32) int {
	*p = append(*p, unix.SockFilter{Code: code, K: k})
	return len(*p) - 1
}

// since returns the number of instructions after index at.
func (p *program) since(at int) uint32 { return uint32(len(*p) - 1 - at) }

func (p *program) load(at uint32)       { p.add(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, at) }
func (p *program) answer(action uint32) { p.add(unix.BPF_RET|unix.BPF_K, action) }

// jump compares the loaded number with k and skips the given number of instructions.
func (p *program) jump(compare uint16, k uint32, ifTrue, ifFalse uint8) {
	at := p.add(unix.BPF_JMP|compare|unix.BPF_K, k)
	(*p)[at].Jt, (*p)[at].Jf = ifTrue, ifFalse
}

// near converts the distance of a conditional jump, which has 8 bits.
func near(distance uint32) uint8 {
	if distance > 0xff {
		panic("seccomp: a jump is too long")
	}
	return uint8(distance)
}

// among begins a block that runs only if the loaded number is one of numbers, which must not be empty. The block ends
// with otherwise.
func (p *program) among(numbers []uint32) (last int) {
	for i, n := range numbers {
		p.jump(unix.BPF_JEQ, n, near(uint32(len(numbers)-1-i)), 0)
	}
	return len(*p) - 1
}

// otherwise ends the block of among: other numbers continue here.
func (p *program) otherwise(last int) { (*p)[last].Jf = near(p.since(last)) }

// judge selects the rule for a call of one architecture. It returns the calls with a rule; the caller sets their
// jumps.
func (p *program) judge(a architecture, namespaces bool) []judged {
	p.load(numberAt)
	calls := make([]judged, 0, len(table))
	for i := range table {
		number, r := table[i].number[a.column], table[i].rule
		if number != none && (r < refuseSpace || namespaces) {
			calls = append(calls, judged{number, r, 0})
		}
	}
	slices.SortFunc(calls, func(a, b judged) int { return cmp.Compare(a.number, b.number) })
	p.search(calls, func() { // calls without a rule, including all greater numbers
		if a.audit == unix.AUDIT_ARCH_ARM {
			// set_tls and other private calls have greater numbers.
			p.jump(unix.BPF_JGE, armPrivate+0x100, 1, 0)
			p.jump(unix.BPF_JGE, armPrivate, 2, 0)
		}
		p.jump(unix.BPF_JGE, newest+1, 0, 1)
		p.answer(missing)
		p.answer(unix.SECCOMP_RET_ALLOW)
	})
	return calls
}

// judged is a call that has a rule.
type judged struct {
	number uint32
	rule   rule
	at     int // index of the jump to the rule
}

// search looks the loaded number up in calls, which are sorted. Numbers without a rule are allowed; rest handles those
// after the last rule. When a filter is loaded, the kernel runs it with every call number to cache which calls are
// always allowed (Linux 5.11). A linear search would make that ten times slower.
func (p *program) search(calls []judged, rest func()) {
	const few = 8
	if len(calls) > few {
		half := len(calls) / 2
		at := p.add(unix.BPF_JMP|unix.BPF_JGE|unix.BPF_K, calls[half].number)
		p.search(calls[:half], func() { p.answer(unix.SECCOMP_RET_ALLOW) })
		(*p)[at].Jt = near(p.since(at))
		p.search(calls[half:], rest)
		return
	}
	for i := range calls {
		calls[i].at = p.add(unix.BPF_JMP|unix.BPF_JEQ|unix.BPF_K, calls[i].number)
	}
	rest()
}

// verdict returns from the filter as a rule says.
func (p *program) verdict(r rule) {
	// Only the lower half of an argument counts: the kernel truncates these arguments to int or less.
	argument := func(n uint32) { p.load(argsAt + 8*n) }
	// answerIf returns action if argument n is one of numbers.
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
		// O_TMPFILE consists of O_DIRECTORY and a unique bit.
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
	case socket:
		for _, d := range domains {
			argument(0)
			family := p.among(d.families)
			argument(1)
			p.add(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, socketType)
			kind := p.among(d.types)
			answerIf(2, d.protocols, unix.SECCOMP_RET_ALLOW)
			p.answer(noProtocol)
			p.otherwise(kind)
			p.answer(noType)
			p.otherwise(family)
		}
		otherwise = foreign
	case option:
		for _, o := range options {
			argument(1)
			level := p.among([]uint32{o.level})
			answerIf(2, o.names, o.answer)
			p.otherwise(level)
		}
	case send2, send3:
		argument(2 + uint32(r-send2))
		p.jump(unix.BPF_JSET, unix.MSG_OOB, 0, 1)
		p.answer(noFlag)
	case request:
		answerIf(1, ioctls[:], refused)
		answerIf(1, []uint32{fioAsync}, ignored)
	case control:
		answerIf(1, []uint32{unix.F_SETLEASE, unix.F_SETDELEG, unix.F_SETSIG}, refused) // Linux 6.19 has the second
		flags := p.among([]uint32{unix.F_SETFL})
		refuseIfSet(2, unix.O_ASYNC)
		p.otherwise(flags)
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
	default:
		otherwise = refused
	}
	p.answer(otherwise)
}

// socketType masks out the flags in the second argument of socket(2) (SOCK_TYPE_MASK).
const socketType = 0xf

// setID are the bits that the mode of a file must not get.
const setID = unix.S_ISUID | unix.S_ISGID
