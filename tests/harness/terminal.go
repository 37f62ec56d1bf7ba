package harness

import (
	"io"
	"strings"

	"github.com/creack/pty"
)

// Said returns what a command, which start starts with the options that it is given or with their
// Stderr, has written to a terminal that is its stderr.
func Said(t T, start func(Options) *Process) (r *Result, text string) {
	t.Helper()
	ptmx, tty, err := pty.Open()
	Must(t, err)
	defer ptmx.Close()
	read := make(chan string)
	go func() {
		text, _ := io.ReadAll(ptmx) // EIO: nobody has the terminal any more
		read <- string(text)
	}()
	r = start(Options{Bare: true, Stderr: tty}).Wait()
	tty.Close()
	return r, strings.ReplaceAll(<-read, "\r\n", "\n")
}

// Ours are the lines of a text that are sbxrun's own, behind the colours that others have left.
func Ours(text string) (lines []string) {
	for line := range strings.Lines(text) {
		if _, line, ok := strings.Cut(strings.TrimSpace(line), "sbxrun: "); ok {
			lines = append(lines, line)
		}
	}
	return lines
}
