package proxy

import (
	"path/filepath"

	"github.com/landlock-lsm/go-landlock/landlock"
)

// restrict permanently denies the process, with all its threads, access to its user's files: an attacker
// who takes it over from inside a sandbox gains no more access than the sandbox has. The configuration
// of the resolver stays readable, as directories, because such files are replaced by rename. If the
// kernel supports it, restrict also denies signals to other processes and abstract sockets (landlock(7):
// files since Linux 5.13, the others since 6.12). Without Landlock it does nothing; then only the UID
// confines the process.
func restrict() error {
	names := []string{"/etc"}
	if file, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
		names = append(names, filepath.Dir(file))
	}
	var files []string // targets of links in /etc, which may be in any directory
	for _, name := range []string{"/etc/hosts", "/etc/nsswitch.conf"} {
		if file, err := filepath.EvalSymlinks(name); err == nil {
			files = append(files, file)
		}
	}
	kernel := landlock.V6.BestEffort()
	if err := kernel.RestrictPaths(landlock.RODirs(names...).IgnoreIfMissing(), landlock.ROFiles(files...).IgnoreIfMissing()); err != nil {
		return err
	}
	return kernel.RestrictScoped()
}
