package version

import (
	"runtime/debug"
	"testing"
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
		{name: "the linker's", stamp: "v1.2.0-3-gabcdef0", info: module("v1.1.0"), want: "v1.2.0-3-gabcdef0"},
		{name: "go install", info: module("v1.2.0"), want: "v1.2.0"},
		{name: "go build in a repository", info: module("v0.0.0-20260102030405-abcdef012345+dirty"), want: "v0.0.0-20260102030405-abcdef012345+dirty"},
		{name: "go build elsewhere", info: module("(devel)"), want: "devel"},
		{name: "no main module", info: module(""), want: "devel"},
		{name: "no modules", want: "devel"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := of(tt.stamp, tt.info); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
