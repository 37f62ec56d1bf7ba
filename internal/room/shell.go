package room

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/helper"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// ShellCommand returns an equivalent command for bash(1) that does not need sbxrun. It has no deadline and does not
// wait for the end of all processes. It contains every variable of the environment. The seccomp filter comes from a
// file, or from descriptor N for "&N"; for "", the command has a comment about the missing filter. The bwrap must be
// [Program.Whole]. Some sh(1) do not support the descriptors above 9 that the command uses.
func (p *Plan) ShellCommand(filter string) string {
	var words []string
	if p.cred != nil {
		words = append(words, "setpriv", "--reuid", strconv.Itoa(int(p.cred.UID)), "--regid", strconv.Itoa(int(p.cred.GID)))
		groups := p.groups()
		if len(groups) == 0 {
			words = append(words, "--clear-groups")
		} else {
			words = append(words, "--groups", strings.ReplaceAll(strings.Trim(fmt.Sprint(groups), "[]"), " ", ","))
		}
	}
	words = append(words, "env", "-i", p.Program.Path)
	options := p.plain()
	comment, program := "", p.FilterBytes()
	switch {
	case program == nil:
	case filter == "":
		comment = fmt.Sprintf("# without its seccomp filter of %d bytes, which --print-filter FILE writes\n", len(program))
	default:
		options = append(options, p.seccomp()...)
		if !strings.HasPrefix(filter, "&") {
			filter = values.ShellQuote(filter)
		}
		filter = fmt.Sprintf(" %d<%s", firstCopy+len(p.copies()), filter)
	}
	if p.Program.FollowsLinks() && slices.ContainsFunc(p.ops, func(o op) bool { return o.base != "" }) {
		comment += "# bubblewrap before 0.12.0 follows links on the way to mount points in directories of the host (CVE-2026-87766)\n"
	}
	words = append(words, options...)
	words = append(words, "--")
	words = append(words, p.command...)
	for i, w := range words {
		words[i] = values.ShellQuote(w)
	}
	line := strings.Join(words, " ")
	// bwrap's copies come from descriptors.
	heredocs := ""
	for i, o := range p.copies() {
		fd := firstCopy + i
		if o.src != "" {
			line += fmt.Sprintf(" %d<%s", fd, values.ShellQuote(o.src))
			continue
		}
		end := fmt.Sprintf("END%d", fd)
		line += fmt.Sprintf(" %d<<'%s'", fd, end)
		heredocs += "\n" + string(o.data) + end
	}
	line += filter + heredocs
	staged := p.staged()
	if len(staged) == 0 {
		return comment + line
	}
	// The keeper does the same before it drops root's privileges.
	script := "set -e\nstage=$(mktemp -d)\nmount -t tmpfs -o nosuid,nodev,noexec,mode=0755 sbxrun \"$stage\"\n"
	for i, o := range staged {
		how := "--rbind"
		if o.owner != nil {
			how += " -o " + values.ShellQuote(p.idmapOption(o.owner))
		}
		script += fmt.Sprintf("if [ -d %[1]s ]; then mkdir \"$stage/%[2]d\"; else : >\"$stage/%[2]d\"; fi\nmount %[3]s %[1]s \"$stage/%[2]d\"\n", values.ShellQuote(o.src), i, how)
	}
	script += "mount --move \"$stage\" " + path.Clean(proc.StageDir) + "\nexec " + line + "\n"
	return comment + "unshare --mount --propagation slave bash -c " + values.ShellQuote(script)
}

// plain returns the options for a bwrap that runs the payload itself, without the filter.
func (p *Plan) plain() []string {
	options := append(p.options(true), "--new-session", "--chdir", p.Workdir)
	for _, v := range p.env {
		options = append(options, "--setenv", v.Name, v.Value)
	}
	return options
}

// seccomp returns the option for the filter. Its descriptor number follows those of the copies.
func (p *Plan) seccomp() []string {
	return []string{"--seccomp", strconv.Itoa(firstCopy + len(p.copies()))}
}

// FilterBytes returns the seccomp filter in bwrap's format; nil if the plan has no filter.
func (p *Plan) FilterBytes() []byte {
	program := p.filter.Program()
	if len(program) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&program[0])), len(program)*unix.SizeofSockFilter)
}

// Cmd is ShellCommand without a shell, for benchmarks. Its files can be read once. It fails for
// a plan that stages sources.
func (p *Plan) Cmd() (*exec.Cmd, error) {
	if len(p.staged()) > 0 {
		return nil, errors.New("a plan with sources that only root can reach has no plain command")
	}
	options := p.plain()
	var texts []string
	for _, o := range p.copies() {
		texts = append(texts, string(o.data))
	}
	if filter := p.FilterBytes(); filter != nil {
		options, texts = append(options, p.seccomp()...), append(texts, string(filter))
	}
	files := make([]*os.File, firstCopy-argsFD) // Start uses the numbers below firstCopy
	for _, text := range texts {
		f, err := helper.TextFile("copy", text)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	cmd := exec.Command(p.Program.Path, append(append(options, "--"), p.command...)...)
	cmd.Env = []string{}
	cmd.ExtraFiles = files
	if p.cred != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.cred.UID, Gid: p.cred.GID, Groups: p.groups()}}
	}
	return cmd, nil
}

// groups returns the supplementary groups of bwrap's identity.
func (p *Plan) groups() []uint32 { return p.cred.Groups[:p.cred.Groups.Len()] }
