package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/doctor"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/room"
)

func doctorCommand(flags *cli.Doctor) (r output.Result, err error) {
	if flags.Script {
		return enableScript(flags)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	rep := doctor.Examine(ctx, room.ThisCaller())
	r = output.Result{Value: rep, Text: func(w io.Writer) error { return printFindings(w, rep) }}
	if !rep.OK {
		r.Code = result.ExitNotStarted
	}
	return r, nil
}

func enableScript(flags *cli.Doctor) (r output.Result, err error) {
	uid, pid := os.Geteuid(), os.Getppid()
	if flags.PID != 0 {
		var st unix.Stat_t
		if err := unix.Stat(fmt.Sprintf("/proc/%d", flags.PID), &st); err != nil {
			return r, cli.UsageError(flags, fmt.Errorf("--pid: no process %d", flags.PID))
		}
		uid, pid = int(st.Uid), int(flags.PID)
	}
	return output.Line(nil, strings.TrimSuffix(limits.EnableScript(cmp.Or(int(flags.UID), uid), pid), "\n")), nil
}

// printFindings prints a line for each check, with its fix below, and the conclusion.
func printFindings(w io.Writer, rep doctor.Report) error {
	name := 0
	for _, f := range rep.Checks {
		name = max(name, len(f.Name))
	}
	var text strings.Builder
	for _, f := range rep.Checks {
		said := f.Cause
		if f.Verdict == doctor.OK {
			said = f.Detail
		}
		fmt.Fprintf(&text, "%-8s %-*s  %s\n", f.Verdict, name, f.Name, said)
		if f.Verdict != doctor.OK && f.Detail != "" && !strings.Contains(f.Cause, f.Detail) {
			fmt.Fprintf(&text, "%-8s   seen: %s\n", "", f.Detail)
		}
		for i, fix := range strings.Split(f.Fix, "\n") {
			label := "fix:"
			if i > 0 {
				label = "    "
			}
			if fix != "" {
				fmt.Fprintf(&text, "%-8s   %s  %s\n", "", label, fix)
			}
		}
	}
	fmt.Fprintln(&text)
	switch bad := rep.Failed(); {
	case rep.OK && rep.RoundTrip != nil:
		fmt.Fprintf(&text, "sbxrun works here: `true` took %.1f ms, from start to proven end\n", *rep.RoundTrip)
	case bad != nil:
		fmt.Fprintf(&text, "sbxrun does not work here: %s: %s\n", bad.Name, bad.Cause)
	default:
		fmt.Fprintln(&text, "interrupted before a result was known")
	}
	if rep.Start != "" {
		fmt.Fprintln(&text, "start this container like this:", strings.ReplaceAll(rep.Start, "\n", "\nor "))
	}
	_, err := io.WriteString(w, text.String())
	return err
}
