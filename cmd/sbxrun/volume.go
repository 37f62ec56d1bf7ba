package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup"
	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/volumes"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

func parseVolumes(args []string) (list []sandbox.Volume, err error) {
	for _, arg := range args {
		name, dest, readOnly, err := room.ParseVolume(arg)
		if err == nil {
			err = volumes.CheckName(name)
		}
		if err != nil {
			return nil, err
		}
		list = append(list, sandbox.Volume{Name: name, Dest: dest, ReadOnly: readOnly})
	}
	return list, nil
}

// useVolumes adds the volumes of --volume to a sandbox. With create it creates missing ones.
func useVolumes(parts *sandbox.Parts, p *room.Policy, args []string, create bool) error {
	list, err := parseVolumes(args)
	if err != nil || len(list) == 0 {
		return err
	}
	store, err := volumes.Open(create)
	if err != nil {
		return err
	}
	defer store.Close()
	return whoUses(parts.Use(store, list, p))
}

// whoUses adds the users of a volume to the error for a volume in use.
func whoUses(err error) error {
	busy := (*volumes.BusyError)(nil)
	if !errors.As(err, &busy) {
		return err
	}
	message := busy.Error()
	if who := users(busy.PIDs, sandboxesOf(busy.PIDs)); who != "" {
		message += " by " + who
	}
	return &result.Error{Code: "volume-busy", ExitCode: result.ExitInUse, Message: message, Hint: "only one sandbox can write to a volume; use NAME:DST:ro to share it read-only", Err: err}
}

func sandboxesOf(pids []int) []*state.Entry {
	if len(pids) == 0 {
		return nil
	}
	entries, _, _ := list("") // without names, users prints PIDs
	return entries
}

// users lists processes, by their sandboxes if they are supervisors.
func users(pids []int, entries []*state.Entry) string {
	var names []string
	for _, pid := range pids {
		name := fmt.Sprintf("process %d", pid)
		for _, e := range entries {
			if e.Lives() && e.Record.Supervisor.PID == pid {
				name = "the sandbox " + e.Title()
			}
		}
		names = append(names, name)
	}
	return strings.Join(names, " and ")
}

// onVolumes returns a command that works on the caller's volumes.
func onVolumes[F any](work func(*volumes.Store, *F) (output.Result, error)) func(*F) (output.Result, error) {
	return func(flags *F) (r output.Result, err error) {
		store, err := volumes.Open(false)
		if err != nil {
			return r, err
		}
		defer store.Close()
		return work(store, flags)
	}
}

func listVolumes(store *volumes.Store, _ *cli.VolumeLs) (r output.Result, err error) {
	all, err := store.List()
	if err != nil {
		return r, err
	}
	return output.Result{Value: append([]volumes.Info{}, all...), Text: func(w io.Writer) error {
		var pids []int
		for _, v := range all {
			pids = append(pids, v.PIDs...)
		}
		entries := sandboxesOf(pids)
		t := output.NewTable(w, "NAME", "STATUS", "MODIFIED", "PATH")
		for _, v := range all {
			status := v.Status
			if who := users(v.PIDs, entries); who != "" {
				status += " by " + who
			}
			t.Row(v.Name, status, v.ModTime.Format(time.DateTime), v.Path)
		}
		return t.Flush()
	}}, nil
}

// removeVolumes removes as many of the volumes as it can.
func removeVolumes(store *volumes.Store, flags *cli.VolumeRm) (r output.Result, err error) {
	return r, output.Each(flags.Names, func(name string) error { return whoUses(store.Remove(name)) })
}

func exportVolume(store *volumes.Store, flags *cli.VolumeExport) (r output.Result, err error) {
	v, err := store.Lock(flags.Name)
	if err != nil {
		return r, whoUses(err)
	}
	defer v.Close()
	var packed error
	err = output.Export(flags.File, func(w io.Writer) error {
		packed = pack(v, w)
		// The archive has the other files.
		if output.Is(packed, leftOut) {
			return nil
		}
		return packed
	})
	return r, cmp.Or(err, packed)
}

// leftOut is the code of an error after which the rest was copied.
const leftOut = "left-out"

func pack(v *volumes.Volume, w io.Writer) error {
	fd, err := v.Data()
	if err != nil {
		return err
	}
	source, err := workspace.Outside(func(string, int) (int, error) { return fd, nil }).Source(".")
	if err != nil {
		return err
	}
	defer source.Close()
	var t workspace.Transfer
	if err := t.Archive(source, w, "."); err != nil {
		return err
	}
	if t.LeftOut.Denied.Count > 0 {
		return &result.Error{Code: leftOut, Message: unread(t.LeftOut.Denied).Error()}
	}
	if t.LeftOut.Special.Count > 0 {
		warn(special(t.LeftOut.Special))
	}
	return nil
}

// sweepVolumes removes parts of volumes that crashes have left.
func sweepVolumes(dryRun bool) (found []cleanup.Finding) {
	store, err := volumes.Open(false)
	if err != nil {
		return nil // the commands for volumes report it
	}
	defer store.Close()
	left, _ := store.Leftovers()
	for _, name := range left {
		f := cleanup.Finding{Kind: "volume", Name: name, What: "incomplete volume from a crash during its creation or removal"}
		if !dryRun {
			if err := store.Discard(name); err != nil && !errors.Is(err, unix.ENOENT) {
				f.Err = err.Error()
			}
			f.Done = f.Err == ""
		}
		found = append(found, f)
	}
	return found
}
