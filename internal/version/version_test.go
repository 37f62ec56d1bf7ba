package version

import (
	"runtime/debug"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestOf(t *testing.T) {
	module := func(version string) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Path: "github.com/sbxrun/sbxrun", Version: version}}
	}
	for _, tt := range []struct {
		name, stamp string
		info        *debug.BuildInfo
		want        string
	}{
		{name: "a release", stamp: "v" + Number, want: Number},
		{name: "after a release", stamp: "v" + Number + "-3-gabcdef0", info: module("v1.1.0"), want: Number + "+3-gabcdef0"},
		{name: "without a release", stamp: "abcdef0-dirty", want: Number + "+abcdef0-dirty"},
		{name: "go install of a release", info: module("v" + Number), want: Number},
		{name: "go build in a repository", info: module("v0.0.0-20260102030405-abcdef012345+dirty"), want: Number + "+v0.0.0-20260102030405-abcdef012345+dirty"},
		{name: "go build elsewhere", info: module("(devel)"), want: Number},
		{name: "no main module", info: module(""), want: Number},
		{name: "no modules", want: Number},
	} {
		t.Run(tt.name, func(t *testing.T) {
			check.Equal(t, of(tt.stamp, tt.info), tt.want)
		})
	}
}
