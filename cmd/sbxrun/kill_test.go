package main

import (
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestListSurvivors(t *testing.T) {
	one, two := result.Survivor{PID: 7, State: "D", Comm: "a\nb"}, result.Survivor{PID: 8, State: "S", Comm: "c"}
	for want, left := range map[string][]result.Survivor{
		"":                                   nil,
		", 1 process is left\n  7 D a\\x0ab": {one},
		", 2 processes are left\n  7 D a\\x0ab\n  8 S c": {one, two},
	} {
		check.Equal(t, listSurvivors(left), want)
	}
}
