package room

import (
	"bytes"
	"os"
	"path"
	"slices"
	"strings"
	"unicode"
	"unsafe"

	"github.com/sbxrun/sbxrun/internal/values"
	"golang.org/x/sys/unix"
)

// This file decides which entries of /etc and /var/lib a sandbox shows: the public configuration and data of
// installed programs. An entry is shown if it belongs to root, only root can write to it, and everybody can read it. A
// file must be on a list of names (publicFile). The name of a directory must not look like a credential, and it must
// belong to a program: /usr/share or /usr/lib has an entry of the same name, or, for NAME and NAME.d in /etc,
// /usr/bin/NAME exists. Nothing that denied or deniedData name is ever shown. Below a shown directory the modes of files
// decide, as for any user of the host.
//
// A bind costs bwrap about 0.1 ms, because it reads the mount table for each. So bwrap binds /etc and /var/lib below
// [enter.LayersDir], and the entering process binds the parts from there, in a few microseconds each. Every sandbox
// pays for this search, so it makes as few system calls as possible.

// denied reports whether a name in /etc is never shown: accounts, the identity and configuration of the machine, and the
// configuration of services and clients that often contains credentials. Names that end in "-" are not shown either.
func denied(name string) bool {
	switch name {
	case "passwd", "group", "shadow", "gshadow", "subuid", "subgid", "sudoers", "sudo.conf", "doas.conf", "opasswd", "security", "pam.conf", "login.defs", "login.access", "securetty", "default", "skel",
		"hostname", "machine-id", "fstab", "mtab", "crypttab", "exports", "hosts", "hosts.allow", "hosts.deny", "resolv.conf", "host.conf", "gai.conf", "issue", "issue.net", "motd", "environment", "crontab", "anacrontab",
		"ca-certificates", "python3", "postgresql-common", "bash_completion", "ld.so.conf", "xattr.conf", "networks", "adduser.conf", "deluser.conf", "mke2fs.conf", "e2scrub.conf", "sysctl.conf", "ucf.conf", "debconf.conf", "apt-listchanges.conf", "needrestart.conf", "inittab", "systemd", "udev", "init", "kernel", "lvm", "mdadm", "grub", "dracut", "initramfs-tools", "opt",
		"cron", "cron.hourly", "cron.daily", "cron.weekly", "cron.monthly", "logrotate", "logcheck", "modules-load", "binfmt", "pam", "sysctl", "tmpfiles", "sensors", "update-motd", "dhcp", "gss", "debuginfod", "pulse", "profile", "rc0", "rc1", "rc2", "rc3", "rc4", "rc5", "rc6", "rcS", ".java",
		"apt", "maven", "netrc", "npmrc", "pip.conf", "pip", "wgetrc", "curlrc", "yarnrc", "rclone.conf", "s3cfg", "aws", "gcloud", "azure", "boto.cfg", "msmtprc", "fetchmailrc", "docker", "containers", "containerd", "kubernetes", "rancher", "cni", "crio", "podman", "buildkit",
		"ssh", "ssl", "pki", "ldap", "krb5", "krb5.conf", "krb5.keytab", "sssd", "samba", "cups", "ppp", "NetworkManager", "netplan", "wpa_supplicant", "wireguard", "openvpn", "ipsec", "ipsec.conf", "ipsec.secrets", "strongswan", "ipa",
		"apache2", "httpd", "nginx", "lighttpd", "caddy", "haproxy", "traefik", "squid", "tomcat", "postfix", "exim4", "exim", "dovecot", "nullmailer", "ssmtp", "bind", "named", "unbound", "dnsmasq.conf", "freeradius", "asterisk",
		"mysql", "mariadb", "my.cnf", "postgresql", "redis", "mongod.conf", "rabbitmq", "couchdb", "cassandra", "elasticsearch", "opensearch", "kibana", "logstash", "filebeat", "metricbeat", "influxdb", "telegraf", "grafana", "loki", "prometheus", "alertmanager", "zabbix", "nagios", "icinga2", "collectd", "munin", "netdata",
		"salt", "puppet", "puppetlabs", "chef", "ansible", "consul", "vault", "nomad", "etcd", "terraform", "cloud", "letsencrypt", "gitlab", "gitea", "jenkins", "sonarqube", "nextcloud", "owncloud", "libvirt", "lxc", "lxd", "incus", "snmp", "ucd-snmp", "ipmi", "bareos", "bacula", "borgmatic", "duplicity", "restic",
		"PackageKit", "polkit-1", "dbus-1", "dconf", "appstream.conf", "ca-certificates.conf", "libaudit.conf", "locale.gen", "gprofng.rc", "rmt", "ethertypes", "netconfig", "sensors3.conf", "apparmor", "selinux", "audit", "rsyslog.conf", "syslog-ng", "logrotate.conf", "aliases", "cloudflared", "tailscale", "sbxrun":
		return true
	}
	return false
}

// deniedData reports the same for a name in /var/lib: state of the machine and of services, and records of package
// management that no program reads at run time.
func deniedData(name string) bool {
	switch name {
	case "docker", "containers", "containerd", "kubelet", "rancher", "cni", "lxc", "lxd", "incus", "machines", "snapd", "flatpak", "libvirt", "cloud", "systemd", "dbus", "sudo", "private", "polkit-1", "PackageKit", "NetworkManager", "AccountsService", "bluetooth", "dhcp",
		"git", "gitea", "gitlab", "jenkins", "mysql", "mariadb", "postgresql", "redis", "mongodb", "rabbitmq", "couchdb", "cassandra", "elasticsearch", "opensearch", "influxdb", "grafana", "prometheus", "loki", "zabbix", "nagios", "salt", "puppet", "consul", "vault", "nomad", "etcd",
		"samba", "cups", "ldap", "krb5kdc", "sss", "ipa", "letsencrypt", "tailscale", "cloudflared", "wireguard", "openvpn", "nextcloud", "owncloud", "tomcat", "squid", "postfix", "exim4", "dovecot", "bind", "named", "unbound", "freeradius", "asterisk",
		"apt", "pam", "ucf", "misc", "python", "xml-core", "sgml-base", "man-db", "ca-certificates-java", "app-info", "swcatalog", "vim", "update-notifier", "ubuntu-advantage", "command-not-found", "apparmor", "sbxrun":
		return true
	}
	return false
}

// publicFile reports whether a file in /etc is public, by its name. checked reports that an administrator may have
// written a credential into it, so its text is checked.
func publicFile(name string) (public, checked bool) {
	switch name {
	case "debian_version", "slackware-version", "locale.alias", "locale.conf", "shells", "protocols", "rpc", "magic", "magic.mime",
		"manpath.config", "man_db.conf", "papersize", "paperspecs", "DIR_COLORS", "mailcap.order", "tidy.conf", "whois.conf":
		return true, false
	case "profile", "bash.bashrc", "bashrc", "csh.cshrc", "csh.login", "csh.logout", "kshrc", "mkshrc", "zshenv", "zprofile", "zshrc", "zlogin", "zlogout", "inputrc",
		"gitconfig", "gitattributes", "gdbinit", "mailcap", "matplotlibrc", "nanorc", "vimrc", "screenrc", "tmux.conf", "octaverc", "gnuplotrc", "sbclrc", "enscript.cfg", "a2ps.cfg", "a2ps-site.cfg", "odbcinst.ini":
		return true, true
	}
	return strings.HasSuffix(name, "-release"), false
}

// engineDirs are where container engines mount the file systems of containers.
var engineDirs = []string{"docker", "containers", "containerd", "kubelet", "rancher", "lxc", "lxd", "incus", "machines", "snapd"}

// Bounds of the search: the number of directory entries, and the size of a checked file.
const (
	manyPublic = 4000
	maxPublic  = 16 << 10
)

// public collects the visible parts.
type public struct {
	root   uint32   // root's uid as seen from here
	uid    uint32   // the sandbox runs as this user
	groups []int    // and has these groups, in addition to the user's own
	dests  []string // destinations of other mounts
	left   int
	buf    []byte
	ops    []op
}

// publicOps adds the public parts of /etc and /var/lib, except where the user or known mounts something.
func publicOps(mounts []op, known []op, c Caller, outside User) []op {
	s := public{left: manyPublic, buf: make([]byte, maxPublic), uid: outside.UID, ops: known, dests: make([]string, 0, len(known)+len(mounts))}
	if c.UID != 0 { // root drops its groups
		s.groups, _ = unix.Getgroups() // fails only if they change at the same time
		s.groups = slices.DeleteFunc(s.groups, func(gid int) bool { return gid == c.GID && c.GID == c.UID })
	}
	for i := range mounts {
		s.dests = append(s.dests, mounts[i].dst)
	}
	for i := range known {
		s.dests = append(s.dests, known[i].dst)
	}
	if s.enter("/etc") {
		s.add("/etc", denied, true)
		s.cloned("/etc", len(known))
	}
	if etc := len(s.ops); s.enter("/var/lib") && s.add("/var/lib", deniedData, false) && len(s.ops) > etc+1 {
		s.cloned("/var/lib", etc)
	}
	s.manPages()
	return s.ops
}

// manPages adds the index of man pages, for whatis(1) and apropos(1). It belongs to the account that makes it.
func (s *public) manPages() {
	const dir, accounts = "/var/cache/man", 1000 // accounts below this number are the system's
	var st unix.Stat_t
	if unix.Lstat(dir, &st) == nil && st.Mode&(unix.S_IFMT|0o007) == unix.S_IFDIR|0o005 && (st.Uid < accounts || st.Uid == s.root) &&
		!slices.ContainsFunc(s.dests, func(dest string) bool { return values.Within(dest, dir) }) {
		s.bind(dir, false)
	}
}

// cloned makes the binds from the op with this number on parts of a tree.
func (s *public) cloned(tree string, from int) {
	for i := range s.ops[from:] {
		if o := &s.ops[from+i]; o.kind == opBind {
			o.tree = tree
		}
	}
}

// enter reports whether a directory of the system belongs to root.
func (s *public) enter(dir string) bool {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil || st.Uid != 0 && st.Uid != Nobody { // root is unmapped in some user namespaces
		return false
	}
	s.root = st.Uid
	return true
}

// add adds the entries of a directory. It reports whether the directory as a whole can be bound: with the file systems
// of containers in it, a bind would include these, and keep the engine from unmounting them.
func (s *public) add(dir string, denied func(name string) bool, etc bool) (whole bool) {
	whole = true
	for _, e := range s.list(dir) {
		if e.kind == unix.DT_REG {
			if public, checked := publicFile(e.name); etc && public && s.readable(dir+"/"+e.name, checked) {
				s.bind(dir+"/"+e.name, true)
			}
			continue
		}
		whole = whole && !slices.Contains(engineDirs, e.name)
		program, parts := strings.CutSuffix(e.name, ".d")
		if denied(program) || strings.HasSuffix(e.name, "-") || secretName(e.name) {
			continue
		}
		name := dir + "/" + e.name
		switch {
		case slices.Contains(s.dests, name):
		case e.kind == unix.DT_LNK && etc && !parts:
			if target, ok := etcLink(name); ok {
				s.ops = append(s.ops, op{kind: opSymlink, src: target, dst: name})
			}
		case e.kind == unix.DT_DIR && (!parts && ofProgram(program) || etc && unix.Access("/usr/bin/"+program, unix.F_OK) == nil):
			s.show(name)
		}
	}
	return whole
}

// bind adds a file or directory.
func (s *public) bind(name string, file bool) {
	s.ops = append(s.ops, op{kind: opBind, src: name, dst: name, file: file})
}

// ofProgram reports whether an installed program has a directory of this name in /usr/share or /usr/lib. It knows some
// common names, because the lookups cost as much as the rest of the search. java-*-openjdk is Debian's directory of a
// JVM, which does not start without its security policy.
func ofProgram(name string) bool {
	switch name {
	case "X11", "R", "dpkg", "emacs", "fish", "fonts", "gdb", "ghostscript", "glvnd", "groff", "perl", "php", "sgml", "terminfo", "texmf", "vim", "xml", "zsh":
		return true
	}
	return strings.HasPrefix(name, "python3.") || strings.HasPrefix(name, "java-") && strings.HasSuffix(name, "-openjdk") ||
		unix.Access("/usr/share/"+name, unix.F_OK) == nil || unix.Access("/usr/lib/"+name, unix.F_OK) == nil
}

// readable reports whether everybody can read a file in /etc and only root can change it. If checked is true, its text
// must not look like a credential either.
func (s *public) readable(name string, checked bool) bool {
	var st unix.Stat_t
	if slices.Contains(s.dests, name) || unix.Lstat(name, &st) != nil || !s.ofRoot(&st) || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o004 == 0 {
		return false
	}
	if !checked {
		return true
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	n, err := unix.Read(fd, s.buf)
	unix.Close(fd)
	return err == nil && n < len(s.buf) && !secretText(s.buf[:n])
}

// ofRoot reports whether only root can change a file or directory.
func (s *public) ofRoot(st *unix.Stat_t) bool {
	return st.Uid == s.root && st.Mode&0o002 == 0 && (st.Mode&0o020 == 0 || st.Gid == 0 || st.Gid == Nobody && s.root == Nobody)
}

// show adds a directory, or its entries one by one if an entry is hidden or the destination of another mount. It
// examines the entries only for a user whose groups let the sandbox read more than everybody can.
func (s *public) show(dir string) {
	var st unix.Stat_t
	if unix.Lstat(dir, &st) != nil || !s.ofRoot(&st) || st.Mode&0o005 != 0o005 {
		return
	}
	whole := !slices.ContainsFunc(s.dests, func(dest string) bool { return len(dest) > len(dir) && values.Within(dest, dir) })
	if whole && len(s.groups) == 0 {
		s.bind(dir, false)
		return
	}
	first := len(s.ops)
	for _, e := range s.list(dir) {
		name := dir + "/" + e.name
		o := op{kind: opBind, src: name, dst: name, file: e.kind != unix.DT_DIR}
		switch {
		case slices.Contains(s.dests, name):
			continue
		case e.kind == unix.DT_LNK:
			target, err := os.Readlink(name)
			if err != nil {
				continue
			}
			o = op{kind: opSymlink, src: target, dst: name}
		case unix.Lstat(name, &st) != nil || s.closed(&st):
			continue
		case e.kind != unix.DT_REG && e.kind != unix.DT_DIR || secretName(e.name) || !s.ofRoot(&st) || st.Mode&0o004 == 0:
			whole = false
			continue
		}
		s.ops = append(s.ops, o)
	}
	if whole {
		s.ops = s.ops[:first]
		s.bind(dir, false)
	}
}

// closed reports whether the kernel keeps the sandbox from reading a file or directory.
func (s *public) closed(st *unix.Stat_t) bool {
	return st.Mode&0o004 == 0 && st.Uid != s.uid && (st.Mode&0o040 == 0 || !slices.Contains(s.groups, int(st.Gid)))
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

// entry is one of getdents(2).
type entry struct {
	name string
	kind uint8
}

// list returns the entries of a directory; nil if it cannot be read or has too many.
func (s *public) list(dir string) (list []entry) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer unix.Close(fd)
	list = make([]entry, 0, 160)
	for {
		n, err := unix.Getdents(fd, s.buf)
		if err != nil {
			return nil
		}
		if n <= 0 {
			return list
		}
		for at := 0; at < n; {
			d := (*unix.Dirent)(unsafe.Pointer(&s.buf[at]))
			text := s.buf[at+int(unsafe.Offsetof(d.Name)) : at+int(d.Reclen)]
			at += int(d.Reclen)
			end := bytes.IndexByte(text, 0)
			e := entry{string(text[:max(end, 0)]), d.Type}
			if e.name == "." || e.name == ".." || end < 0 {
				continue
			}
			if e.kind == unix.DT_UNKNOWN {
				var st unix.Stat_t
				if unix.Fstatat(fd, e.name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
					continue
				}
				e.kind = uint8(st.Mode & unix.S_IFMT >> 12)
			}
			if s.left--; s.left < 0 {
				return nil
			}
			list = append(list, e)
		}
	}
}

// secretName reports whether a file or directory holds credentials, by its name.
func secretName(name string) bool {
	if PrivateDirs[name] || SecretFile(name) {
		return true
	}
	for word := range strings.FieldsFuncSeq(strings.ToLower(name), func(r rune) bool { return !unicode.IsLetter(r) }) {
		switch word {
		case "secret", "secrets", "password", "passwords", "passwd", "token", "tokens", "credential", "credentials", "htpasswd", "keytab", "private", "auth":
			return true
		}
	}
	return false
}

// secretText reports whether a text may hold credentials, or a URL with a user.
func secretText(text []byte) bool {
	for i := 0; i+2 < len(text); i++ {
		mark := ""
		switch [2]byte{text[i] | 0x20, text[i+1] | 0x20} { // in lower case, if they are letters
		case [2]byte{'p', 'a'}:
			mark = "passw"
		case [2]byte{'p', 'r'}:
			mark = "private key"
		case [2]byte{'s', 'e'}:
			mark = "secret"
		case [2]byte{'t', 'o'}:
			mark = "token"
		case [2]byte{'a', 'p'}:
			mark = "apikey"
		case [2]byte{'a', 'u'}:
			mark = "authorization"
		case [2]byte{'e', 'x'}:
			mark = "extraheader"
		case [2]byte{':' | 0x20, '/' | 0x20}:
			if rest, ok := bytes.CutPrefix(text[i:], []byte("://")); ok {
				if end := bytes.IndexAny(rest, "@/ \t\r\n\"'"); end >= 0 && rest[end] == '@' {
					return true
				}
			}
			continue
		default:
			continue
		}
		if len(text)-i >= len(mark) && bytes.EqualFold(text[i:i+len(mark)], []byte(mark)) {
			return true
		}
	}
	return false
}
