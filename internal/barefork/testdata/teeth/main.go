// Teeth is not meant to be run. Most of its functions break a rule for code that runs
// after a bare fork, and TestTeeth finds them in the object code.
package main

import (
	"os"
	"syscall"
	"unsafe"
)

func main() {
	n := &node{words: make([]uintptr, len(os.Args))}
	n.call, n.other = target, harmless
	i := len(os.Args)
	forkWithoutPrologue(n)
	harmless(n)
	copies(&n.block, &n.spare)
	storesPointer(n)
	clearsPointers(n)
	indexes(n, i)
	slices(n, i)
	divides(n, i)
	shifts(n, i)
	grows(n)
	callsWhatGrows(n)
	allocates(n)
	appends(n)
	entersRuntime(n)
	locks(n)
	pointers(n, uintptr(i))
	callsUnlisted(n)
	callsTwo(n)
	switches(n, i)
	n.call = callsItself
	callsItself(n)
	n.call = deepBelow
	fork(n)
	stack(n)
	spawn(0, 0)
	println(stored, n.value)
}

type node struct {
	next, last  *node
	words       []uintptr
	value       int
	block       [100]uintptr
	spare       [100]uintptr
	call, other func(*node)
}

var stored *node

// harmless breaks no rule.
//
//go:nosplit
//go:noinline
func harmless(n *node) {
	syscall.RawSyscall(syscall.SYS_GETPID, uintptr(unsafe.Pointer(n)), 0, 0)
}

// copies breaks no rule if the table allows memmove, which uses no stack.
//
//go:nosplit
//go:noinline
func copies(a, b *[100]uintptr) { *a = *b }

//go:nosplit
//go:noinline
func storesPointer(n *node) { n.next = n.last }

//go:nosplit
//go:noinline
func clearsPointers(n *node) { *n = node{} }

//go:nosplit
//go:noinline
func indexes(n *node, i int) { n.words[i] = 1 }

//go:nosplit
//go:noinline
func slices(n *node, i int) { n.words = n.words[i:] }

//go:nosplit
//go:noinline
func divides(n *node, i int) { n.value /= i }

//go:nosplit
//go:noinline
func shifts(n *node, i int) { n.value <<= i }

//go:noinline
func grows(n *node) { target(n); target(n) }

//go:nosplit
//go:noinline
func callsWhatGrows(n *node) { grows(n) }

//go:nosplit
//go:noinline
func allocates(n *node) { stored = new(node) }

//go:nosplit
//go:noinline
func appends(n *node) { n.words = append(n.words, 1) }

//go:nosplit
//go:noinline
func entersRuntime(n *node) { syscall.Syscall(syscall.SYS_GETPID, 0, 0, 0) }

//go:nosplit
//go:noinline
func locks(n *node) { syscall.ForkLock.Lock() }

// pointers is not nosplit, which implies nocheckptr.
//
//go:noinline
func pointers(n *node, i uintptr) { n.value = *(*int)(unsafe.Pointer(uintptr(unsafe.Pointer(n)) + i)) }

//go:nosplit
//go:noinline
func callsUnlisted(n *node) { n.call(n) }

//go:nosplit
//go:noinline
func callsTwo(n *node) {
	n.call(n)
	n.other(n)
}

// switches is compiled to a jump table.
//
//go:nosplit
//go:noinline
func switches(n *node, i int) {
	switch i {
	case 0:
		n.value = 55
	case 1:
		n.value = 7
	case 2:
		n.value = 1234
	case 3:
		n.value = 99
	case 4:
		n.value = 8
	case 5:
		n.value = 77
	case 6:
		n.value = 12
	case 7:
		n.value = 3
	case 8:
		n.value = 44
	case 9:
		n.value = 2
	}
}

// callsItself uses a pointer, because the linker rejects a direct call.
//
//go:nosplit
//go:noinline
func callsItself(n *node) { n.call(n) }

// target is called through pointers.
//
//go:nosplit
//go:noinline
func target(n *node) { n.value++ }

// deepAbove and deepBelow use 450 bytes each. The linker accepts them, because it does
// not know that one calls the other.
//
//go:nosplit
//go:noinline
func deepAbove(n *node) {
	var frame [55]uintptr
	fill(&frame, n)
	n.call(n)
	fill(&frame, n)
}

//go:nosplit
//go:noinline
func deepBelow(n *node) {
	var frame [55]uintptr
	fill(&frame, n)
}

//go:nosplit
//go:noinline
func fill(frame *[55]uintptr, n *node) { frame[n.value&31]++ }

// fork calls a root as the keeper's fork does.
//
//go:noinline
func fork(n *node) {
	harmless(n)
	deepAbove(n)
}

// forkWithoutPrologue has no prologue that guarantees stack.
//
//go:nosplit
//go:noinline
func forkWithoutPrologue(n *node) { harmless(n) }

// stack changes the stack pointer; it is written in assembly.
//
//go:noescape
func stack(n *node)

// spawn starts a process that shares the memory and has its own stack.
func spawn(stack, run uintptr)
