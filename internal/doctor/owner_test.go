package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// checkOwner reports a program if the sandbox's uid or group can change it or its directory.
func TestCheckOwner(t *testing.T) {
	uid, gid := os.Getuid(), os.Getgid()
	const other = 61234
	for _, test := range []struct {
		name      string
		uid, gid  int
		dir, file os.FileMode
		writable  string // of the two
	}{
		{"owner", uid, other, 0o755, 0o755, "file"},
		{"another uid", other, other, 0o755, 0o755, ""},
		{"file for all", other, other, 0o755, 0o757, "file"},
		{"directory for all", other, other, 0o757, 0o755, "dir"},
		{"like /tmp", other, other, 0o777 | os.ModeSticky, 0o755, ""},
		{"group", other, gid, 0o755, 0o775, "file"},
		{"group of the directory", other, gid, 0o775, 0o755, "dir"},
		{"another group", other, other, 0o775, 0o775, ""},
	} {
		dir := filepath.Join(harness.Dir(t), "it's")
		program := filepath.Join(dir, "sbxrun")
		check.Must(t, os.Mkdir(dir, 0o755))
		check.Must(t, os.WriteFile(program, nil, 0o644))
		check.Must(t, os.Chmod(program, test.file))
		check.Must(t, os.Chmod(dir, test.dir))
		err := checkOwner(program, test.uid, test.gid)
		name := map[string]string{"file": program, "dir": dir}[test.writable]
		var e *result.Error
		switch {
		case name == "" && err != nil:
			t.Errorf("%s: %v", test.name, err)
		case name != "" && (!errors.As(err, &e) || !strings.HasPrefix(e.Message, name+" is writable") || !strings.HasSuffix(e.Hint, `it'\''s/sbxrun'`)):
			t.Errorf("%s: %#v", test.name, err)
		}
	}
}
