//go:build cgo

package proc

// withLibc: sbxrun is linked with a C library, whose thread has registered a place
// for restartable sequences (rseq(2)): the kernel kills a process that has given
// that up.
const withLibc = true
