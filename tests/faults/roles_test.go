package faults

import (
	"os"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The processes of a run. A sandbox that was started has a supervisor in the place of
// sbxrun, and neither init nor payload if it idles; an exec has no monitor and no room.
const (
	roleSbxrun = iota
	roleKeeper
	roleMonitor
	roleRoom
	roleInit
	rolePayload
	roles
)

// roleNames also has the two helpers that only the tracer sees.
var roleNames = []string{"sbxrun", "keeper", "monitor", "room", "init", "payload", "enters", "inside"}

// above is each one's parent: the keeper has two children that stay.
var above = [roles]int{roleKeeper: roleSbxrun, roleMonitor: roleKeeper, roleRoom: roleMonitor, roleInit: roleKeeper, rolePayload: roleInit}

// family is the processes by role, as far as they exist: found by descent from sbxrun or a
// supervisor, and by their numbers in the PID namespaces. Names are not looked at.
func family(sbxrun int) (pids [roles]int) {
	pids[roleSbxrun] = sbxrun
	if sbxrun <= 1 {
		return pids
	}
	keepers := harness.Children(sbxrun)
	if len(keepers) == 0 {
		return pids
	}
	pids[roleKeeper] = keepers[0]
	// On the way in there are up to two more below the keeper, for a moment: one that is
	// going to enter, younger than the monitor, and one that has, which is no PID 1.
	for _, pid := range harness.Children(pids[roleKeeper]) {
		switch numbers := harness.PIDs(pid); {
		case len(numbers) == 3 && numbers[2] == "1":
			pids[roleInit] = pid
		case len(numbers) == 1 && pids[roleMonitor] == 0:
			pids[roleMonitor] = pid
		}
	}
	for _, pid := range harness.Children(pids[roleMonitor]) {
		if numbers := harness.PIDs(pid); len(numbers) == 2 && numbers[1] == "1" {
			pids[roleRoom] = pid
		}
	}
	if below := harness.Children(pids[roleInit]); len(below) > 0 {
		pids[rolePayload] = below[0]
	}
	return pids
}

// built says whether the program of a room's PID 1 runs.
func built(pid int) bool {
	target, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	if err != nil { // somebody else's: its name will do
		p, ok := harness.ReadProc(pid)
		return ok && p.Comm == "sbxrun-room"
	}
	return strings.HasPrefix(target, "/memfd:")
}
