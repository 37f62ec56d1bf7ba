package proxy

import (
	"path/filepath"

	"github.com/landlock-lsm/go-landlock/landlock"
)

// restrict takes from the process the files of the user that it runs as, for good and for all its
// threads: whoever takes it over from inside a sandbox shall have nothing that the sandbox has
// not. It keeps what says how names are resolved: directories, because such files are replaced by
// rename. Where the kernel can, it takes signals to others and abstract sockets as well
// (landlock(7): files since Linux 5.13, these since 6.12). On a kernel without Landlock it does
// nothing: what then keeps the process in is its uid.
func restrict() error {
	names := []string{"/etc"}
	if file, err := filepath.EvalSymlinks("/etc/resolv.conf"); err == nil {
		names = append(names, filepath.Dir(file))
	}
	var files []string // links of /etc to what may be in any directory, even the user's
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
