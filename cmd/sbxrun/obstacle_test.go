package main

import "testing"

func TestUnreached(t *testing.T) {
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
		if got := unreached(tt.text); got != tt.want {
			t.Errorf("%s: %d", tt.name, got)
		}
	}
}
