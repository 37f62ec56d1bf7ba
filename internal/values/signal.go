package values

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Signal is a signal, by name with or without SIG, or by number, as for kill(1) and timeout(1). Real-time signals have
// only numbers. 0 means no signal.
type Signal syscall.Signal

func (s *Signal) UnmarshalText(text []byte) error {
	const last = 64 // signal(7)
	word := string(text)
	n := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(word), "SIG"))
	if number, err := strconv.ParseUint(word, 10, 7); err == nil && number <= last {
		n = syscall.Signal(number)
	}
	if n == 0 {
		return fmt.Errorf("no such signal %q: want a name such as INT, or a number from 1 to %d", word, last)
	}
	*s = Signal(n)
	return nil
}
