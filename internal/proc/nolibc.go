//go:build !cgo

package proc

// withLibc: see libc.go. A release is built without.
const withLibc = false
