// Package version knows which sbxrun this is.
package version

import "runtime/debug"

// stamp is what git describe says of the sources. The linker sets it: internal/setup/build.sh.
var stamp string

// String returns the tag that the program was built from, with the commit if that
// came later; of a program made by go install, its module's version.
func String() string {
	info, _ := debug.ReadBuildInfo() // nil in a program built without modules
	return of(stamp, info)
}

func of(stamp string, info *debug.BuildInfo) string {
	switch {
	case stamp != "":
		return stamp
	case info != nil && info.Main.Version != "" && info.Main.Version != "(devel)":
		return info.Main.Version
	}
	return "devel"
}
