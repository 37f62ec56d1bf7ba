package hostfiles

import (
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// PrivateDirs are the names of directories that hold credentials.
var PrivateDirs = map[string]bool{
	".git": true, ".config": true, ".ssh": true, ".aws": true, ".azure": true, ".docker": true, ".gnupg": true, ".kube": true, ".aspnet": true, ".password-store": true,
	"x509stores": true, // of .NET
}

// Private reports whether a path leads through a directory that holds credentials.
func Private(name string) bool {
	for ; name != "/" && name != "."; name = path.Dir(name) {
		if PrivateDirs[path.Base(name)] {
			return true
		}
	}
	return false
}

// secretFiles are the names of files that hold credentials, in lower case.
var secretFiles = []string{
	"credentials", "credentials.toml", "credentials.json", "credentials.xml", "credentials.yml", "credentials.yaml", ".netrc", "_netrc", ".npmrc", "npmrc", "pip.conf", "pip.ini", ".pypirc", ".condarc", "condarc",
	".git-credentials", ".gitconfig", ".env", ".htpasswd", ".pgpass", ".my.cnf", "auth.json", "nuget.config", ".yarnrc", ".yarnrc.yml", ".bunfig.toml", "gradle.properties", "settings-security.xml",
}

// secretEndings are file name extensions of private keys.
var secretEndings = []string{".pfx", ".p12", ".key", ".ppk", ".jks", ".keystore", ".kdbx"}

// SecretFile reports whether files of this name hold credentials or private keys.
func SecretFile(name string) bool {
	name = strings.ToLower(name)
	return slices.Contains(secretFiles, name) || slices.Contains(secretEndings, path.Ext(name)) || strings.HasPrefix(name, ".env.")
}

// nobody is the uid of an account without a home directory.
const nobody = 65534

// HomeWithin returns a home directory at or below dir, or "". It knows the caller's and root's, those in /home, and the
// homes of login accounts.
func HomeWithin(dir, home string) string {
	// The path of the current directory has no links, but HOME and /home may have some.
	homes := []string{home, "/root"}
	if real, err := filepath.EvalSymlinks(home); err == nil {
		homes = append(homes, real)
	}
	tops := []string{"/home"}
	if real, err := filepath.EvalSymlinks("/home"); err == nil && real != "/home" {
		tops = append(tops, real)
	}
	// If it is unreadable, check only the well-known directories.
	passwd, _ := proc.ReadFile("/etc/passwd")
	for line := range strings.SplitSeq(string(passwd), "\n") {
		f := strings.Split(line, ":")
		if len(f) < 7 {
			continue
		}
		if uid, err := strconv.Atoi(f[2]); err == nil && (uid >= 1000 && uid != nobody) {
			homes = append(homes, f[5])
		}
	}
	for _, h := range homes {
		if h = path.Clean(h); h != "/" && path.IsAbs(h) && values.Within(h, dir) {
			return h
		}
	}
	for _, top := range tops {
		if dir == top || path.Dir(dir) == top || values.Within(top, dir) {
			return dir
		}
	}
	return ""
}
