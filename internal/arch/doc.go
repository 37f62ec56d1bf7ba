// Package arch stops the build on anything but Linux on amd64 and arm64, with a message that gives the reason. The
// packages that depend on the architecture import it: the sandbox's filter contains system call numbers, and the
// keeper an address space layout, for these two only.
package arch
