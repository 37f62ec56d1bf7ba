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
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
)

// advises reports whether a person reads what sbxrun says on stderr. A line for people
// goes into no pipe and beside no report.
func (c *command) advises() bool {
	return !c.printing.Quiet && !c.printing.JSON && c.printing.Report == "" && term.IsTerminal(int(os.Stderr.Fd()))
}

// counters are the network counters of a room, which can be read when that is gone as well:
// the open file holds its network namespace. Others in the room count, too. nil counts nothing.
type counters struct {
	file   *os.File
	before int
	others bool // there were others before, or clients of a published port are
	listed bool // the room has a list of hosts
}

// openCounters opens those of a room whose network is as --net says, if there is something to
// tell.
func (c *command) openCounters(net string, of *proc.Process) *counters {
	listed := strings.HasPrefix(net, "allow") // and the list, at --net
	if net != string(room.NetNone) && !listed || !c.advises() {
		return nil
	}
	f, err := os.Open("/proc/" + strconv.Itoa(of.PID) + "/net/snmp")
	if err != nil {
		return nil // then nothing is said of the network
	}
	return &counters{file: f, others: len(c.Parts.Published()) > 0, listed: listed}
}

// begin is for a room in which there were others before.
func (n *counters) begin() *counters {
	if n != nil {
		n.others = true
		n.before = n.read()
	}
	return n
}

// grew reports whether somebody has tried to reach a network, and closes.
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

// failure is what is known of a command that has failed by itself; not ok if it has not, or
// nobody wants to know. Only the first call says something of the network.
func (c *command) failure(res result.Result, n *counters) (f room.Failure, ok bool) {
	tried := n.grew()
	if res.Cause != result.Exited || res.Payload.Code() == 0 || !c.advises() {
		return f, false
	}
	f = room.Failure{Code: res.Payload.Code(), Network: tried, Listed: tried && n.listed}
	for _, l := range res.Limits {
		if l.Name == "pids" && l.Hit {
			f.Tasks = int(l.Requested)
		}
	}
	return f, true
}

// refusedHosts is about hosts that the list of --net does not have. A client of a published port
// may have come before there was a server, which is nothing to the command.
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

// unreached counts, by a text as in /proc/net/snmp, how often somebody has tried to reach
// what is not there: a host without a route to it, or a name server, for which the C
// library takes a port of the loopback interface that nobody has. With localhost also a
// server on that, which the host may have; among others it is one that is not up yet.
func unreached(text string, localhost bool) (times int) {
	counted := map[string]string{"Ip:": "OutNoRoutes", "Udp:": "NoPorts"}
	if localhost {
		counted["Tcp:"] = "AttemptFails"
	}
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(names) == 0 || len(fields) != len(names) || fields[0] != names[0] {
			names = fields // of the line that follows
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
