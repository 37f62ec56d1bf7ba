package main

import (
	"errors"
	"testing"

	"github.com/sbxrun/sbxrun/internal/workspace"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestLeftOut(t *testing.T) {
	first := errors.New(`"x": permission denied`)
	for want, got := range map[string]error{
		`1 entry cannot be read: "x": permission denied`:              unread(workspace.Left{Count: 1, First: first}),
		`2 entries cannot be read; the first: "x": permission denied`: unread(workspace.Left{Count: 2, First: first}),
		`1 entry is left out: "x": permission denied`:                 special(workspace.Left{Count: 1, First: first}),
		`2 entries are left out; the first: "x": permission denied`:   special(workspace.Left{Count: 2, First: first}),
	} {
		check.That(t, got.Error() == want, "got %q, want %q", got, want)
	}
}
