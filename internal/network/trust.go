package network

import (
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Limits of a report. It lists up to MaxHosts permitted and MaxHosts refused hosts, so that neither kind
// displaces the other, and every port. [OtherHosts] counts the rest.
const (
	MaxHosts = 50
	MaxLines = 2*MaxHosts + 2*maxPorts + 1
	MaxText  = 300 // bytes of each text
)

// OtherHosts is the name of the hosts that a report does not list.
const OtherHosts = "(others)"

// trusted returns a report that is safe to print: the proxy built it from input of the sandbox.
func trusted(r *result.ReportNetwork) *result.ReportNetwork {
	if r == nil {
		return &result.ReportNetwork{Hosts: []result.ReportHost{}, Incomplete: true}
	}
	out := &result.ReportNetwork{Hosts: []result.ReportHost{}}
	for _, h := range r.Hosts[:min(len(r.Hosts), MaxLines)] {
		out.Hosts = append(out.Hosts, trustedHost(h))
	}
	return out
}

func trustedHost(h result.ReportHost) result.ReportHost {
	h.Host, h.Reason = Clean(h.Host), Clean(h.Reason)
	return h
}

// Clean returns a text from the sandbox that is safe to print: ASCII, and of bounded length.
func Clean(s string) string {
	const more = "..."
	if len(s) > MaxText {
		s = s[:MaxText-len(more)] + more
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}
