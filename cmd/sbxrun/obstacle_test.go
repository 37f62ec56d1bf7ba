package main

import (
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestUnreached(t *testing.T) {
	const tcp = "Tcp: ActiveOpens AttemptFails InErrs\nTcp: 2 1 3\n"
	const ip, udp = "Ip: Forwarding InReceives OutNoRoutes FragCreates\n", "Udp: InDatagrams NoPorts InErrors\n"
	for _, tt := range []struct {
		name, text string
		want       int
	}{
		{"nothing", "", 0},
		{"quiet", ip + "Ip: 2 10 0 5\n" + udp + "Udp: 3 0 7\n", 0},
		{"no route", ip + "Ip: 2 10 1 5\n" + udp + "Udp: 0 0 0\n", 1},
		{"no name server", ip + "Ip: 2 10 0 5\n" + udp + "Udp: 0 4 0\n", 4},
		{"of another protocol", ip + "Ip: 0 0 0 0\nUdpLite: InDatagrams NoPorts\nUdpLite: 0 4\n", 0},
		{"cut", ip + "Ip: 2 10\n" + udp, 0},
		{"odd", "\n \nIp:\nIp:\n", 0},
	} {
		check.Equal(t, unreached(tcp+tt.text, true), tt.want+1, "%s, and no server", tt.name)
		check.Equal(t, unreached(tt.text, false), tt.want, "%s", tt.name)
	}
}

func TestRefusedHosts(t *testing.T) {
	refused := func(host, reason string) result.ReportHost {
		return result.ReportHost{Host: host, Refused: 1, Reason: reason}
	}
	for _, tt := range []struct {
		used         *result.ReportNetwork
		what, remedy string
	}{
		{nil, "", ""},
		{&result.ReportNetwork{Hosts: []result.ReportHost{{Host: "a.b:443", Connections: 1}}}, "", ""},
		{&result.ReportNetwork{Hosts: []result.ReportHost{{Host: "a.b:443", Connections: 1}, refused("c.d:443", "not listed")}}, "the list of --net does not have c.d:443", "--net allow=c.d:443 has"},
		{&result.ReportNetwork{Hosts: []result.ReportHost{refused("a:1", "not listed"), refused("b:1", "not listed"), refused("c:1", "not listed"), refused("d:1", "not listed")}},
			"the list of --net does not have a:1, b:1, c:1", "--net allow=a:1,b:1,c:1 has"},
		{&result.ReportNetwork{Hosts: []result.ReportHost{refused("(others)", "not listed"), refused("a:1", "not listed"), refused("published port 80", "connection refused")}},
			"the list of --net does not have a:1", "--net allow=a:1 has"},
		{&result.ReportNetwork{Hosts: []result.ReportHost{refused("a:1", "it resolves to 127.0.0.1, a loopback address, which is not listed itself")}},
			"a:1 was refused: it resolves to 127.0.0.1, a loopback address, which is not listed itself", "sbxrun help run describes --net"},
	} {
		what, remedy := refusedHosts(tt.used)
		check.That(t, what == tt.what && remedy == tt.remedy, "%+v: %q, %q", tt.used, what, remedy)
	}
}
