package main

import (
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
)

// advises reports whether a person reads what sbxrun says on stderr. A line for people
// goes into no pipe and beside no report.
func (r *runner) advises() bool {
	return !r.flags.Quiet && !r.flags.JSON && r.flags.Report == "" && term.IsTerminal(int(os.Stderr.Fd()))
}

// openCounters opens the network counters of the sandbox, which can be read when that is
// gone as well: the open file holds its network namespace. nil if there is nothing to tell.
func (r *runner) openCounters() *os.File {
	if r.flags.Net != string(room.NetNone) || !r.advises() {
		return nil
	}
	f, err := os.Open("/proc/" + strconv.Itoa(r.Kept().Room.PID) + "/net/snmp")
	if err != nil {
		return nil // then nothing is said of the network
	}
	return f
}

// advise tells in a line what of the sandbox may have been in the way of a command that
// has failed by itself. counters may be nil, and is closed.
func (r *runner) advise(res result.Result, counters *os.File) {
	var text []byte
	if counters != nil {
		text, _ = io.ReadAll(counters) // without it nothing is said of the network
		counters.Close()
	}
	if res.Cause != result.Exited || res.Payload.Code() == 0 || !r.advises() {
		return
	}
	failure := room.Failure{Code: res.Payload.Code(), Network: unreached(string(text))}
	if hint := r.Place.Plan.Obstacle(failure, thisCaller()); hint != "" {
		say("sbxrun: hint: " + printable(hint))
	}
}

// unreached reports, by a text as in /proc/net/snmp, whether somebody has tried to reach
// what is not there: a host without a route to it, or a name server, for which the C
// library takes a port of the loopback interface that nobody has.
func unreached(text string) bool {
	var names []string
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(names) == 0 || len(fields) != len(names) || fields[0] != names[0] {
			names = fields // of the line that follows
			continue
		}
		for _, name := range map[string][]string{"Ip:": {"OutNoRoutes"}, "Udp:": {"NoPorts"}}[fields[0]] {
			if i := slices.Index(names, name); i > 0 && fields[i] != "0" {
				return true
			}
		}
		names = nil
	}
	return false
}
