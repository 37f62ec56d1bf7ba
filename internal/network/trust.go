package network

import (
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Bounds of a report: it names so many hosts that were permitted, and so many that were refused, so that neither
// keep the others out; and each port. All others are counted as [OtherHosts].
const (
	MaxHosts = 50
	MaxLines = 2*MaxHosts + 2*maxPorts + 1
)

// OtherHosts is what a report calls those that it does not name.
const OtherHosts = "(others)"

// trusted is a report as it may be shown: the proxy has made it of what the sandbox asked for.
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

// Clean is a text of the sandbox's as it may be printed: ASCII, and bounded.
func Clean(s string) string {
	const most, more = 300, "..."
	if len(s) > most {
		s = s[:most-len(more)] + more
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, s)
}
