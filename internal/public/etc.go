package public

import (
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/values"
)

// Part is a file or directory of the host, for the same path in a sandbox.
type Part struct {
	Name   string
	Target string // of a symbolic link
	Data   []byte // contents of a file that is copied; nil for a file that is shown
	File   bool   // not a directory
	Tree   string // "/etc" or "/var/lib", if that may be bound as a whole to take the part from there; or ""
}

// shown are names in /etc that every sandbox sees, whoever owns them, if everybody can read them. alternatives has the
// links behind awk, java and editor; crypto-policies configures OpenSSL on Fedora. Only parts of ssl and pki are shown,
// because they contain private keys, too.
var shown = []string{
	"ld.so.cache", "ld-musl-x86_64.path", "ld-musl-aarch64.path", // the dynamic loader
	"os-release", "localtime", "nsswitch.conf", "services", "mime.types", "timezone",
	"maven/m2.conf", "maven/logging/simplelogger.properties", // but not settings.xml
	"ssl/openssl.cnf", "pki/tls/openssl.cnf", "ssl/cert.pem", "pki/tls/cert.pem",
	"alternatives", "crypto-policies", "java", "ssl/certs", "pki/ca-trust", "pki/tls/certs", "pki/java", "ca-certificates",
}

// network are names in /etc for a sandbox that has the host's network.
var network = []string{"hosts", "host.conf", "resolv.conf", "gai.conf"}

// Etc returns the parts of /etc that every sandbox sees. hostNet adds those for the host's network.
func Etc(hostNet bool) (parts []Part) {
	names := shown
	if hostNet {
		names = append(slices.Clone(names), network...)
	}
	var st unix.Stat_t
	for _, name := range names {
		p := Part{Name: "/etc/" + name, Tree: "/etc"}
		if unix.Lstat(p.Name, &st) != nil {
			continue
		}
		ok := false
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			ok = true
		case unix.S_IFREG:
			p.File, ok = true, st.Mode&0o004 != 0
		case unix.S_IFLNK:
			if p.Target, ok = link(p.Name); ok {
				break
			}
			target := p.Target
			if p.Target, p.Tree = "", ""; unix.Stat(p.Name, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				p.Target, ok = target, true
			} else { // resolv.conf usually leads to a hidden directory
				p.Data, ok = Copy(p.Name)
			}
		}
		if ok {
			parts = append(parts, p)
		}
	}
	return parts
}

// link returns the target of a symbolic link. It is public if it leads to /usr, to certificates or to alternatives.
func link(name string) (target string, public bool) {
	target, err := os.Readlink(name)
	at := target
	if !path.IsAbs(at) {
		at = path.Join(path.Dir(name), at)
	}
	at = path.Clean(at)
	return target, err == nil && slices.ContainsFunc([]string{"/usr", "/etc/ssl/certs", "/etc/pki/ca-trust", "/etc/alternatives"}, func(dir string) bool { return values.Within(at, dir) })
}

// maxCopy limits the size of a copied file of /etc.
const maxCopy = 4 << 20

// Copy returns the contents of a file that everybody can read. It follows symbolic links. Root must not pass on files
// that a command could not read.
func Copy(name string) (data []byte, ok bool) {
	// os.Open would register the file with the poller, at five system calls.
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, false
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o004 == 0 || st.Size > maxCopy {
		return nil, false
	}
	data = make([]byte, max(st.Size, 4096))
	n, err := unix.Read(fd, data)
	return data[:max(n, 0)], err == nil
}
