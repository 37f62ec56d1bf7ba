package proc

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Block is the memory of a bare fork: an anonymous mapping outside Go's heap with stacks, state and all strings for system
// calls. The fork does not copy Go's heap (see [bareFork]). So its cost does not depend on the size of the heap, it has no
// secrets of the heap, and the state of the garbage collector does not matter.
//
// A Block must not contain pointers into Go's heap: the garbage collector does not scan it, and the fork could not follow
// them. The caller of NewBlock frees it.
//
// The fork shares the memory, so more can be laid out after the fork. The fork reads the addition only after a system call
// that announces it, and so sees all of it.
type Block struct {
	base unsafe.Pointer
	size uintptr
	used uintptr
	err  error
	rest [][]uint64 // memory returned after an error, kept alive
}

// blockSize is the reserved size: untouched pages use no memory. Arguments and environment of an exec have at most 6 MiB
// (execve(2)).
const blockSize = 16 << 20

// StackSize is the size of a stack in a Block. The functions that run on it are nosplit and use less than a kilobyte. A test
// adds up their frames in the object code.
const StackSize = 2 << 10

// NewBlock maps an empty Block.
func NewBlock() (*Block, error) {
	base, err := unix.MmapPtr(-1, 0, nil, blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map memory for the keeper: %w", err)
	}
	return &Block{base: base, size: blockSize}, nil
}

// Free unmaps the Block in this process only.
func (b *Block) Free() {
	if b.base != nil {
		_ = unix.MunmapPtr(b.base, blockSize) // it was mapped with this size
		b.base = nil
	}
}

// Part reserves a part of the Block that can be laid out later, even after a fork, which has it at the same address.
func (b *Block) Part(size uintptr) *Block { return &Block{base: b.alloc(size), size: size} }

// Renew empties the part for reuse.
func (b *Block) Renew() {
	clear(b.Bytes())
	b.used, b.err, b.rest = 0, nil, nil
}

// Bytes returns everything that is laid out, from the start of the part.
func (b *Block) Bytes() []byte { return unsafe.Slice((*byte)(b.base), b.used) }

// Err returns the first error of laying out.
func (b *Block) Err() error { return b.err }

// alloc returns size zeroed bytes. After an error it returns unused memory that may be written to.
func (b *Block) alloc(size uintptr) unsafe.Pointer {
	const align = 16
	b.used = (b.used + align - 1) &^ (align - 1)
	if b.used > b.size || size > b.size-b.used {
		if b.err == nil {
			b.err = unix.E2BIG
		}
		b.rest = append(b.rest, make([]uint64, size/8+1))
		return unsafe.Pointer(&b.rest[len(b.rest)-1][0])
	}
	p := unsafe.Add(b.base, b.used)
	b.used += size
	return p
}

// New returns a zeroed T in the Block. T must not point into Go's heap.
func New[T any](b *Block) *T {
	var t T
	return (*T)(b.alloc(unsafe.Sizeof(t)))
}

// Copy returns a copy of the elements in the Block, or nil if there are none.
func Copy[T any](b *Block, list []T) []T {
	if len(list) == 0 {
		return nil
	}
	var t T
	out := unsafe.Slice((*T)(b.alloc(unsafe.Sizeof(t)*uintptr(len(list)))), len(list))
	copy(out, list)
	return out
}

// Text returns a copy of s in the Block, terminated by NUL. If s contains a NUL, it sets the Block's error.
func (b *Block) Text(s string) *byte {
	if strings.IndexByte(s, 0) >= 0 && b.err == nil {
		b.err = errors.New("a string holds a NUL byte")
	}
	out := unsafe.Slice((*byte)(b.alloc(uintptr(len(s))+1)), len(s)+1)
	copy(out, s)
	return &out[0]
}

// Texts returns the strings as an array of pointers terminated by nil, for execve(2).
func (b *Block) Texts(list []string) []*byte {
	out := unsafe.Slice((**byte)(b.alloc(unsafe.Sizeof(uintptr(0))*uintptr(len(list)+1))), len(list)+1)
	for i, s := range list {
		out[i] = b.Text(s)
	}
	return out
}

// Stack returns the top of a new stack. Above it is space that a Go function may expect in its caller's frame: on amd64 for
// register arguments, on arm64 also for the frame itself.
func (b *Block) Stack() uintptr {
	const above = 256
	return uintptr(unsafe.Add(b.alloc(StackSize), StackSize-above))
}

// tls returns a base for thread-local storage, with zeroes on both sides. Go code loads g from there when it returns from
// assembly. A bare fork does not use g, but the memory must be readable.
func (b *Block) tls() uintptr {
	const half = 2048
	return uintptr(unsafe.Add(b.alloc(2*half), half))
}
