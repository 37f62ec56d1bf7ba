package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/sbxrun/sbxrun/internal/proc"
)

// source is where a payload would write, and where we read.
type source struct {
	name string
	open func(*testing.T) (r, w *os.File)
	most int // bytes that it holds for its reader
}

func sources() []source {
	return []source{
		{"pipe", func(t *testing.T) (r, w *os.File) {
			r, w, err := pipe()
			if err != nil {
				t.Fatal(err)
			}
			return r, w
		}, 64 << 10},
		{"large pipe", func(t *testing.T) (r, w *os.File) {
			r, w, err := pipe()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, 1<<20); err != nil {
				t.Fatal(err)
			}
			return r, w
		}, 1 << 20},
		{"terminal", func(t *testing.T) (r, w *os.File) {
			r, w, err := pty.Open()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := term.MakeRaw(int(w.Fd())); err != nil {
				t.Fatal(err)
			}
			if err := unix.SetNonblock(proc.Descriptor(r), true); err != nil { // as openTerminal does
				t.Fatal(err)
			}
			return r, w
		}, 8 << 10},
	}
}

// Somebody else has the write end open and does nothing: what was written before is
// complete, and there at once.
func TestRelayHeldOpen(t *testing.T) {
	for _, s := range sources() {
		t.Run(s.name, func(t *testing.T) {
			for range 50 {
				r, w := s.open(t)
				var got bytes.Buffer
				var relay relays
				relay.add(r, func(b []byte) { got.Write(b) })
				want := strings.Repeat("0123456789abcdef", s.most/16)
				if _, err := w.WriteString(want); err != nil {
					t.Fatal(err)
				}
				begin := time.Now()
				if !relay.finish(nil) {
					t.Error("not complete")
				}
				if took := time.Since(begin); took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
				if got.String() != want {
					t.Errorf("%d bytes of %d", got.Len(), len(want))
				}
				r.Close()
				w.Close()
			}
		})
	}
}
