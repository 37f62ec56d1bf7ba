package config

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// A token file that others can write to, and tokens for tenants of socket users, are rejected.
func TestLoadTokens(t *testing.T) {
	name := filepath.Join(t.TempDir(), "tokens")
	sum := " sha256:" + strings.Repeat("0", 64) + "\n"
	for _, test := range []struct {
		name, text string
		mode       os.FileMode
		word       string
	}{
		{"right", "a" + sum + "# comment\n\nb-1" + sum, 0o600, ""},
		{"readable", "a" + sum, 0o644, ""},
		{"group", "a" + sum, 0o620, "chmod go-w"},
		{"others", "a" + sum, 0o602, "chmod go-w"},
		{"of a socket", "uid-0" + sum, 0o600, "uid-"},
		{"path", "../a" + sum, 0o600, "tenant"},
		{"no hash", "a b\n", 0o600, "sha256:HEX"},
		{"empty", "", 0o600, "no token"},
		{"of nothing", "a sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n", 0o600, "empty token"},
	} {
		t.Run(test.name, func(t *testing.T) {
			check.Must(t, os.WriteFile(name, []byte(test.text), 0o600))
			defer os.Remove(name)
			check.Must(t, os.Chmod(name, test.mode))
			_, err := LoadTokens(name)
			check.That(t, (test.word != "" || err == nil) && (test.word == "" || err != nil && strings.Contains(err.Error(), test.word)), "%v, want %q", err, test.word)
		})
	}
	_, err := LoadTokens(filepath.Dir(name))
	check.That(t, err != nil, "a directory")
	check.Must(t, os.WriteFile(name, nil, 0o600))
	st, err := os.Stat(name)
	check.Must(t, err)
	err = checkTokenFile(name, others{st})
	check.That(t, err != nil && strings.Contains(err.Error(), "chown"), "another user's: %v", err)
}

// others is a file of another user.
type others struct{ os.FileInfo }

func (others) Sys() any { return &syscall.Stat_t{Uid: 12345} }
