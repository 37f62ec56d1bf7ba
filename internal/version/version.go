// Package version holds sbxrun's version.
package version

import (
	"runtime/debug"
	"strings"
)

// Number is the version of this release, or of the next one.
const Number = "0.1.0"

// stamp is the output of git describe for the sources. The linker sets it (internal/setup/build.sh).
var stamp string

// String returns [Number], and for a build between releases the commit as well: 0.1.0+d008621.
func String() string {
	info, _ := debug.ReadBuildInfo() // nil in a program built without modules
	return of(stamp, info)
}

func of(stamp string, info *debug.BuildInfo) string {
	if stamp == "" && info != nil && info.Main.Version != "(devel)" {
		stamp = info.Main.Version
	}
	commit := strings.TrimPrefix(strings.TrimPrefix(stamp, "v"+Number), "-")
	if commit == "" {
		return Number
	}
	return Number + "+" + commit
}
