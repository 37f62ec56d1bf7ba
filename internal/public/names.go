package public

import (
	"bytes"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/hostfiles"
)

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

// secretName reports whether the name of a file or directory suggests that it holds credentials.
func secretName(name string) bool {
	if hostfiles.PrivateDirs[name] || hostfiles.SecretFile(name) {
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
