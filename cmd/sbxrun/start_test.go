package main

import (
	"testing"

	"github.com/sbxrun/sbxrun/internal/detach"
)

func TestStartedLine(t *testing.T) {
	for want, said := range map[string]detach.Handover{
		"0123456789abcdef":     {ID: "0123456789abcdef"},
		"0123456789abcdef box": {ID: "0123456789abcdef", Name: "box"},
	} {
		if got := startedLine(said); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
