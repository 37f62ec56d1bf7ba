package state

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// DataHint is the hint if the data directory is unknown or belongs to another user.
const DataHint = "set SBXRUN_DATA_DIR or --data-dir to a directory of your own"

// DataDir returns the directory of the caller's snapshots and volumes, which outlive sandboxes and reboots.
func DataDir() (string, error) {
	if dir := os.Getenv("SBXRUN_DATA_DIR"); dir != "" {
		if !filepath.IsAbs(dir) {
			return "", &result.Error{Code: "data", Message: fmt.Sprintf("SBXRUN_DATA_DIR is %q, which is not an absolute path", dir), Hint: DataHint}
		}
		return filepath.Clean(dir), nil
	}
	if os.Geteuid() == 0 {
		return "/var/lib/sbxrun", nil
	}
	// Relative paths must be ignored (XDG Base Directory Specification).
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "sbxrun"), nil
	}
	if home := os.Getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".local/share/sbxrun"), nil
	}
	return "", &result.Error{Code: "data", Message: "no data directory: neither XDG_DATA_HOME nor HOME is set to an absolute path", Hint: DataHint}
}
