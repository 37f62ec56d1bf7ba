// Package network gives a sandbox what of a network its user has listed, and nothing else of it:
// hosts that it may reach, ports of the host that lead into it, and unix sockets of the host's.
//
// The sandbox keeps the network namespace that it has with none. sbxrun makes sockets there
// ([enter.Sockets]), and a process of its own, sbxrund in the role of the proxy, does what is to be
// done at them (package proxy). That process is a keeper's, as bwrap is, and a child of sbxrun, not
// of the sandbox: it ends with either. It has the sockets, one to sbxrun, and nothing else.
//
//	sbxrun
//	├─ keeper        of the sandbox
//	└─ keeper
//	   └─ sbxrund    takes connections at the sockets, and makes those to the hosts
//
// It is a process and no part of sbxrun because what it takes to speak HTTP and TLS would be
// initialised at each start, and because it reads what hostile programs write. It is started before
// the room is built, which takes longer than its own start.
package network

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// ProxyPort is the port of 127.0.0.1 in the sandbox at which the proxy listens, for HTTP and SOCKS5.
const ProxyPort = 3128

// Bounds of what may be asked for. A list within them fits into a message.
const (
	maxRules = 1000
	maxList  = 128 << 10 // bytes of all its hosts
	maxPorts = 64
)

// Spec is what of a network a sandbox has. The zero Spec is none.
type Spec struct {
	Allow   []Rule
	Publish []Publish
	Connect []Connect
	Proxied bool // there is a proxy, though the list may be empty
}

// Wanted reports whether there is anything to do.
func (s *Spec) Wanted() bool { return s.Proxied || len(s.Publish) > 0 || len(s.Connect) > 0 }

// Rule is a host that may be reached.
type Rule struct {
	Host string `json:"host"`           // a name, *. and a name, an address, or a network with /BITS
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

// Publish is a port of the host that leads into the sandbox.
type Publish struct {
	Addr     string // "" for 127.0.0.1
	HostPort uint16 // 0 for one that is free
	Port     uint16 // on the loopback interface of the sandbox
}

// Connect is a unix socket of the host that the sandbox has as a port.
type Connect struct {
	Path string // absolute
	Port uint16 // of 127.0.0.1
}

// ParseAllow parses what follows allow=. That a host which looks like an address is one, the
// proxy sees to: what it takes to read addresses would be initialised at each start of sbxrun.
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

// ParseRule parses one host of a list.
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
	if !looksLikeHost(r.Host) {
		return r, bad
	}
	return r, nil
}

// bits is the /BITS that a text begins with.
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

// looksLikeHost reports whether this could be a name, with or without *., or an address.
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

// ParseConnect parses unix:PATH=PORT; a relative PATH is from dir on.
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

// Check finds what is too much, and what does not go together.
func (s *Spec) Check() error {
	size := 0
	for _, r := range s.Allow {
		size += len(r.Host)
	}
	if len(s.Allow) > maxRules || size > maxList {
		return fmt.Errorf("--net allow=: the list is too long: %d hosts of %d bytes are more than %d, or than %d bytes", len(s.Allow), size, maxRules, maxList)
	}
	if len(s.Publish) > maxPorts || len(s.Connect) > maxPorts {
		return fmt.Errorf("--publish and --connect can each be given %d times", maxPorts)
	}
	taken := map[uint16]bool{}
	if s.Proxied {
		taken[ProxyPort] = true
	}
	for _, c := range s.Connect {
		if taken[c.Port] {
			return fmt.Errorf("--connect: port %d of the sandbox is taken, by another --connect or by the proxy of --net allow=", c.Port)
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

// short is as much of a text as an error shows.
func short(s string) string {
	const most = 100
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// local are the hosts that are the sandbox's own and need no proxy: but the host's, if listed.
func (s *Spec) local() (hosts []string) {
	for _, host := range []string{"localhost", "127.0.0.1", "::1"} {
		if !slices.ContainsFunc(s.Allow, func(r Rule) bool { return r.Host == host }) {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// Variables are what tells programs in the sandbox of the proxy: those of curl, git, pip, Go and
// others; npm's own; and Node.js's, which heeds the first ones only if it is told to.
func (s *Spec) Variables() (pairs []string) {
	if !s.Proxied {
		return nil
	}
	proxy := "http://127.0.0.1:" + strconv.Itoa(ProxyPort)
	local := strings.Join(s.local(), ",")
	for _, name := range []string{"http_proxy", "https_proxy", "all_proxy"} {
		pairs = append(pairs, name+"="+proxy, strings.ToUpper(name)+"="+proxy)
	}
	return append(pairs, "no_proxy="+local, "NO_PROXY="+local,
		"npm_config_proxy="+proxy, "npm_config_https_proxy="+proxy, "npm_config_noproxy="+local, "NODE_USE_ENV_PROXY=1")
}
