package sandbox

import (
	"errors"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/snapshots"
)

// The hint quotes the flag, because users paste it and its paths come from the archive.
func TestFromImportedQuotes(t *testing.T) {
	m := &snapshots.Manifest{ID: "0123456789abcdef", Imported: true, Trees: []snapshots.Tree{{Source: "/a$(id)", Dest: "/b`id`"}}}
	var e *result.Error
	if err := new(Parts).From(t.Context(), nil, m, &room.Policy{}, room.Caller{}, ""); !errors.As(err, &e) || !strings.Contains(e.Hint, "--overlay '/a$(id):/b`id`', ") {
		t.Errorf("%v, hint %q", err, e.Hint)
	}
}
