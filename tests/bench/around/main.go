// Command around runs a command, waits for it, and exits as it did. It is the smallest Go wrapper,
// and so the floor for every other one.
//
// usage: around DESCRIPTORS PATH WORD…
//
// It passes on DESCRIPTORS descriptors, from 0 on. The words are the command, including its name.
package main

import (
	"os"
	"strconv"
	"syscall"
)

func main() {
	const failed = 125
	n, err := strconv.Atoi(os.Args[1])
	if err != nil {
		syscall.Exit(failed)
	}
	files := make([]uintptr, n)
	for i := range files {
		files[i] = uintptr(i)
	}
	pid, err := syscall.ForkExec(os.Args[2], os.Args[3:], &syscall.ProcAttr{Env: syscall.Environ(), Files: files})
	if err != nil {
		syscall.Exit(failed)
	}
	var status syscall.WaitStatus
	for {
		if _, err = syscall.Wait4(pid, &status, 0, nil); err != syscall.EINTR {
			break
		}
	}
	if err != nil || !status.Exited() {
		syscall.Exit(failed)
	}
	syscall.Exit(status.ExitStatus())
}
