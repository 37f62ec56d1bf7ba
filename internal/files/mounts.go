package files

import (
	"path"
	"strings"
)

// other returns the first mount in a mountinfo (proc_pid_mountinfo(5)) that the pattern, or a directory matched by
// it, contains, other than the mount of the get: such a mount disappears with the sandbox. "" means none.
func other(mountinfo, pattern, begin string) string {
	want := strings.Split(pattern, "/")
	plain := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(mountinfo) {
		words := strings.Fields(line)
		if len(words) < 5 {
			continue
		}
		point := plain.Replace(words[4])
		parts := strings.Split(point, "/")
		if point == begin || len(parts) < len(want) {
			continue
		}
		// As in a walk: a name that begins with a dot needs a pattern that does.
		matches := true
		for i, p := range want {
			ok, _ := path.Match(p, parts[i])
			matches = matches && ok && (!strings.HasPrefix(parts[i], ".") || strings.HasPrefix(p, "."))
		}
		if matches {
			return point
		}
	}
	return ""
}
