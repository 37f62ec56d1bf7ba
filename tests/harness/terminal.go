package harness

import (
	"io"
	"strings"

	"github.com/creack/pty"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Said runs a command with a terminal as stderr, and returns the text written to it. start
// starts the command with the given options.
func Said(t T, start func(Options) *Process) (r *Result, text string) {
	t.Helper()
	ptmx, tty, err := pty.Open()
	check.Must(t, err)
	defer ptmx.Close()
	read := make(chan string)
	go func() {
		text, _ := io.ReadAll(ptmx) // EIO: all have closed the terminal
		read <- string(text)
	}()
	r = start(Options{Bare: true, Stderr: tty}).Wait()
	tty.Close()
	return r, strings.ReplaceAll(<-read, "\r\n", "\n")
}

// Ours returns the lines that sbxrun itself has written, without colours that others have left before them.
func Ours(text string) (lines []string) {
	for line := range strings.Lines(text) {
		if _, line, ok := strings.Cut(strings.TrimSpace(line), "sbxrun: "); ok {
			lines = append(lines, line)
		}
	}
	return lines
}
