package limits

import (
	_ "embed"
	"fmt"
)

//go:embed enable.sh
var enableScript string

// EnableScript returns a script for root that lets a user set limits on this machine, in a
// shell and what that starts.
func EnableScript(uid, shell int) string {
	return fmt.Sprintf("#!/bin/sh\nuid=%d shell=%d\n%s", uid, shell, enableScript)
}

// enableHint is the hint where an ordinary user may not use what the kernel has; forRoot is that
// for root, who is confined by somebody else.
func enableHint(uid int, forRoot string) string {
	if uid == 0 {
		return forRoot
	}
	return "to have them in this shell: sbxrun doctor --script | sudo sh"
}
