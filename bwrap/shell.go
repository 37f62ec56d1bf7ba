package bwrap

import (
	"fmt"
	"path"
	"strconv"
	"strings"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// ShellCommand is the plan as a command for bash(1), which unlike some sh(1)
// takes descriptors above 9, that does the same without sbxrun: not held, no
// deadline, nobody who waits for the end. It shows every variable of the
// environment.
func (p *Plan) ShellCommand() string {
	var words []string
	if p.cred != nil {
		words = append(words, "setpriv", "--reuid", strconv.Itoa(int(p.cred.UID)), "--regid", strconv.Itoa(int(p.cred.GID)), "--clear-groups")
	}
	words = append(words, "env", "-i", p.Program.Path)
	words = append(words, p.options...)
	words = append(words, "--")
	words = append(words, p.command...)
	for i, w := range words {
		words[i] = shellQuote(w)
	}
	line := strings.Join(words, " ")
	// bwrap's copies come from descriptors.
	heredocs := ""
	for i, f := range p.copies {
		fd := firstCopy + i
		if p.texts[i] == "" {
			line += fmt.Sprintf(" %d<%s", fd, shellQuote(f.Name()))
			continue
		}
		end := fmt.Sprintf("END%d", fd)
		line += fmt.Sprintf(" %d<<'%s'", fd, end)
		heredocs += "\n" + p.texts[i] + end
	}
	line += heredocs
	if len(p.staged) == 0 {
		return line
	}
	// What the keeper does as root before it takes on the unprivileged uid.
	script := "set -e\nstage=$(mktemp -d)\nmount -t tmpfs -o nosuid,nodev,noexec,mode=0755 sbxrun \"$stage\"\n"
	for i, f := range p.staged {
		script += fmt.Sprintf("if [ -d %[1]s ]; then mkdir \"$stage/%[2]d\"; else : >\"$stage/%[2]d\"; fi\nmount --rbind %[1]s \"$stage/%[2]d\"\n", shellQuote(f.Name()), i)
	}
	script += "mount --move \"$stage\" " + path.Clean(proc.StageDir) + "\nexec " + line + "\n"
	return "unshare --mount --propagation slave bash -c " + shellQuote(script)
}

// shellQuote is the word as sh(1) reads it back.
func shellQuote(s string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-"
	if s != "" && strings.Trim(s, safe) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
