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

// snapshotCommand keeps, copies and removes snapshots. That it is a program of its own lets a run
// load nothing of archives and compression.
func snapshotCommand(args []string) int {
	var flags cli.Snapshot
	words, code, done := parseData(&flags, args)
	if done {
		return code
	}
	if len(words) == 0 {
		return refuse(&flags, usage("snapshot takes a sandbox, or rm, export or import"))
	}
	store, err := openStore(snapshots.Open)
	if err != nil {
		return refuse(&flags, err)
	}
	defer store.Close()
	switch words[0] {
	case "rm":
		return removeSnapshots(store, words[1:])
	case "export":
		err = export(store, words[1:])
	case "import":
		err = importFrom(store, &flags, words[1:])
	default:
		if len(words) > 1 {
			return refuse(&flags, usage("snapshot takes one sandbox, got %d", len(words)))
		}
		err = takeSnapshot(store, &flags, words[0])
	}
	return outcome(&flags, err)
}

// parseData is parse, for flags that say where data is.
func parseData(flags any, args []string) (words []string, code int, done bool) {
	words, err := cli.Parse(flags, args)
	if errors.Is(err, cli.ErrHelp) {
		code, done = parse(flags, args)
		return nil, code, done
	}
	if err != nil {
		return nil, refuse(flags, &result.Error{Code: "usage", Message: err.Error(), Hint: "see " + cli.HelpLine(flags)}), true
	}
	if err := cli.Export(flags); err != nil {
		return nil, refuse(flags, err), true
	}
	return words, 0, false
}

func usage(format string, args ...any) error {
	return &result.Error{Code: "usage", Message: fmt.Sprintf(format, args...), Hint: "see sbxrun snapshot --help"}
}

func openStore(how func(string) (*snapshots.Store, error)) (*snapshots.Store, error) {
	dir, err := snapshots.Dir()
	if err != nil {
		return nil, err
	}
	return how(dir)
}

func removeSnapshots(store *snapshots.Store, names []string) int {
	if len(names) == 0 {
		return fail(usage("snapshot rm takes snapshots"))
	}
	code := 0
	for _, name := range names {
		if err := store.Discard(name); err != nil {
			code = fail(err) // the others go all the same
		}
	}
	return code
}

func export(store *snapshots.Store, words []string) error {
	if len(words) < 1 || len(words) > 2 {
		return usage("snapshot export takes a snapshot and a file")
	}
	m, err := store.Find(words[0])
	if err != nil {
		return err
	}
	if len(words) == 1 || words[1] == "-" {
		if term.IsTerminal(unix.Stdout) {
			return usage("snapshot export: stdout is a terminal; name a file, or send it to another program")
		}
		return layers.Export(store, m, os.Stdout)
	}
	return tree.WriteNew(words[1], func(f *os.File) error { return layers.Export(store, m, f) })
}

func importFrom(store *snapshots.Store, flags *cli.Snapshot, words []string) error {
	if len(words) > 1 {
		return usage("snapshot import takes one file")
	}
	var from io.Reader = os.Stdin
	if len(words) == 1 && words[0] != "-" {
		f, err := os.Open(words[0])
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

// snapshotsCommand lists snapshots.
func snapshotsCommand(args []string) int {
	var flags cli.Snapshots
	_, code, done := parseData(&flags, args)
	if done {
		return code
	}
	store, err := openStore(snapshots.Look)
	if err != nil {
		return refuse(&flags, err)
	}
	defer store.Close()
	list, wrong := store.List()
	for _, err := range wrong {
		code = fail(err)
	}
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
	if err != nil {
		return refuse(&flags, err)
	}
	return code
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
