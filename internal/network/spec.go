// Package network gives a sandbox a limited network: hosts that it may reach, ports of the host that are
// forwarded to it, and Unix sockets of the host.
//
// The sandbox keeps its own, empty network namespace. sbxrun creates sockets in it ([enter.Sockets]), and
// a separate process, sbxrund as a proxy, serves them (package proxy). Like bwrap, that process has a
// keeper and is a child of sbxrun, not of the sandbox; it ends with either. It has these sockets and one
// to sbxrun, and nothing else.
//
//	sbxrun
//	├─ keeper        of the sandbox
//	└─ keeper
//	   └─ sbxrund    accepts connections at the sockets, and connects to hosts
//
// The proxy is a separate process because it parses input from hostile programs, and because packages
// for HTTP and TLS would slow down every start of sbxrun. It starts before the sandbox is built, which
// takes longer.
package network

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ProxyPort is the port of the proxy on 127.0.0.1 in the sandbox, for HTTP and SOCKS5.
const ProxyPort = 3128

// Limits of a spec. A list within them fits into a message.
const (
	maxRules = 1000
	maxList  = 128 << 10 // bytes of all hosts
	maxPorts = 64
)

// Spec is the network of a sandbox. The zero Spec is no network.
type Spec struct {
	Allow   []Rule
	Publish []Publish
	Connect []Connect
	Proxied bool // has a proxy, even with an empty list
}

// Wanted reports whether the sandbox needs a proxy process.
func (s *Spec) Wanted() bool { return s.Proxied || len(s.Publish) > 0 || len(s.Connect) > 0 }

// Rule permits a host.
type Rule struct {
	Host string `json:"host"`           // a name, *.NAME, an address, or a network with /BITS
	Port uint16 `json:"port,omitempty"` // 0 for 80 and 443
}

// TopLevel returns the warning about a rule for every name below a top-level domain, or "".
func (r Rule) TopLevel() string {
	tld, any := strings.CutPrefix(r.Host, "*.")
	if !any || strings.Contains(tld, ".") {
		return ""
	}
	return fmt.Sprintf("the network rule %q allows every host below the top-level domain %s; list a domain below it, such as *.example.%s", r.Host, tld, tld)
}

// Loopback returns the warning about a loopback address in a list without names, or "". In the sandbox such an address is
// the sandbox's own, and the rule only permits names that resolve to it.
func Loopback(rules []Rule) string {
	var at *Rule
	for i, r := range rules {
		addr, err := netip.ParseAddr(r.Host)
		switch {
		case err != nil && !strings.Contains(r.Host, "/"):
			return ""
		case err == nil && addr.IsLoopback() && at == nil:
			at = &rules[i]
		}
	}
	if at == nil {
		return ""
	}
	name := HostName
	if at.Port != 0 {
		name += ":" + strconv.Itoa(int(at.Port))
	}
	return fmt.Sprintf("%s is the sandbox itself; for a server on this host, list %s", at.Host, name)
}

// Publish forwards a port of the host to the sandbox.
type Publish struct {
	Addr     string // "" for 127.0.0.1
	HostPort uint16 // 0 picks a free one
	Port     uint16 // on the loopback interface of the sandbox
}

// Connect forwards a port of the sandbox to a Unix socket of the host.
type Connect struct {
	Path string // absolute
	Port uint16 // of 127.0.0.1
}

// ParseAllow parses the list after allow=. The proxy checks addresses, by [Compile].
func ParseAllow(list string) (rules []Rule, err error) {
	for word := range strings.SplitSeq(list, ",") {
		r, err := ParseRule(word)
		if err != nil {
			return nil, fmt.Errorf("--net allow=%s: %w", short(list), err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

const ruleExample = "want HOST[:PORT],... such as github.com,*.example.org:443,10.1.2.0/24:5432,[2001:db8::1]:443"

// ParseRule parses one rule of a list.
func ParseRule(word string) (r Rule, err error) {
	bad := fmt.Errorf("%q: %s", short(word), ruleExample)
	host, port := word, ""
	switch {
	case strings.HasPrefix(word, "["):
		end := strings.IndexByte(word, ']')
		if end < 0 {
			return r, bad
		}
		host, port = word[1:end]+bits(word[end+1:]), word[end+1+len(bits(word[end+1:])):]
		if !strings.Contains(host, ":") {
			return r, bad
		}
	case strings.Count(word, ":") == 1:
		i := strings.IndexByte(word, ':')
		host, port = word[:i], word[i:]
	}
	if port != "" {
		if r.Port, err = parsePort(strings.TrimPrefix(port, ":")); err != nil || port[0] != ':' {
			return r, bad
		}
	}
	r.Host = strings.ToLower(strings.TrimSuffix(host, "."))
	if r.Host == "localhost" || strings.HasSuffix(r.Host, ".localhost") {
		return r, fmt.Errorf("%q is the sandbox itself; for a server on this host, list %s%s", short(word), HostName, port)
	}
	if !looksLikeHost(r.Host) {
		return r, bad
	}
	return r, nil
}

// bits returns the /BITS at the start of s.
func bits(s string) string {
	if !strings.HasPrefix(s, "/") {
		return ""
	}
	n := 1
	for n < len(s) && s[n] >= '0' && s[n] <= '9' {
		n++
	}
	return s[:n]
}

// looksLikeHost reports whether host may be a name, with or without *., or an address.
func looksLikeHost(host string) bool {
	if len(host) > 253 {
		return false
	}
	if strings.Contains(host, ":") || strings.Contains(host, "/") {
		return strings.Trim(host, "0123456789abcdef:./") == ""
	}
	for label := range strings.SplitSeq(strings.TrimPrefix(host, "*."), ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || strings.Trim(label, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	return true
}

// ParsePublish parses [ADDR:]HOSTPORT:PORT.
func ParsePublish(arg string) (p Publish, err error) {
	bad := fmt.Errorf("--publish %q: want [ADDR:]HOSTPORT:PORT, such as 8080:80, 0:80 or 0.0.0.0:8080:80", short(arg))
	rest, port, ok := cutLast(arg)
	if !ok {
		return p, bad
	}
	if p.Port, err = parsePort(port); err != nil {
		return p, bad
	}
	hostPort := rest
	if addr, last, ok := cutLast(rest); ok {
		p.Addr, hostPort = addr, last
		if _, err := sockaddr(addr, 1); err != nil {
			return p, fmt.Errorf("--publish %q: want an IPv4 address, [::1] or [::] before the ports, such as 0.0.0.0:8080:80", short(arg))
		}
	}
	if hostPort == "0" {
		return p, nil
	}
	if p.HostPort, err = parsePort(hostPort); err != nil {
		return p, bad
	}
	return p, nil
}

// ParseConnect parses unix:PATH=PORT. A relative PATH starts at dir.
func ParseConnect(arg, dir string) (c Connect, err error) {
	path, isUnix := strings.CutPrefix(arg, "unix:")
	i := strings.LastIndexByte(path, '=')
	if !isUnix || i < 1 {
		return c, fmt.Errorf("--connect %q: want unix:PATH=PORT, such as unix:/run/postgresql/.s.PGSQL.5432=5432", short(arg))
	}
	if c.Port, err = parsePort(path[i+1:]); err != nil {
		return c, fmt.Errorf("--connect %q: %w, such as unix:/run/postgresql/.s.PGSQL.5432=5432", short(arg), err)
	}
	c.Path = path[:i]
	if !filepath.IsAbs(c.Path) {
		c.Path = filepath.Join(dir, c.Path)
	}
	return c, nil
}

// Check returns an error if the spec exceeds a limit or uses a port twice.
func (s *Spec) Check() error {
	size := 0
	for _, r := range s.Allow {
		size += len(r.Host)
	}
	if len(s.Allow) > maxRules || size > maxList {
		return fmt.Errorf("--net allow=: the list is too long: %d hosts with %d bytes; the maximum is %d hosts with %d bytes", len(s.Allow), size, maxRules, maxList)
	}
	if len(s.Publish) > maxPorts || len(s.Connect) > maxPorts {
		return fmt.Errorf("--publish and --connect can each be given up to %d times", maxPorts)
	}
	taken := map[uint16]bool{}
	if s.Proxied {
		taken[ProxyPort] = true
	}
	for _, c := range s.Connect {
		if taken[c.Port] {
			return fmt.Errorf("--connect: port %d of the sandbox is in use by another --connect or the proxy of --net allow=", c.Port)
		}
		taken[c.Port] = true
	}
	return nil
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return "", "", false
	}
	return s[:i], s[i+1:], true
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("want a port from 1 to 65535")
	}
	return uint16(n), nil
}

// short truncates a text for an error message.
func short(s string) string {
	const most = 100
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// ownNames are the names of the sandbox's own loopback interface, which no program should look for at
// the proxy.
var ownNames = []string{"localhost", "127.0.0.1", "::1"}

// bundles are the paths of the distributions' CA certificates, which a sandbox with a network sees.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Arch, Alpine
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, Red Hat
	"/etc/ssl/ca-bundle.pem",                            // openSUSE
}

// Variables returns the environment variables for the proxy: those of curl, git, pip, Go and others, those of npm,
// and the one that makes Node.js use the first ones (22.21, or 24). Node.js, pip and others ship their own CA
// certificates, so further variables name the system's, which include the CA of a company's proxy, if they exist in
// rootfs, the root directory of the sandbox; "" is the host's.
func (s *Spec) Variables(rootfs string) (pairs []string) {
	if !s.Proxied {
		return nil
	}
	proxy := "http://127.0.0.1:" + strconv.Itoa(ProxyPort)
	own := strings.Join(ownNames, ",")
	for _, name := range []string{"http_proxy", "https_proxy", "all_proxy"} {
		pairs = append(pairs, name+"="+proxy, strings.ToUpper(name)+"="+proxy)
	}
	pairs = append(pairs, "no_proxy="+own, "NO_PROXY="+own,
		"npm_config_proxy="+proxy, "npm_config_https_proxy="+proxy, "npm_config_noproxy="+own, "NODE_USE_ENV_PROXY=1")
	for _, bundle := range bundles {
		if _, err := os.Stat(rootfs + bundle); err == nil {
			return append(pairs, "NODE_EXTRA_CA_CERTS="+bundle, "PIP_CERT="+bundle, "SSL_CERT_FILE="+bundle)
		}
	}
	return pairs
}
