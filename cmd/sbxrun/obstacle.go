package main

import (
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/obstacle"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// advises reports whether hints are wanted: on a terminal, without a report or --quiet.
func (c *command) advises() bool {
	return !c.shared.Quiet && !c.shared.JSON && c.shared.Report == "" && term.IsTerminal(int(os.Stderr.Fd()))
}

// counters are the network counters of a sandbox, for all processes in it. They stay readable after its end, because
// the open file holds its network namespace. nil counts nothing.
type counters struct {
	file   *os.File
	before int
	others bool // other processes or clients of a published port also count
	listed bool // the sandbox has a list of hosts
}

// openCounters opens the counters of a sandbox with this network, if a hint could come from them.
func (c *command) openCounters(net string, of *proc.Process) *counters {
	listed := strings.HasPrefix(net, "allow")
	if net != string(room.NetNone) && !listed || !c.advises() {
		return nil
	}
	f, err := os.Open("/proc/" + strconv.Itoa(of.PID) + "/net/snmp")
	if err != nil {
		return nil // no hint about the network
	}
	return &counters{file: f, others: len(c.Parts.Published()) > 0, listed: listed}
}

// begin starts counting in a sandbox that other processes have used before.
func (n *counters) begin() *counters {
	if n != nil {
		n.others = true
		n.before = n.read()
	}
	return n
}

// grew reports whether a process has tried to reach a network, and closes the counters.
func (n *counters) grew() bool {
	if n == nil {
		return false
	}
	defer n.file.Close()
	return n.read() > n.before
}

func (n *counters) read() int {
	_, err := n.file.Seek(0, io.SeekStart)
	text, readErr := io.ReadAll(n.file)
	if err != nil || readErr != nil {
		return 0
	}
	return unreached(string(text), !n.others)
}

// failure describes a command that has failed by itself. ok is false if it has not failed or hints are not wanted. Only
// the first call includes the network.
func (c *command) failure(res result.Result, n *counters) (f obstacle.Failure, ok bool) {
	tried := n.grew()
	if res.Cause != result.Exited || res.Payload.Code() == 0 || !c.advises() {
		return f, false
	}
	f = obstacle.Failure{Code: res.Payload.Code(), Network: tried, Listed: tried && n.listed}
	for _, l := range res.Limits {
		if l.Name == "pids" && l.Hit {
			f.Tasks = int(l.Requested)
		}
	}
	return f, true
}

// refusedHosts returns a hint about hosts that are not in the list of --net. It ignores clients of published ports, which
// may have connected before the server was ready.
func refusedHosts(used *result.ReportNetwork) (what, remedy string) {
	if used == nil {
		return "", ""
	}
	const most = 3
	var names []string
	for _, h := range used.Hosts {
		if h.Refused == 0 || h.Host == network.OtherHosts || strings.HasPrefix(h.Host, "published port ") {
			continue
		}
		if h.Reason != "" && h.Reason != "not listed" {
			return h.Host + " was refused: " + h.Reason, "sbxrun help run describes --net"
		}
		names = append(names, h.Host)
	}
	if len(names) == 0 {
		return "", ""
	}
	list := names[:min(most, len(names))]
	return "the list of --net does not have " + strings.Join(list, ", "), "--net allow=" + strings.Join(list, ",") + " has"
}

// unreached counts failed attempts to reach the network in a text in the format of /proc/net/snmp: hosts without a
// route, and name servers, for which the C library tries an unused port of the loopback interface. With localhost it
// includes servers on the loopback interface, which may run on the host; with other processes in the sandbox those
// may just not be up yet.
func unreached(text string, localhost bool) (times int) {
	counted := map[string]string{"Ip:": "OutNoRoutes", "Udp:": "NoPorts"}
	if localhost {
		counted["Tcp:"] = "AttemptFails"
	}
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(names) == 0 || len(fields) != len(names) || fields[0] != names[0] {
			names = fields // for the next line
			continue
		}
		if i := slices.Index(names, counted[fields[0]]); i > 0 {
			n, _ := strconv.Atoi(fields[i])
			times += n
		}
		names = nil
	}
	return times
}
