// Package random makes names that nobody else has.
package random

import (
	"encoding/hex"

	"golang.org/x/sys/unix"
)

// Name returns 16 hexadecimal digits, which nobody can guess.
func Name() string {
	var b [8]byte
	// For so few bytes it does not fail (getrandom(2)). Should a filter refuse it, the name is one that
	// is taken, which is refused wherever it is given to something.
	_, _ = unix.Getrandom(b[:], 0)
	return hex.EncodeToString(b[:])
}
