package main

import "testing"

func TestUnreached(t *testing.T) {
	const ip, udp = "Ip: Forwarding InReceives OutNoRoutes FragCreates\n", "Udp: InDatagrams NoPorts InErrors\n"
	for _, tt := range []struct {
		name, text string
		want       bool
	}{
		{"nothing", "", false},
		{"quiet", ip + "Ip: 2 10 0 5\n" + udp + "Udp: 3 0 7\n", false},
		{"no route", ip + "Ip: 2 10 1 5\n" + udp + "Udp: 0 0 0\n", true},
		{"no name server", ip + "Ip: 2 10 0 5\n" + udp + "Udp: 0 4 0\n", true},
		{"of another protocol", ip + "Ip: 0 0 0 0\nUdpLite: InDatagrams NoPorts\nUdpLite: 0 4\n", false},
		{"cut", ip + "Ip: 2 10\n" + udp, false},
		{"odd", "\n \nIp:\nIp:\n", false},
	} {
		if got := unreached(tt.text); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}
