// Package arch stops the build, with one message that says why, on everything but
// Linux on amd64 and arm64. The packages that depend on the architecture import it:
// the sandbox's filter has the system calls' numbers, and the keeper the layout of the
// address space, of these two alone.
package arch
