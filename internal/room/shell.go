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
	options, copies, texts := p.plain()
	words = append(words, options...)
	words = append(words, "--")
	words = append(words, p.command...)
	for i, w := range words {
		words[i] = shellQuote(w)
	}
	line := strings.Join(words, " ")
	// bwrap's copies come from descriptors.
	heredocs := ""
	for i, text := range texts {
		fd := firstCopy + i
		if text == "" {
			line += fmt.Sprintf(" %d<%s", fd, shellQuote(copies[i].Name()))
			continue
		}
		if strings.IndexByte(text, 0) >= 0 {
			line += fmt.Sprintf(" %d< <(printf %s)", fd, octal(text))
			continue
		}
		end := fmt.Sprintf("END%d", fd)
		line += fmt.Sprintf(" %d<<'%s'", fd, end)
		heredocs += "\n" + text + end
	}
	line += heredocs
	if len(p.staged) == 0 {
		return line
	}
	// What the keeper does as root before it takes on the unprivileged uid.
	script := "set -e\nstage=$(mktemp -d)\nmount -t tmpfs -o nosuid,nodev,noexec,mode=0755 sbxrun \"$stage\"\n"
	for i, s := range p.staged {
		how := "--rbind"
		if s.owner != nil {
			how += " -o " + shellQuote(p.idmapOption(s.owner))
		}
		script += fmt.Sprintf("if [ -d %[1]s ]; then mkdir \"$stage/%[2]d\"; else : >\"$stage/%[2]d\"; fi\nmount %[3]s %[1]s \"$stage/%[2]d\"\n", shellQuote(s.Name()), i, how)
	}
	script += "mount --move \"$stage\" " + path.Clean(proc.StageDir) + "\nexec " + line + "\n"
	return "unshare --mount --propagation slave bash -c " + shellQuote(script)
}

// plain are the options of a bwrap that runs the payload itself, what it copies in, and
// the texts of what was made here.
func (p *Plan) plain() (options []string, copies []*os.File, texts []string) {
	options, copies, texts = append(slices.Clone(p.options), "--new-session", "--chdir", p.Workdir), p.copies, p.texts
	if program := p.filter.Program(); len(program) > 0 {
		options = append(options, "--seccomp", strconv.Itoa(firstCopy+len(copies)))
		text := unsafe.Slice((*byte)(unsafe.Pointer(&program[0])), len(program)*unix.SizeofSockFilter)
		texts = append(slices.Clone(texts), string(text))
	}
	for _, v := range p.env {
		options = append(options, "--setenv", v.Name, v.Value)
	}
	return options, copies, texts
}

// octal is what printf(1) makes bytes of that are no text.
func octal(data string) string {
	var b strings.Builder
	b.WriteByte('\'')
	for i := range len(data) {
		fmt.Fprintf(&b, `\%03o`, data[i])
	}
	b.WriteByte('\'')
	return b.String()
}

// Cmd is the same as ShellCommand, to be started without a shell: what a run is
// compared with. Its files are the plan's and can be read once. It cannot stand
// for a plan that stages sources.
func (p *Plan) Cmd() (*exec.Cmd, error) {
	if len(p.staged) > 0 {
		return nil, errors.New("a plan with sources that only root can reach has no plain command")
	}
	options, copies, texts := p.plain()
	for _, text := range texts[len(copies):] {
		f, err := memory("seccomp", []byte(text))
		if err != nil {
			return nil, err
		}
		copies = append(slices.Clone(copies), f)
	}
	cmd := exec.Command(p.Program.Path, append(append(options, "--"), p.command...)...)
	cmd.Env = []string{}
	// The numbers below firstCopy are Start's.
	cmd.ExtraFiles = append(make([]*os.File, firstCopy-argsFD), copies...)
	if p.cred != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: p.cred.UID, Gid: p.cred.GID}}
	}
	return cmd, nil
}

// shellQuote is the word as sh(1) reads it back.
func shellQuote(s string) string {
	const safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-"
	if s != "" && strings.Trim(s, safe) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
