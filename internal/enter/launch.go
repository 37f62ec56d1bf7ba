package enter

import (
	"bytes"
	"encoding/binary"
	"unsafe"

	"github.com/sbxrun/sbxrun/internal/proc"
)

//lint:file-ignore U1000 the assembly uses the constants and launch

// The launcher is the program that executes a command. Until the payload's process executes a
// program it is a fork of sbxrun, and its /proc/self/exe is sbxrun's own file. If the command or its
// interpreter were a link to that, sbxrun's file would be executed inside the sandbox, where a process
// with the necessary rights could change it (CVE-2019-5736). So that process first executes the launcher:
// a sealed file in memory, which does nothing without the arguments and descriptors that it gets from here.
//
// It is in assembly (launch_amd64.s, launch_arm64.s) because the kernel needs less than 0.1 ms for a
// process with one page of code and no library.

// The launcher's first argument.
const (
	launchWait = 'w' | 'a'<<8 | 'i'<<16 | 't'<<24 // wait for the release
	launchNow  = 'n' | 'o'<<8 | 'w'<<16
)

// launchEnd marks the end of the launcher's code, which it follows twice.
const launchEnd = 0x5a3cb8e1

// The data in front of the launcher's code.
const (
	launchShell   = "/bin/sh\x00"
	launchRefusal = "sbxrun: /proc/self/exe cannot be executed here\n"
	shellAt       = proc.ProgramAt
	refusalAt     = shellAt + len(launchShell)
	refusalSize   = len(launchRefusal)
	launchEntry   = (len(launchShell) + len(launchRefusal) + 15) &^ 15
)

// launch is the code of the launcher. It must not be called.
func launch()

// launchCode returns the address of launch.
func launchCode() unsafe.Pointer

// launcher returns the launcher as an executable file.
func launcher() []byte {
	const most = 1 << 10
	mark := binary.LittleEndian.AppendUint32(nil, launchEnd)
	code := unsafe.Slice((*byte)(launchCode()), most)
	size := bytes.Index(code, append(mark, mark...))
	text := make([]byte, launchEntry, launchEntry+size)
	copy(text, launchShell+launchRefusal)
	return proc.Executable(append(text, code[:size]...), launchEntry)
}

// launchArgs returns the launcher's arguments: "wait" or "now", the paths to try as execvp(3) does, an empty string, and
// the command with its arguments.
func (e *Entry) launchArgs(wait bool) []string {
	args := []string{"now"}
	if wait {
		args[0] = "wait"
	}
	args = append(args, e.candidates()...)
	return append(append(args, ""), e.Command...)
}
