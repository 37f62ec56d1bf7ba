package network

import "strings"

// HostName is the name of this host's loopback interface in rules, and inside a sandbox. localhost is
// always the sandbox itself.
const HostName = "host.sbxrun.internal"

// Upstream holds the proxies of this host's environment, which the sandbox's proxy uses itself.
type Upstream struct {
	HTTP  string `json:"http,omitempty"`
	HTTPS string `json:"https,omitempty"`
	No    string `json:"no,omitempty"`
}

// environmentProxy reads the variables that curl and other programs use: http_proxy, https_proxy,
// all_proxy and no_proxy. In a CGI program it ignores HTTP_PROXY, which a client can set
// by a header. It returns nil without a proxy.
func environmentProxy(getenv func(string) string) *Upstream {
	first := func(names ...string) string {
		for _, name := range names {
			if value := getenv(name); value != "" {
				return value
			}
		}
		return ""
	}
	all := first("all_proxy", "ALL_PROXY")
	if strings.HasPrefix(all, "socks") {
		all = "" // set for programs that speak SOCKS
	}
	u := &Upstream{HTTP: first("http_proxy"), HTTPS: first("https_proxy", "HTTPS_PROXY"), No: first("no_proxy", "NO_PROXY")}
	if getenv("REQUEST_METHOD") == "" {
		u.HTTP = first("http_proxy", "HTTP_PROXY")
	}
	if u.HTTP == "" {
		u.HTTP = all
	}
	if u.HTTPS == "" {
		u.HTTPS = all
	}
	if u.HTTP == "" && u.HTTPS == "" {
		return nil
	}
	return u
}
