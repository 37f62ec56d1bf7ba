package faults

import (
	"os"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// The processes of a run. A started sandbox has a supervisor in place of sbxrun, and neither init
// nor payload while idle. An exec has no monitor and no room.
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

// above maps a process to its parent. The keeper has two lasting children.
var above = [roles]int{roleKeeper: roleSbxrun, roleMonitor: roleKeeper, roleRoom: roleMonitor, roleInit: roleKeeper, rolePayload: roleInit}

// family returns the PIDs of the processes by role, 0 for those that do not exist. It finds them
// by descent from sbxrun or a supervisor and by their PIDs in the namespaces, not by name.
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
	// During set-up the keeper may have two more children for a moment: one that will enter,
	// younger than the monitor, and one that has entered, which is not PID 1.
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

// built reports whether PID 1 of a room executes its own program.
func built(pid int) bool {
	target, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	if err != nil { // another user's process: compare its name
		p, ok := harness.ReadProc(pid)
		return ok && p.Comm == "sbxrun-room"
	}
	return strings.HasPrefix(target, "/memfd:")
}
