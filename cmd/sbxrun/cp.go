package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/files"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

func cpCommand(flags *cli.Cp) (r output.Result, err error) {
	c := copying{flags: flags}
	if err := c.divide(flags.Paths); err != nil {
		return r, cli.UsageError(flags, err)
	}
	if err := c.run(); err != nil {
		return r, err
	}
	return c.result()
}

type copying struct {
	flags   *cli.Cp
	sandbox string
	sources []string
	dest    string
	out     bool // from the sandbox to the host
	done    workspace.Transfer
}

const streamWord = "-"

// divide splits the words into sources and a destination, and finds the sandbox.
func (c *copying) divide(words []string) error {
	if len(words) < 2 {
		return fmt.Errorf("cp takes a source and a destination, got %d", len(words))
	}
	last := len(words) - 1
	for i, word := range words {
		name, inside, ok := cutSandbox(word)
		switch {
		case ok && i < last && (i == 0 || c.out && name == c.sandbox):
			c.sandbox, c.out, word = name, true, inside
		case ok && i == last && !c.out:
			c.sandbox, word = name, inside
		case ok && i == last:
			return errors.New("cp cannot copy between sandboxes; copy to the host first")
		case ok || c.out && i < last:
			return errors.New("all sources must be on the host or in the same sandbox")
		}
		if i < last {
			c.sources = append(c.sources, word)
		} else {
			c.dest = word
		}
	}
	switch {
	case c.sandbox == "":
		return &result.Error{Code: "usage", Message: "cp: none of the paths is in a sandbox (NAME:PATH)",
			Hint: "sbxrun -- cp " + strings.Join(words, " ") + " runs cp(1) in a sandbox"}
	case c.out && c.flags.FollowLinks:
		return errors.New("cp --follow-links: only for sources on the host; paths in a sandbox are resolved there")
	case len(c.sources) > 1 && (c.out && c.dest == streamWord || !c.out && c.sources[0] == streamWord):
		return errors.New("cp: a tar stream (-) has one source")
	}
	return nil
}

// cutSandbox splits SANDBOX:PATH. A word with / before its first colon, or with . at its beginning, is a path on the
// host, because no sandbox has such a name.
func cutSandbox(word string) (name, inside string, ok bool) {
	name, inside, ok = strings.Cut(word, ":")
	if !ok || name == "" || strings.Contains(name, "/") || name[0] == '.' {
		return "", word, false
	}
	return name, inside, true
}

func (c *copying) run() error {
	use, err := sandbox.Enter(c.sandbox)
	if err != nil {
		return output.Advise(err, "ended", "copy files while it runs, or with run --get")
	}
	defer use.Close()
	box, err := use.Root()
	if err != nil {
		return err
	}
	defer box.Close()
	inside := func(name string) string { return files.Within(use.Access.Dir, name) }
	c.done.Max.Bytes = int64(c.flags.MaxSize)
	finish := c.showProgress()
	if c.out {
		err = c.copy(box, inside, workspace.Outside(safeopen.For), func(name string) string { return name })
	} else {
		err = c.copy(workspace.Outside(safeopen.Source(c.flags.FollowLinks)), func(name string) string { return name }, box, inside)
	}
	finish()
	if err != nil && use.Room.Exited() {
		return sandbox.ErrEnded
	}
	if !c.out && errors.Is(err, unix.EROFS) {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("cannot write %q in the sandbox %s: %v", inside(c.dest), c.sandbox, unix.EROFS), Err: err,
			Hint: fmt.Sprintf("choose a writable directory, such as %s:/tmp", c.sandbox)}
	}
	return output.Advise(err, "too-large", "raise --max-size")
}

func (c *copying) copy(from *workspace.Root, fromPath func(string) string, to *workspace.Root, toPath func(string) string) error {
	if !c.out && c.sources[0] == streamWord {
		return c.unpack(to, toPath(c.dest))
	}
	for _, name := range c.sources {
		source, err := from.Source(fromPath(name))
		if err != nil {
			return c.missing(err, c.out)
		}
		err = c.one(source, to, toPath(c.dest))
		source.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// missing adds the side, host or sandbox, to the error for a missing file.
func (c *copying) missing(err error, inside bool) error {
	var e *result.Error
	if !errors.As(err, &e) || e.Code != "no-such-file" {
		return err
	}
	sided := *e
	if sided.Message = "cp: " + e.Message + " on the host"; inside {
		sided.Message = "cp: " + e.Message + " in the sandbox " + c.sandbox
	}
	return &sided
}

func (c *copying) one(source *workspace.Source, to *workspace.Root, dest string) error {
	if c.out && c.dest == streamWord {
		if term.IsTerminal(int(os.Stdout.Fd())) {
			return &result.Error{Code: "usage", Message: "cp: a tar stream would go to the terminal", Hint: "write it to a file or a pipe"}
		}
		return c.done.Archive(source, output.Stdout, source.Base())
	}
	if source.IsDir() && !c.flags.Recursive {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("cp: %q is a directory", source.Name), Hint: "-r copies it with its contents"}
	}
	dir, name, err := to.Target(dest, source, len(c.sources) > 1)
	if err != nil {
		err = c.missing(err, !c.out)
		if e := (*result.Error)(nil); c.out && errors.As(err, &e) && e.Code == "no-such-file" {
			e.Hint = "create it with mkdir -p"
		}
		return err
	}
	defer dir.Close()
	return c.done.Copy(context.Background(), source, dir, name)
}

func (c *copying) unpack(to *workspace.Root, dest string) error {
	if term.IsTerminal(int(os.Stdin.Fd())) {
		return &result.Error{Code: "usage", Message: "cp: a tar stream would come from the terminal", Hint: "pipe one in: tar c DIR | sbxrun cp - NAME:DST"}
	}
	dir, err := to.Dir(dest)
	if err != nil {
		return c.missing(err, true)
	}
	defer dir.Close()
	return c.done.Unpack(os.Stdin, dir)
}

func (c *copying) showProgress() (finish func()) {
	if c.flags.Quiet || c.flags.JSON || !term.IsTerminal(int(os.Stderr.Fd())) {
		return func() {}
	}
	const patience, pace = 500 * time.Millisecond, 200 * time.Millisecond
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		begin := time.Now()
		for next := patience; ; next = pace {
			select {
			case <-stop:
				if time.Since(begin) > patience {
					fmt.Fprint(os.Stderr, "\r\x1b[K")
				}
				return
			case <-time.After(next):
				bytes, entries := c.done.Done()
				rate := float64(bytes) / time.Since(begin).Seconds()
				fmt.Fprintf(os.Stderr, "\r\x1b[K%d copied, %s, %s/s", entries, output.Size(bytes), output.Size(int64(rate)))
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// result warns about entries that were left out, and returns an error if some could not be read.
func (c *copying) result() (output.Result, error) {
	left := c.done.LeftOut
	bytes, entries := c.done.Done()
	v := copied{Entries: entries - int64(left.Count()), Bytes: bytes, Links: c.done.Links, LeftOut: left.Count()}
	var failed error
	if left.Denied.Count > 0 {
		failed = &result.Error{Code: leftOut, Message: "cp: " + unread(left.Denied).Error(), Err: left.Denied.First}
	} else if left.Special.Count > 0 && v.Entries == 0 {
		failed = &result.Error{Code: leftOut, Message: "cp: " + special(left.Special).Error(), Err: left.Special.First}
	}
	if failed != nil {
		v.ExitCode, v.Error = output.Code(failed), output.Error(failed).Report()
	} else if left.Special.Count > 0 && !c.flags.Quiet {
		warn(fmt.Errorf("cp: %w", special(left.Special)))
	}
	if out := c.done.Outside; c.out && out.Count > 0 && !c.flags.Quiet {
		warn(fmt.Errorf("cp: %w", outside(out)))
	}
	return output.Result{Value: v}, failed
}

// unread returns the error about entries that could not be read.
func unread(left workspace.Left) error {
	return first(left, "entry cannot be read", "entries cannot be read")
}

// special returns the warning about devices, FIFOs and sockets, which are not copied.
func special(left workspace.Left) error {
	return first(left, "entry is left out", "entries are left out")
}

// outside returns the warning about copied links that lead elsewhere.
func outside(left workspace.Left) error {
	return first(left,
		"symbolic link was copied that leads elsewhere", "symbolic links were copied that lead elsewhere")
}

// first describes a number of entries and the error of the first one.
func first(left workspace.Left, one, several string) error {
	if left.Count == 1 {
		return fmt.Errorf("1 %s: %v", one, left.First)
	}
	return fmt.Errorf("%d %s; the first: %v", left.Count, several, left.First)
}

// copied is what cp --json prints.
type copied struct {
	ExitCode int                 `json:"exit_code"`
	Entries  int64               `json:"entries"`
	Bytes    int64               `json:"bytes"`
	Links    int                 `json:"links"`
	LeftOut  int                 `json:"left_out"`
	Error    *result.ReportError `json:"error,omitempty"`
}
