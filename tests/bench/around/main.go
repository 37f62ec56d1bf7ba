// Command around runs a command, waits for it, and exits as it did: the smallest Go program that
// can be around one. What it takes is the floor for every one that does more.
//
// usage: around DESCRIPTORS PATH WORD…    so many descriptors, from 0 on, are passed on; the words
// are the command's, with its name first
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
