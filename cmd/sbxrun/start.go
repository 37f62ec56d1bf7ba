package main

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/detach"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
)

func startCommand(args []string) int {
	flags, _, err := parseStart(args)
	if err != nil {
		return failUsage(&flags.Start, err)
	}
	ready := 0
	code := inBackground("start", args, flags.JSON, func(said detach.Handover) error {
		if flags.WaitReady {
			ready, said.Error = waitReady(said.ID, time.Duration(flags.ReadyTimeout))
		}
		return printStarted(said, flags.JSON)
	})
	return max(code, ready)
}

// printStarted prints the id, one word for a shell's $(…): unlike a name it is never given again.
func printStarted(said detach.Handover, asJSON bool) error {
	if asJSON {
		if dir, err := find(said.ID); err == nil {
			said.Status = dir.Status()
		}
		if said.Name == "" {
			said.Name = said.ID
		}
		return printJSON(said)
	}
	_, err := fmt.Println(said.ID)
	return err
}

// startFlags are start's flags, checked.
type startFlags struct {
	cli.Start
	tags  map[string]string
	probe sandbox.Probe
}

func parseStart(args []string) (f startFlags, command []string, err error) {
	if err = cli.Parse(&f.Start, args); err != nil {
		return f, nil, err
	}
	if f.Name != "" {
		if err := state.ValidName(string(f.Name)); err != nil {
			return f, nil, err
		}
	}
	if f.tags, err = parseTags(f.Tag); err != nil {
		return f, nil, err
	}
	if err := busyTerms(&f.AdmissionFlags).Check(); err != nil {
		return f, nil, err
	}
	f.probe, err = parseProbe(&f.Start)
	return f, f.Command, err
}

func parseProbe(f *cli.Start) (p sandbox.Probe, err error) {
	switch {
	case f.ReadyTCP != "" && f.Net == "host":
		return p, errors.New("--ready-tcp: with --net host a port of the sandbox cannot be told from one of the host; use --ready-exec or --ready-log")
	}
	if f.ReadyTCP != "" {
		port, err := strconv.ParseUint(f.ReadyTCP, 10, 16)
		if err != nil || port == 0 {
			return p, fmt.Errorf("--ready-tcp %q: want a port from 1 to 65535", f.ReadyTCP)
		}
		p.Port = uint16(port)
	}
	if f.ReadyLog != "" {
		if p.Log, err = regexp.Compile(f.ReadyLog); err != nil {
			return p, fmt.Errorf("--ready-log: %w", err)
		}
	}
	p.Exec = f.ReadyExec
	p.Interval, p.Timeout = time.Duration(f.ReadyInterval), time.Duration(f.ReadyTimeout)
	return p, nil
}
