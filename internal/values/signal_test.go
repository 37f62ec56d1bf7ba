package values

import (
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestSignal(t *testing.T) {
	for word, want := range map[string]syscall.Signal{
		"INT": syscall.SIGINT, "SIGINT": syscall.SIGINT, "int": syscall.SIGINT, "sigint": syscall.SIGINT, "2": syscall.SIGINT,
		"KILL": syscall.SIGKILL, "09": syscall.SIGKILL, "1": syscall.SIGHUP, "34": 34, "64": 64,
	} {
		var s Signal
		err := s.UnmarshalText([]byte(word))
		check.That(t, err == nil && s == Signal(want), "%q: %d, %v", word, s, err)
	}
	for _, word := range []string{"", "0", "-1", "65", "+2", "1.0", "SIG", "NOSUCH", "SIGSIGINT", "INT ", "2x", "99999999999999999999"} {
		s := Signal(syscall.SIGUSR1)
		err := s.UnmarshalText([]byte(word))
		check.That(t, err != nil && strings.Contains(err.Error(), "no such signal") && s == Signal(syscall.SIGUSR1), "%q: %d, %v", word, s, err)
	}
}
