package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/images"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/registry"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// pullImage needs no handling of signals: the store has the old image or the new one, whenever the process ends.
func pullImage(store *snapshots.Store, flags *cli.ImagePull) (r output.Result, err error) {
	name, err := registry.Name(flags.Reference)
	if err != nil {
		return r, err
	}
	if flags.Name == "" && snapshots.ParseImageName(name) != nil {
		return r, &result.Error{Code: "usage", Message: fmt.Sprintf("%.160q cannot be the name of an image", name), Hint: "choose one with --name"}
	}
	o, err := importOptions(&flags.Stored, cmp.Or(flags.Name, name), flags.Platform)
	if err == nil {
		err = snapshots.ParseImageName(o.Name)
	}
	if err != nil {
		return r, err
	}
	ctx := context.Background()
	src, err := registry.Open(ctx, flags.Reference, registry.Options{AuthFile: flags.Authfile})
	if err != nil {
		return r, err
	}
	o.Digest = src.Digest
	if term.IsTerminal(unix.Stderr) && os.Getenv("TERM") != "dumb" {
		p := progress{name: o.Name}
		o.Progress = p.show
		defer p.clear()
	}
	m, err := images.Import(ctx, store, src, o)
	if err != nil {
		return r, err
	}
	return output.Line(shownImage(m), m.Digest), nil
}

// progress is a line on a terminal.
type progress struct {
	name string
	next time.Time
}

const clearLine = "\r\x1b[K"

func (p *progress) show(now images.Progress) {
	const pause = 100 * time.Millisecond
	if time.Now().Before(p.next) {
		return
	}
	p.next = time.Now().Add(pause)
	line := fmt.Sprintf("%s: layer %d of %d, %s of %s", p.name, now.Layer, now.Layers, output.Size(now.Bytes), output.Size(now.Size))
	if width, _, err := term.GetSize(unix.Stderr); err == nil && 0 < width && width <= len(line) {
		line = line[:width-1]
	}
	fmt.Fprint(os.Stderr, clearLine+line)
}

func (p *progress) clear() {
	if !p.next.IsZero() {
		fmt.Fprint(os.Stderr, clearLine)
	}
}
