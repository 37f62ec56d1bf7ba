package proc

import (
	"errors"
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Block is the memory that a bare fork works with: one anonymous mapping outside
// Go's heap, with stacks, state and all strings that system calls take. Go's heap
// is not copied into the fork at all (see [bareFork]), so the fork costs the same
// however large the heap is, carries no secret of the heap, and cannot be hurt by
// a garbage collector that was half-way through.
//
// Nothing in a Block may point into Go's heap: the garbage collector does not look
// here, and the fork could not follow. Whoever made it frees it.
//
// The memory is shared with the fork, so what that needs later can be laid out after it. The
// fork reads it only after a system call has told it so, and thus sees all of it.
type Block struct {
	base unsafe.Pointer
	size uintptr
	used uintptr
	err  error
	rest [][]uint64 // after an error; only from here does the collector know of it
}

// blockSize is reserved, not used: a page counts when it is touched. Arguments and
// environment of one exec together have at most 6 MiB (execve(2)).
const blockSize = 16 << 20

// StackSize is the size of one stack in a Block. The functions that run on it are
// nosplit, which bounds their depth to less than a kilobyte; a test over the object
// code adds them up.
const StackSize = 2 << 10

// NewBlock maps an empty Block.
func NewBlock() (*Block, error) {
	base, err := unix.MmapPtr(-1, 0, nil, blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("map memory for the keeper: %w", err)
	}
	return &Block{base: base, size: blockSize}, nil
}

// Free unmaps the Block. A forked process still has it.
func (b *Block) Free() {
	if b.base != nil {
		_ = unix.MunmapPtr(b.base, blockSize) // it was mapped with this size
		b.base = nil
	}
}

// Part sets a part of the Block aside, which is laid out later: also after a fork, for it is
// at the same place there.
func (b *Block) Part(size uintptr) *Block { return &Block{base: b.alloc(size), size: size} }

// Renew empties the part, for something else.
func (b *Block) Renew() {
	clear(b.Bytes())
	b.used, b.err, b.rest = 0, nil, nil
}

// Bytes is all that is laid out, and its place is the part's.
func (b *Block) Bytes() []byte { return unsafe.Slice((*byte)(b.base), b.used) }

// Err is the first thing that could not be laid out.
func (b *Block) Err() error { return b.err }

// alloc returns size zeroed bytes. After an error it returns memory that may be
// written to and is not used.
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

// New returns a zeroed T in the Block. T has no pointers into Go's heap.
func New[T any](b *Block) *T {
	var t T
	return (*T)(b.alloc(unsafe.Sizeof(t)))
}

// Copy returns a copy of the elements in the Block; nil for none.
func Copy[T any](b *Block, list []T) []T {
	if len(list) == 0 {
		return nil
	}
	var t T
	out := unsafe.Slice((*T)(b.alloc(unsafe.Sizeof(t)*uintptr(len(list)))), len(list))
	copy(out, list)
	return out
}

// Text returns s in the Block, ended by a NUL. An s with a NUL in it is an error.
func (b *Block) Text(s string) *byte {
	if strings.IndexByte(s, 0) >= 0 && b.err == nil {
		b.err = errors.New("a string holds a NUL byte")
	}
	out := unsafe.Slice((*byte)(b.alloc(uintptr(len(s))+1)), len(s)+1)
	copy(out, s)
	return &out[0]
}

// Texts returns the strings as execve(2) takes them: an array of pointers that
// ends with a nil.
func (b *Block) Texts(list []string) []*byte {
	out := unsafe.Slice((**byte)(b.alloc(unsafe.Sizeof(uintptr(0))*uintptr(len(list)+1))), len(list)+1)
	for i, s := range list {
		out[i] = b.Text(s)
	}
	return out
}

// Stack returns the top of a new stack. Space is left above it for what a Go
// function may expect of its caller: on amd64 the place of a register argument, on
// arm64 the frame of the caller as well.
func (b *Block) Stack() uintptr {
	const above = 256
	return uintptr(unsafe.Add(b.alloc(StackSize), StackSize-above))
}

// tls returns a base for thread-local storage, with zeroes on both sides: where Go
// code comes back from assembly it loads g from there, which a bare fork has no use
// for and must nevertheless be able to read.
func (b *Block) tls() uintptr {
	const half = 2048
	return uintptr(unsafe.Add(b.alloc(2*half), half))
}
