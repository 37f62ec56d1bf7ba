package bwrap

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/result"
)

func TestCurrentDirectory(t *testing.T) {
	top := tree(t, "plain/sub/", "a b/", "line\nbreak/", `quotes'"/`, "-dash/", "byte\xff/", "homes/me/project/", "homes/other/", "gone/")
	at := func(name string) string { return filepath.Join(top, name) }
	shown := func(dir string) []Mount { return []Mount{{Kind: ReadOnly, Source: dir, Dest: dir}} }
	home := at("homes/me")
	tests := []struct {
		name, dir string
		mounts    []Mount // of the user
		want      []Mount // of the policy afterwards, if there is no error
		err       string
	}{
		{name: "plain", dir: at("plain"), want: shown(at("plain"))},
		{name: "blank", dir: at("a b"), want: shown(at("a b"))},
		{name: "newline", dir: at("line\nbreak"), want: shown(at("line\nbreak"))},
		{name: "quotes", dir: at(`quotes'"`), want: shown(at(`quotes'"`))},
		{name: "leading dash", dir: at("-dash"), want: shown(at("-dash"))},
		{name: "not UTF-8", dir: at("byte\xff"), want: shown(at("byte\xff"))},
		{name: "below a home directory", dir: at("homes/me/project"), want: shown(at("homes/me/project"))},
		{name: "beside a home directory", dir: at("homes/other"), want: shown(at("homes/other"))},
		{name: "shown by a mount", dir: at("plain"), mounts: []Mount{{Kind: ReadWrite, Source: at("plain"), Dest: at("plain")}},
			want: []Mount{{Kind: ReadWrite, Source: at("plain"), Dest: at("plain")}}},
		{name: "below a mount", dir: at("plain/sub"), mounts: []Mount{{Source: at("a b"), Dest: at("plain")}},
			want: []Mount{{Source: at("a b"), Dest: at("plain")}}},
		{name: "above a mount", dir: at("plain"), mounts: []Mount{{Kind: Tmpfs, Dest: at("plain/sub")}},
			want: append([]Mount{{Kind: Tmpfs, Dest: at("plain/sub")}}, shown(at("plain"))...)},
		{name: "a home directory, by a mount", dir: home, mounts: shown(home), want: shown(home)},
		{name: "visible anyway", dir: "/usr/bin"},
		{name: "mounted over /tmp", dir: "/tmp", mounts: []Mount{{Source: "/tmp", Dest: "/tmp"}}, want: []Mount{{Source: "/tmp", Dest: "/tmp"}}},

		{name: "home directory", dir: home, err: "the current directory " + home + " is a home directory, with its keys and tokens"},
		{name: "above a home directory", dir: at("homes"), err: "the current directory " + at("homes") + " holds home directories, such as " + home},
		{name: "far above a home directory", dir: top, err: "the current directory " + top + " holds home directories, such as " + home},
		{name: "root", dir: "/", err: "the current directory is /: all of the host would be shown"},
		{name: "/tmp", dir: "/tmp", err: "the current directory is /tmp, of which the sandbox has its own"},
		{name: "/var/tmp", dir: "/var/tmp", err: "the current directory is /var/tmp, of which the sandbox has its own"},
		{name: "/home", dir: "/home", err: "the current directory /home "},
		{name: "/etc", dir: "/etc", err: "the current directory /etc is not shown in a sandbox by itself"},
		{name: "/proc", dir: "/proc/self", err: "the current directory /proc/"},
		{name: "/dev", dir: "/dev", err: "the current directory /dev is not shown in a sandbox by itself"},
		{name: "/sys", dir: "/sys/kernel", err: "the current directory /sys/kernel is not shown in a sandbox by itself"},
		{name: "removed", dir: at("gone"), err: "the current directory cannot be used: it was removed, or cannot be reached"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Chdir(tt.dir)
			if tt.name == "removed" {
				if err := os.Remove(tt.dir); err != nil {
					t.Fatal(err)
				}
			}
			p := Policy{Mounts: tt.mounts}
			got, err := currentDirectory(&p, home)
			if tt.err != "" {
				var e *result.Error
				if !errors.As(err, &e) || e.Code != "workdir" || !strings.HasPrefix(e.Message, tt.err) || !strings.Contains(e.Hint, "--workdir /tmp") {
					t.Errorf("got %q, error %#v; want error %q", got, err, tt.err)
				}
				return
			}
			if err != nil || got != tt.dir {
				t.Errorf("got %q, %v", got, err)
			}
			if diff := cmp.Diff(tt.want, p.Mounts); diff != "" {
				t.Errorf("mounts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHomeWithin(t *testing.T) {
	tests := []struct{ dir, home, want string }{
		{"/data", "/data", "/data"},
		{"/data", "/data/", "/data"},
		{"/data", "/data/me", "/data/me"},
		{"/data", "/data/x/../me", "/data/me"},
		{"/data/me/project", "/data/me", ""},
		{"/data/me2", "/data/me", ""},
		{"/data", "/database", ""},
		{"/data", "", ""},
		{"/data", "/", ""},  // an account without a home directory
		{"/data", "..", ""}, // nonsense in HOME does not get in the way
		{"/root", "/data", "/root"},
		{"/home/somebody-who-is-not-here", "", "/home/somebody-who-is-not-here"},
		{"/home/somebody-who-is-not-here/x", "", ""},
	}
	for _, tt := range tests {
		if got := homeWithin(tt.dir, tt.home); got != tt.want {
			t.Errorf("homeWithin(%q, %q) = %q, want %q", tt.dir, tt.home, got, tt.want)
		}
	}
}

func TestCheckWorkdir(t *testing.T) {
	v, _ := sample(t)
	tests := []struct{ dir, want string }{
		{"/w", ""},
		{"/w/dir", ""},
		{"/w/link", ""},
		{"/w/bin", ""},
		{"/usr/bin/root", ""},
		{"/tmp", ""},
		{"/", ""},
		{"/a/b", ""},
		{"/w/none", `working directory "/w/none" is not there in the sandbox`},
		{"/tmp/x", `working directory "/tmp/x" is not there in the sandbox`},
		{"/opt", `working directory "/opt" is not there in the sandbox`},
		{"/w/out", `working directory "/w/out" is not there in the sandbox`},
		{"/usr/bin/loop", `working directory "/usr/bin/loop" is not there in the sandbox`},
		{"/w/run", `working directory "/w/run" is not a directory`},
		{"/w/run/x", `working directory "/w/run/x" is not there in the sandbox`},
	}
	for _, tt := range tests {
		got := ""
		if err := checkWorkdir(v, tt.dir); err != nil {
			var e *result.Error
			if !errors.As(err, &e) || e.Code != "workdir" || e.Hint == "" {
				t.Errorf("checkWorkdir(%q): %#v", tt.dir, err)
			}
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("checkWorkdir(%q): %q, want %q", tt.dir, got, tt.want)
		}
	}
}
