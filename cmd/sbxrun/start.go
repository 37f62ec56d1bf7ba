package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"time"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
)

func startCommand(args []string) int {
	flags, err := parseStart(args)
	var r output.Result
	if err == nil {
		r, err = inBackground("start", args, func(said sandbox.Handover) (output.Result, error) {
			var err error
			if flags.WaitReady {
				if err = waitReady(said.ID, time.Duration(flags.ReadyTimeout)); err != nil {
					said.Error = output.Error(err).Report()
				}
			}
			if e, err := find(said.ID); err == nil {
				said.Status = e.Status()
			}
			said.Name = cmp.Or(said.Name, said.ID)
			// The ID is one word for a shell's $(…) and, unlike a name, never reused.
			return output.Line(said, said.ID), err
		})
	}
	return cli.Finish(&flags.Start, r, err)
}

type startFlags struct {
	cli.Start
	tags  map[string]string
	probe sandbox.Probe
}

func parseStart(args []string) (f startFlags, err error) {
	if err = cli.Parse(&f.Start, args); err != nil {
		return f, err
	}
	if f.Name != "" {
		err = state.ValidName(f.Name)
	}
	if err == nil {
		f.tags, err = parseTags(f.Tag)
	}
	if err == nil {
		err = busyTerms(&f.AdmissionFlags).Check()
	}
	if err == nil {
		f.probe, err = parseProbe(&f.Start)
	}
	if err != nil {
		err = cli.UsageError(&f.Start, err)
	}
	return f, err
}

func parseProbe(f *cli.Start) (p sandbox.Probe, err error) {
	if f.ReadyTCP != "" && f.Net == "host" {
		return p, errors.New("--ready-tcp: cannot be combined with --net host, which shares the host's ports; use --ready-exec or --ready-log")
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
