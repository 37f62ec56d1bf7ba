// Package helper contains the program of every process that sbxrun runs besides itself and bwrap: the keeper, the
// processes that enter a room, a command's init, and a room's PID 1. It is written in C (src) because these processes
// must not depend on a runtime with threads and must stay small. It makes no decisions: sbxrun lays out a [Script] of
// system calls in Go, and the helper makes them.
//
// The program has no file. It is executed from a sealed file in memory, so /proc/self/exe of a process in a sandbox
// never leads to a file of the host (CVE-2019-5736).
package helper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// HoldProgram returns the program of a room's PID 1, an ELF file. It reports with a byte to descriptor 5 that bwrap
// has built the room, and then waits forever.
func HoldProgram() string { return holdProgram }

// Keep is the argument with which the helper becomes a keeper. Its descriptor 0 is sbxrun's socket.
const Keep = "keep"

// File returns the helper as a sealed file in memory. It stays open as long as this process runs. After an error, for
// example for lack of descriptors, the next call tries again.
func File() (*os.File, error) { return theHelper.open("helper", program) }

// HoldFile is [File] for the program of a room's PID 1.
func HoldFile() (*os.File, error) { return theHold.open("room", holdProgram) }

var theHelper, theHold shared

type shared struct {
	sync.Mutex
	file *os.File
}

func (s *shared) open(name, program string) (_ *os.File, err error) {
	s.Lock()
	defer s.Unlock()
	if s.file == nil {
		s.file, err = MemoryFile(name, program)
	}
	return s.file, err
}

// MemoryFile returns a program as a sealed file in memory (memfd_create(2)), which everybody may execute.
func MemoryFile(name, program string) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_EXEC)
	if err == unix.EINVAL { // before Linux 6.3, where all can be executed
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err == unix.EACCES {
		return nil, fmt.Errorf("memfd_create of a program (is the sysctl vm.memfd_noexec 2?): %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create of a program: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err = unix.Fchmod(fd, 0o555); err == nil {
		err = fill(fd, []byte(program))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// fill writes and seals a file in memory.
func fill(fd int, text []byte) error {
	for len(text) > 0 {
		n, err := unix.Write(fd, text)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("write to a memfd: %w", err)
		}
		text = text[max(n, 0):]
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	return err
}

// Report is one message from a process. struct report in src/helper.h has the same layout.
type Report struct {
	Kind   int64
	Value  int64    // Failed: errno; Exited: wait status; Ready: inode of the PID namespace
	Number int64    // Failed: number of the mount; Ready: the process's number in its namespace; Exited: 1 if no process is left
	At     int64    // Exited: time, CLOCK_MONOTONIC in ns
	Text   [64]byte // Failed: the step, terminated by NUL
}

// Kinds of reports. Scripts use others with [Say].
const (
	Ready = iota + 1
	Failed
	Exited
	Others // the first kind for scripts
)

// Step returns the failed step.
func (r *Report) Step() string {
	step, _, _ := strings.Cut(string(r.Text[:]), "\x00")
	return step
}

// Operations of a [Script] besides system calls, with their arguments. src/helper.h has the same numbers.
const (
	Exit        = -iota - 1 // code
	Set                     // value: the result
	Check                   // result of an earlier call: fails if that is an error
	fork                    // see [Script.Fork]
	Parent                  // fails unless the parent is the keeper
	Receive                 // socket, number of descriptors, first slot; exits at end-of-file
	Await                   // file: waits for a byte; exits at end-of-file
	SameFile                // statx, major and minor device, inode
	SameMount               // statx, statx
	ReportReady             // statx of the PID namespace, result of getpid(2), number of descriptors, first slot
	Say                     // kind, number of descriptors, first slot
	Exec                    // paths, argv, envp: executes the first path that is a program
	Init                    // signalfd, the payload's PID, timerfd or -1
	make_                   // see [Script.Make]
	Load                    // socket: receives stdin, stdout, stderr and a script, and runs it
	Become                  // clone flags: the script continues in a new process, and this one exits
)

// Slot is the number of a variable of a script, for the result of a call. Slot 0 is for results that are not used.
type Slot uint8

// Slots is the number of slots.
const Slots = 256

// Ptr is the position of an item in a script's data.
type Ptr uint32

// Script is a list of system calls that the helper makes in order, without loops. Each call has the name of a step. If a
// call fails, the helper reports its step and exits; see [Script.Allow].
//
// A script contains everything that the calls need, for example the command with its environment.
type Script struct {
	calls  []call
	data   []byte
	fixups []uint32
	steps  map[string]uint32
	mount  uint16
	err    error
}

// call is struct call of src/helper.h.
type call struct {
	number             int32
	step               uint32
	mount              uint16
	result             Slot
	slots, pointers    uint8
	skip, over, unborn uint8
	allowed            [4]uint8
	args               [6]uint64
}

const (
	headerSize = 24
	callSize   = 24 + 6*8
	maxStep    = len(Report{}.Text) - 1
	maxData    = 16 << 20 // arguments and environment of an exec have at most 6 MiB (execve(2))
)

// Add adds a call. number is a system call or an operation. An argument is an int, uint64, uint32, a string, a [Slot]
// for the value of that slot, or a [Ptr].
func (s *Script) Add(step string, result Slot, number int, args ...any) {
	c := call{number: int32(number), step: s.step(step), mount: s.mount, result: result}
	for i, a := range args {
		switch a := a.(type) {
		case int:
			c.args[i] = uint64(a)
		case uint32:
			c.args[i] = uint64(a)
		case uint64:
			c.args[i] = a
		case string:
			c.args[i], c.pointers = uint64(s.Text(a)), c.pointers|1<<i
		case Ptr:
			c.args[i], c.pointers = uint64(a), c.pointers|1<<i
		case Slot:
			c.args[i], c.slots = uint64(a), c.slots|1<<i
		default:
			panic(fmt.Sprintf("helper: argument %d of %q is a %T", i, step, a))
		}
	}
	if s.calls == nil {
		s.calls = make([]call, 0, 32)
	}
	s.calls = append(s.calls, c)
}

// Do adds a call whose result is not used.
func (s *Script) Do(step string, number int, args ...any) { s.Add(step, 0, number, args...) }

// AnyError stands for all errors in [Script.Allow].
const AnyError syscall.Errno = 255

// Allow makes the last call continue after these errors, at most four, and then skip the next calls.
func (s *Script) Allow(skip int, errs ...syscall.Errno) {
	c := &s.calls[len(s.calls)-1]
	c.skip = uint8(skip)
	for i, err := range errs {
		c.allowed[i] = uint8(err)
	}
}

// Over makes the last call skip the next calls if it succeeds.
func (s *Script) Over(skip int) { s.calls[len(s.calls)-1].over = uint8(skip) }

// Unborn makes the process skip the last call if it was created in its cgroup.
func (s *Script) Unborn() { s.calls[len(s.calls)-1].unborn = 1 }

// Mount sets the number that failures of the next calls report; 0 for none.
func (s *Script) Mount(number int) { s.mount = uint16(number) }

// Fork adds a clone(2) with flags. Its child begins where [Script.Begin] is called with the result.
func (s *Script) Fork(step string, result Slot, flags int) (child int) {
	s.Add(step, result, fork, flags)
	return len(s.calls) - 1
}

// Make makes the process a maker of inits: each is a child with the flags of clone(2), as with [Script.Fork].
func (s *Script) Make(step string, flags int) (child int) {
	s.Add(step, 0, make_, flags)
	return len(s.calls) - 1
}

// Begin makes the next call the first one of a child.
func (s *Script) Begin(child int) { s.calls[child].args[1] = uint64(len(s.calls)) }

func (s *Script) step(text string) uint32 {
	if at, ok := s.steps[text]; ok {
		return at
	}
	if len(text) > maxStep {
		panic("helper: the name of a step is too long: " + text)
	}
	if s.steps == nil {
		s.steps = map[string]uint32{}
	}
	at := uint32(s.Text(text))
	s.steps[text] = at
	return at
}

// Data adds bytes, aligned for any structure.
func (s *Script) Data(b []byte) Ptr {
	at := s.Space(len(b))
	copy(s.data[at:], b)
	return at
}

// Space adds zeroed bytes, aligned for any structure.
func (s *Script) Space(size int) Ptr {
	for len(s.data)%8 != 0 {
		s.data = append(s.data, 0)
	}
	at := len(s.data)
	if size > maxData-min(at, maxData) {
		s.fail(unix.E2BIG)
		size = 0
	}
	s.data = append(s.data, make([]byte, size)...)
	return Ptr(at)
}

// Words adds an array of uint64.
func (s *Script) Words(list ...uint64) Ptr {
	at := s.Space(0)
	for _, w := range list {
		s.data = binary.LittleEndian.AppendUint64(s.data, w)
	}
	return at
}

// Text adds a string, terminated by NUL.
func (s *Script) Text(text string) Ptr {
	if strings.IndexByte(text, 0) >= 0 {
		s.fail(errors.New("a string contains a NUL byte"))
	}
	at := len(s.data)
	if len(text) > maxData-min(at, maxData) {
		s.fail(unix.E2BIG)
		return 0
	}
	s.data = append(append(s.data, text...), 0)
	return Ptr(at)
}

// Pointer makes the word at one position a pointer to another.
func (s *Script) Pointer(at, to Ptr) {
	binary.LittleEndian.PutUint64(s.data[at:], uint64(to))
	s.fixups = append(s.fixups, uint32(at))
}

// Texts adds an array of strings, terminated by a null pointer, with a free word before it, as [Exec] needs it for argv.
func (s *Script) Texts(list []string) Ptr {
	array := s.Space((len(list) + 2) * 8)
	if s.err != nil {
		return 0
	}
	for i, text := range list {
		s.Pointer(array+Ptr((i+1)*8), s.Text(text))
	}
	return array + 8
}

func (s *Script) fail(err error) {
	if s.err == nil {
		s.err = err
	}
}

// Seal returns the script as a sealed file in memory for the helper, which the caller closes.
func (s *Script) Seal() (*os.File, error) {
	if s.err != nil {
		return nil, fmt.Errorf("arguments and environment: %w", s.err)
	}
	return textFile("script", s.bytes())
}

// TextFile returns a text as a sealed file in memory, open for reading at its start. The caller closes it.
func TextFile(name, text string) (*os.File, error) { return textFile(name, []byte(text)) }

func textFile(name string, text []byte) (*os.File, error) {
	const noExec = 0x8 // MFD_NOEXEC_SEAL, Linux 6.3
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|noExec)
	if err == unix.EINVAL {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err = fill(fd, text); err == nil {
		_, err = unix.Seek(fd, 0, unix.SEEK_SET)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// bytes lays out the header, the calls and the data.
func (s *Script) bytes() []byte {
	fixups := s.Space(0)
	start := headerSize + len(s.calls)*callSize
	size := start + len(s.data) + 4*len(s.fixups) + 1
	b := make([]byte, 0, size)
	le := binary.LittleEndian
	for _, n := range []int{size, len(s.calls), start, int(fixups), len(s.fixups), 0} {
		b = le.AppendUint32(b, uint32(n))
	}
	for i := range s.calls {
		c := &s.calls[i]
		b = le.AppendUint32(b, uint32(c.number))
		b = le.AppendUint32(b, c.step)
		b = le.AppendUint16(b, c.mount)
		b = append(b, uint8(c.result), c.slots, c.pointers, c.skip, c.over, c.unborn)
		b = append(b, c.allowed[:]...)
		b = le.AppendUint32(b, 0)
		for _, a := range c.args {
			b = le.AppendUint64(b, a)
		}
	}
	b = append(b, s.data...)
	for _, at := range s.fixups {
		b = le.AppendUint32(b, at)
	}
	return append(b, 0)
}
