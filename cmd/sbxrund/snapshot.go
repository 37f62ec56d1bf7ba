package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/layers"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/tree"
)

// snapshotCommand runs the commands of snapshot, which sbxrun executes here so that a run links
// nothing of archives and compression.
func snapshotCommand(args []string) int {
	if len(args) > 0 {
		switch args[0] {
		case "create":
			return onSnapshots(args[1:], snapshots.Open, createSnapshot)
		case "ls":
			return onSnapshots(args[1:], snapshots.Look, listSnapshots)
		case "rm":
			return onSnapshots(args[1:], snapshots.Open, removeSnapshots)
		case "export":
			return onSnapshots(args[1:], snapshots.Open, exportSnapshot)
		case "import":
			return onSnapshots(args[1:], snapshots.Open, importSnapshot)
		}
	}
	return fail(errors.New("snapshot: want create, ls, rm, export or import"))
}

// onSnapshots runs a command with its flags on the caller's snapshots.
func onSnapshots[F any](args []string, open func(string) (*snapshots.Store, error), work func(*snapshots.Store, *F) error) int {
	flags := new(F)
	if code, done := parse(flags, args); done {
		return code
	}
	dir, err := snapshots.Dir()
	if err != nil {
		return refuse(flags, err)
	}
	store, err := open(dir)
	if err != nil {
		return refuse(flags, err)
	}
	defer store.Close()
	return outcome(flags, work(store, flags))
}

// removeSnapshots removes as many of the snapshots as it can.
func removeSnapshots(store *snapshots.Store, flags *cli.SnapshotRm) error {
	var failed []error
	for _, name := range flags.Snapshots {
		if err := store.Discard(name); err != nil {
			failed = append(failed, err)
		}
	}
	return last(failed)
}

// last prints all errors but the last, and returns that.
func last(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	for _, err := range errs[:len(errs)-1] {
		fail(err)
	}
	return errs[len(errs)-1]
}

func exportSnapshot(store *snapshots.Store, flags *cli.SnapshotExport) error {
	m, err := store.Find(flags.Snapshot)
	if err != nil {
		return err
	}
	if flags.File != "" && flags.File != "-" {
		return tree.WriteNew(flags.File, func(f *os.File) error { return layers.Export(store, m, f) })
	}
	if term.IsTerminal(unix.Stdout) {
		return &result.Error{Code: "usage", Message: "snapshot export: stdout is a terminal", Hint: "name a file, or send it to another program"}
	}
	return layers.Export(store, m, os.Stdout)
}

func importSnapshot(store *snapshots.Store, flags *cli.SnapshotImport) error {
	var from io.Reader = os.Stdin
	if flags.File != "" && flags.File != "-" {
		f, err := os.Open(flags.File)
		if err != nil {
			return err
		}
		defer f.Close()
		from = f
	}
	m, err := layers.Import(store, from, string(flags.Name), time.Duration(flags.TTL), int64(flags.MaxSize))
	if err != nil {
		return err
	}
	return printSnapshot(m, flags.JSON)
}

// printSnapshot prints the id, one word for a shell's $(…), or all there is to know.
func printSnapshot(m *snapshots.Manifest, asJSON bool) error {
	if asJSON {
		return printJSON(m)
	}
	_, err := fmt.Println(m.ID)
	return err
}

func printJSON(v any) error {
	b, err := result.JSON(v)
	if err == nil {
		_, err = os.Stdout.Write(b)
	}
	return err
}

func listSnapshots(store *snapshots.Store, flags *cli.SnapshotLs) error {
	list, wrong := store.List()
	var err error
	switch {
	case flags.JSON:
		err = printJSON(append([]*snapshots.Manifest{}, list...))
	case flags.Quiet:
		for _, m := range list {
			if _, err = fmt.Println(m.ID); err != nil {
				break
			}
		}
	default:
		err = printTable(list)
	}
	return cmp.Or(err, last(wrong))
}

func printTable(list []*snapshots.Manifest) error {
	if len(list) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NAME\tID\tCREATED\tLAYERS\tSIZE\tEXPIRES")
	for _, m := range list {
		n := 0
		for _, t := range m.Trees {
			n += len(t.Layers)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%s\t%s\n", cmp.Or(m.Name, "-"), m.ID, moment(m.CreatedAt), n, sized(m.Size()), cmp.Or(moment(m.ExpiresAt), "never"))
	}
	return w.Flush()
}

// moment is a time of a manifest, in seconds.
func moment(at string) string {
	t, err := time.Parse(result.TimeFormat, at)
	if err != nil {
		return ""
	}
	return t.Format(time.DateTime) + "Z"
}

// sized is a size for people.
func sized(n int64) string {
	for _, unit := range []string{"", "K", "M", "G"} {
		if n < 10_000 || unit == "G" {
			return fmt.Sprintf("%d%s", n, unit)
		}
		n = (n + 512) / 1024
	}
	return ""
}
