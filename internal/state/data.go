package state

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// DataHint is what to do where there is no directory for data, or not one of the caller's own.
const DataHint = "set SBXRUN_DATA_DIR, or --data-dir, to a directory of your own"

// DataDir is where the caller's snapshots and volumes are, which outlive sandboxes and reboots.
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
	// A relative one is to be ignored (XDG Base Directory Specification).
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "sbxrun"), nil
	}
	if home := os.Getenv("HOME"); filepath.IsAbs(home) {
		return filepath.Join(home, ".local/share/sbxrun"), nil
	}
	return "", &result.Error{Code: "data", Message: "neither XDG_DATA_HOME nor HOME says where data is kept", Hint: DataHint}
}
