package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/output"
)

// Control sequences of ECMA-48, and xterm's 1049 for an alternate screen.
const (
	enterScreen = "\x1b[?1049h\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?1049l"
	toTop       = "\x1b[H"
	clearLine   = "\x1b[K"
	clearRest   = "\x1b[J"
)

// watchOnScreen shows the statistics until a signal arrives, and restores the terminal.
func watchOnScreen(out int, interval time.Duration, look func() (statistics, error)) (output.Result, error) {
	got := make(chan os.Signal, 4)
	notify(got, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGWINCH, syscall.SIGTSTP)
	put := func(text string) { _, _ = os.Stdout.WriteString(text) } // a lost terminal sends SIGHUP
	put(enterScreen)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	s, err := look()
	for err == nil {
		columns, rows, sizeErr := term.GetSize(out)
		if sizeErr != nil || columns <= 0 || rows <= 0 {
			columns, rows = 80, 24
		}
		put(frame(s, columns, rows))
		select {
		case <-tick.C:
			s, err = look()
		case sig := <-got:
			switch sig {
			case syscall.SIGWINCH: // redraw
			case syscall.SIGTSTP:
				if orphaned() {
					continue
				}
				put(leaveScreen)
				stopSelf()
				put(enterScreen)
			default:
				put(leaveScreen)
				return output.Result{Code: 128 + int(sig.(syscall.Signal))}, nil
			}
		}
	}
	put(leaveScreen)
	return output.Result{}, err
}

// frame returns a screen as one text. It overwrites each line and clears only the rest of it, which avoids flicker.
func frame(s statistics, columns, rows int) string {
	lines := append([]string{"sbxrun stats  " + s.At, ""}, statisticsLines(s)...)
	if len(lines) > rows {
		left := len(lines) - rows + 1
		lines = append(lines[:rows-1], fmt.Sprintf("… %d more", left))
	}
	var b strings.Builder
	b.WriteString(toTop)
	for i, line := range lines {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if r := []rune(line); len(r) > columns {
			line = string(r[:columns])
		}
		b.WriteString(clearLine + coloured(line))
	}
	b.WriteString(clearRest)
	return b.String()
}

func coloured(line string) string {
	const yellow, red, plain = "\x1b[33m", "\x1b[31m", "\x1b[0m"
	for level, colour := range map[admission.Level]string{admission.Warn: yellow, admission.Alert: red} {
		if rest, ok := strings.CutPrefix(line, string(level)+" "); ok {
			return colour + string(level) + plain + " " + rest
		}
	}
	return line
}
