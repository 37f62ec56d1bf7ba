// Package plain writes sandboxes as commands of bash(1) that do not need sbxrun.
package plain

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ShellCommand returns a command for bash(1) that is equivalent to a plan. It has no deadline and does not wait for the
// end of all processes. It contains every variable of the environment. The seccomp filter comes from a file, or from
// descriptor N for "&N"; for "", the command has a comment about the missing filter. The plan's bwrap must be
// [room.Program.Whole]. Some sh(1) do not support the descriptors above 9 that the command uses.
func ShellCommand(plan *room.Plan, filter string) string {
	p, cred := plan.Plain(), plan.Cred()
	var words []string
	if cred != nil {
		words = append(words, "setpriv", "--reuid", strconv.Itoa(int(cred.UID)), "--regid", strconv.Itoa(int(cred.GID)))
		if groups := cred.Groups[:cred.Groups.Len()]; len(groups) == 0 {
			words = append(words, "--clear-groups")
		} else {
			words = append(words, "--groups", strings.ReplaceAll(strings.Trim(fmt.Sprint(groups), "[]"), " ", ","))
		}
	}
	words = append(append(words, "env", "-i", plan.Program.Path), p.Options...)
	comment, fd := "", room.FirstCopy+len(p.Copies)
	switch {
	case p.Filter == nil:
	case filter == "":
		comment = fmt.Sprintf("# without its seccomp filter of %d bytes, which --print-filter FILE writes\n", len(p.Filter))
	default:
		words = append(words, "--seccomp", strconv.Itoa(fd))
		if !strings.HasPrefix(filter, "&") {
			filter = values.ShellQuote(filter)
		}
		filter = fmt.Sprintf(" %d<%s", fd, filter)
	}
	if plan.Program.FollowsLinks() && p.InHost {
		comment += "# bubblewrap before 0.12.0 follows links on the way to mount points in directories of the host (CVE-2026-87766)\n"
	}
	words = append(append(words, "--"), plan.Entry().Command...)
	for i, w := range words {
		words[i] = values.ShellQuote(w)
	}
	line, heredocs := strings.Join(words, " "), ""
	for i, c := range p.Copies {
		fd := room.FirstCopy + i
		if c.Source != "" {
			line += fmt.Sprintf(" %d<%s", fd, values.ShellQuote(c.Source))
			continue
		}
		end := fmt.Sprintf("END%d", fd)
		line += fmt.Sprintf(" %d<<'%s'", fd, end)
		heredocs += "\n" + string(c.Data) + end
	}
	line += filter + heredocs
	if len(p.Staged) == 0 {
		return comment + line
	}
	// The keeper does the same before it drops root's privileges.
	script := "set -e\nstage=$(mktemp -d)\nmount -t tmpfs -o nosuid,nodev,noexec,mode=0755 sbxrun \"$stage\"\n"
	for i, s := range p.Staged {
		how := "--rbind"
		if s.Idmap != "" {
			how += " -o " + values.ShellQuote("X-mount.idmap="+s.Idmap)
		}
		script += fmt.Sprintf("if [ -d %[1]s ]; then mkdir \"$stage/%[2]d\"; else : >\"$stage/%[2]d\"; fi\nmount %[3]s %[1]s \"$stage/%[2]d\"\n", values.ShellQuote(s.Source), i, how)
	}
	script += "mount --move \"$stage\" " + path.Clean(proc.StageDir) + "\nexec " + line + "\n"
	return comment + "unshare --mount --propagation slave bash -c " + values.ShellQuote(script)
}
