package limits

import (
	_ "embed"
	"fmt"
)

//go:embed enable.sh
var enableScript string

// EnableScript returns a script for root that lets a user set limits on this machine, in the process
// shell and those it starts.
func EnableScript(uid, shell int) string {
	return fmt.Sprintf("#!/bin/sh\nuid=%d shell=%d\n%s", uid, shell, enableScript)
}

// enableHint returns the hint for limits that an ordinary user may not set; forRoot is the hint for root.
func enableHint(uid int, forRoot string) string {
	if uid == 0 {
		return forRoot
	}
	return "to enable limits in this shell: sbxrun doctor --script | sudo sh"
}
