package safeopen

import (
	"encoding/hex"

	"golang.org/x/sys/unix"
)

// RandomName returns 16 random hexadecimal digits, for file names and IDs that must be unguessable.
func RandomName() string {
	var b [8]byte
	// getrandom(2) does not fail for so few bytes. If a system call filter rejects it, all names are the
	// same, and creating a file of that name fails.
	_, _ = unix.Getrandom(b[:], 0)
	return hex.EncodeToString(b[:])
}
