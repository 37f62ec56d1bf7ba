package room

import (
	"path"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestParseBind(t *testing.T) {
	type bind struct{ Source, Dest, Err string }
	tests := []struct {
		name, arg string
		want      bind
	}{
		{"source alone", "/data", bind{Source: "/data", Dest: "/data"}},
		{"source and place", "/data:/srv", bind{Source: "/data", Dest: "/srv"}},
		{"relative source", "data", bind{Source: "/work dir/data", Dest: "/work dir/data"}},
		{"the directory itself", ".:/srv", bind{Source: "/work dir", Dest: "/srv"}},
		{"above the directory", "../x", bind{Source: "/x", Dest: "/x"}},
		{"not clean", "//a/./b/../c//:/d//./e/", bind{Source: "/a/c", Dest: "/d/e"}},
		{"colon in the source", `/a\:b`, bind{Source: "/a:b", Dest: "/a:b"}},
		{"colons in both", `/a\:b:/c\:d`, bind{Source: "/a:b", Dest: "/c:d"}},
		{"backslash at the end", `/a\\:/b\\`, bind{Source: `/a\`, Dest: `/b\`}},
		{"backslash that escapes nothing", `/a\b:/c\d\`, bind{Source: `/a\b`, Dest: `/c\d\`}},
		{"leading dash", "-x:/x", bind{Source: "/work dir/-x", Dest: "/x"}},
		{"newline, quotes, not UTF-8", "/a\n'\"\xff", bind{Source: "/a\n'\"\xff", Dest: "/a\n'\"\xff"}},
		{"root as the source", "/:/host", bind{Source: "/", Dest: "/host"}},
		{"below /dev and /proc", "/x:/dev/x", bind{Source: "/x", Dest: "/dev/x"}},
		{"starts like /proc", "/x:/process", bind{Source: "/x", Dest: "/process"}},

		{"empty", "", bind{Err: `bind "": the source is empty`}},
		{"empty source", ":/x", bind{Err: `bind ":/x": the source is empty`}},
		{"empty place", "/x:", bind{Err: `bind "/x:": the path in the sandbox, "", must be absolute; write \: for a colon that belongs to a path`}},
		{"relative place", "/x:y", bind{Err: `bind "/x:y": the path in the sandbox, "y", must be absolute; write \: for a colon that belongs to a path`}},
		{"three parts", "/x:/y:ro", bind{Err: `bind "/x:/y:ro": want SRC or SRC:DST, with \: for a colon in a path`}},
		{"root", "/x:/", bind{Err: `bind "/x:/": / of the sandbox cannot be replaced`}},
		{"root by dots", "/x:/a/../..", bind{Err: `bind "/x:/a/../..": / of the sandbox cannot be replaced`}},
		{"/proc", "/x:/proc/", bind{Err: `bind "/x:/proc/": /proc of the sandbox cannot be replaced`}},
		{"/proc by dots", "/x:/tmp/../proc/.", bind{Err: `bind "/x:/tmp/../proc/.": /proc of the sandbox cannot be replaced`}},
		{"/dev", "/x://dev", bind{Err: `bind "/x://dev": /dev of the sandbox cannot be replaced`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got bind
			var err error
			if got.Source, got.Dest, err = ParseBind(tt.arg, "/work dir"); err != nil {
				got.Err = err.Error()
			}
			check.NoDiff(t, cmp.Diff(tt.want, got), "ParseBind(%q) (-want +got)", tt.arg)
		})
	}
}

func TestParseTmpfs(t *testing.T) {
	type tmpfs struct{ Dest, Size, Err string }
	tests := []struct {
		arg  string
		want tmpfs
	}{
		{"/x", tmpfs{Dest: "/x"}},
		{"/x:", tmpfs{Dest: "/x"}},
		{"/x:64M", tmpfs{Dest: "/x", Size: "64M"}},
		{"/x/../y//:lots", tmpfs{Dest: "/y", Size: "lots"}}, // the caller rejects it
		{`/a\:b:1`, tmpfs{Dest: "/a:b", Size: "1"}},
		{"", tmpfs{Err: `tmpfs "": the path in the sandbox, "", must be absolute`}},
		{":1M", tmpfs{Err: `tmpfs ":1M": the path in the sandbox, "", must be absolute`}},
		{"x", tmpfs{Err: `tmpfs "x": the path in the sandbox, "x", must be absolute`}},
		{"/x:1:2", tmpfs{Err: `tmpfs "/x:1:2": want DST or DST:SIZE, with \: for a colon in a path`}},
		{"/", tmpfs{Err: `tmpfs "/": / of the sandbox cannot be replaced`}},
		{"/proc:1M", tmpfs{Err: `tmpfs "/proc:1M": /proc of the sandbox cannot be replaced`}},
		{"/dev/.", tmpfs{Err: `tmpfs "/dev/.": /dev of the sandbox cannot be replaced`}},
	}
	for _, tt := range tests {
		var got tmpfs
		var err error
		if got.Dest, got.Size, err = ParseTmpfs(tt.arg); err != nil {
			got.Err = err.Error()
		}
		check.NoDiff(t, cmp.Diff(tt.want, got), "ParseTmpfs(%q) (-want +got)", tt.arg)
	}
}

// FuzzParseBind checks that accepted binds are absolute and clean, do not replace the sandbox's own directories, and
// survive a round trip.
func FuzzParseBind(f *testing.F) {
	for _, seed := range []string{"", "/", "a", "/a:/b", `/a\:b:/c\\`, "../..:/x/../y", "/x:/proc", ":", "a:b:c", `\`, "\xff:/\x00"} {
		f.Add(seed)
	}
	escape := strings.NewReplacer(`\`, `\\`, ":", `\:`)
	f.Fuzz(func(t *testing.T, arg string) {
		source, dest, err := ParseBind(arg, "/dir")
		if err != nil {
			check.That(t, source == "" && dest == "", "%q, %q beside the error %v", source, dest, err)
			return
		}
		for _, p := range []string{source, dest} {
			check.That(t, path.IsAbs(p) && path.Clean(p) == p, "ParseBind(%q) gave %q, which is not absolute and clean", arg, p)
		}
		check.That(t, dest != "/" && dest != "/proc" && dest != "/dev", "ParseBind(%q) replaces %s", arg, dest)
		again := escape.Replace(source) + ":" + escape.Replace(dest)
		s, d, err := ParseBind(again, "/elsewhere")
		check.That(t, err == nil && s == source && d == dest, "ParseBind(%q) = %q, %q; written out as %q it is %q, %q, %v", arg, source, dest, again, s, d, err)
	})
}

func TestPolicyValidate(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Policy)
		want   string
	}{
		{"valid", func(p *Policy) {}, ""},
		{"NUL in an argument", func(p *Policy) { p.Command = []string{"true", "a\x00b"} }, `argument "a\x00b" holds a NUL byte`},
		{"no uid", func(p *Policy) { p.User = &User{UID: 1<<32 - 1, GID: 5} }, `user 4294967295:5: 4294967295 is not a valid ID`},
		{"no gid", func(p *Policy) { p.User = &User{UID: 5, GID: 1<<32 - 1} }, `user 5:4294967295: 4294967295 is not a valid ID`},
		{"empty argument", func(p *Policy) { p.Command = []string{"", ""} }, ""}, // the lookup rejects it
		{"relative workdir", func(p *Policy) { p.Workdir = "x" }, `working directory "x": must be an absolute path in the sandbox`},
		{"same place twice", func(p *Policy) {
			p.Mounts = []Mount{{Source: "/a", Dest: "/x"}, {Source: "/b", Dest: "/x", Kind: ReadWrite}}
		},
			`"/x" is given twice as a destination in the sandbox`},
		{"same place twice, one left out if missing", func(p *Policy) { p.Mounts = []Mount{{Source: "/a", Dest: "/x", Try: true}, {Kind: Tmpfs, Dest: "/x"}} },
			`"/x" is given twice as a destination in the sandbox`},
		{"same source twice", func(p *Policy) { p.Mounts = []Mount{{Source: "/a", Dest: "/x"}, {Source: "/a", Dest: "/y"}} }, ""},
		{"NUL in a source", func(p *Policy) { p.Mounts = []Mount{{Source: "/a\x00", Dest: "/x"}} }, `path "/a\x00/x" holds a NUL byte`},
		{"NUL in a place", func(p *Policy) { p.Mounts = []Mount{{Source: "/a", Dest: "/x\x00"}} }, `path "/a/x\x00" holds a NUL byte`},
		{"longest host name", func(p *Policy) { p.Hostname = strings.Repeat("h", 64) }, ""},
		{"host name too long", func(p *Policy) { p.Hostname = strings.Repeat("h", 65) },
			`host name "` + strings.Repeat("h", 65) + `": want at most 64 bytes, without slash, space, line break or NUL`},
		{"second line for /etc/hosts", func(p *Policy) { p.Hostname = "a\n1.2.3.4" }, `host name "a\n1.2.3.4": want at most 64 bytes, without slash, space, line break or NUL`},
		{"unknown network", func(p *Policy) { p.Network = "nat" }, `network "nat": want none or host`},
		{"host's network", func(p *Policy) { p.Network = NetHost }, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := Policy{Command: []string{"true"}}
			tt.change(&p)
			got := ""
			if err := p.validate(); err != nil {
				got = err.Error()
			}
			check.That(t, got == tt.want, "got error %q, want %q", got, tt.want)
		})
	}
}

// No mount can replace the sandbox's own directories.
func TestCleanDest(t *testing.T) {
	for dest, want := range map[string]string{"/a/./b/": "/a/b", "/dev/shm": "/dev/shm", "/dev/fdx": "/dev/fdx", "/procx": "/procx", "/.layersx": "/.layersx"} {
		got, err := CleanDest(dest)
		check.That(t, got == want && err == nil, "%s: %q, %v", dest, got, err)
	}
	for _, dest := range []string{"", "a", "./a", "/", "/x/..", "/dev", "/dev/", "/proc", "/proc/sys", "/.layers", "/.layers/0",
		"/dev/fd", "/dev/fd/0", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/core", "/dev/ptmx", "/dev/./ptmx"} {
		got, err := CleanDest(dest)
		check.That(t, err != nil, "%s: %q", dest, got)
	}
}
