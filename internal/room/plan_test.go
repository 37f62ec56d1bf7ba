package room

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/enter"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/seccomp"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
)

// option is one of bwrap's options with its arguments.
type option struct {
	Name string
	Args []string
}

// arity is the number of arguments of each option that sbxrun uses. An option that is missing here is a change to the
// sandbox that these tests do not cover.
var arity = map[string]int{
	"--unshare-user": 0, "--unshare-pid": 0, "--unshare-ipc": 0, "--unshare-uts": 0, "--unshare-cgroup": 0, "--unshare-net": 0,
	"--die-with-parent": 0, "--new-session": 0, "--disable-userns": 0,
	"--cap-drop": 1, "--uid": 1, "--gid": 1, "--hostname": 1, "--perms": 1, "--size": 1,
	"--tmpfs": 1, "--dir": 1, "--proc": 1, "--dev": 1, "--remount-ro": 1, "--chdir": 1, "--seccomp": 1,
	"--symlink": 2, "--ro-bind": 2, "--bind": 2, "--file": 2, "--setenv": 2,
}

func parseOptions(t *testing.T, words []string) (list []option) {
	t.Helper()
	for len(words) > 0 {
		n, ok := arity[words[0]]
		check.Require(t, ok && len(words) >= 1+n, "unknown or incomplete option %q", words)
		list = append(list, option{words[0], words[1 : 1+n]})
		words = words[1+n:]
	}
	return list
}

// place returns the destination of an option, or "".
func (o option) place() string {
	switch o.Name {
	case "--tmpfs", "--dir", "--proc", "--dev", "--symlink", "--ro-bind", "--bind", "--file":
		return o.Args[len(o.Args)-1]
	}
	return ""
}

func prepare(t *testing.T, p Policy, uid int) *Plan {
	t.Helper()
	plan, err := Prepare(p, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), Home: "/nonexistent", UID: uid, GID: uid})
	check.Must(t, err)
	t.Cleanup(plan.Close)
	return plan
}

func TestPlanOptions(t *testing.T) {
	top := laidOut(t, "data/sub/", "file")
	var env values.Environment
	for i, value := range []string{"secret-1", "secret-2\n--bind\n/\n/", "", "--ro-bind"} {
		env.Put(values.Var{Name: fmt.Sprintf("V%d", i), Value: value})
	}
	policy := Policy{
		Command: []string{"sh", "-c", "secret-0"},
		Workdir: "/data/sub",
		Env:     env,
		Mounts: []Mount{
			{Kind: Tmpfs, Dest: "/data/sub/deep"}, // listed before its parent
			{Kind: ReadWrite, Source: top + "/data", Dest: "/data"},
			{Kind: ReadOnly, Source: top + "/file", Dest: "/etc/passwd"},
			{Kind: ReadOnly, Source: top + "/none", Dest: "/none", Try: true},
		},
	}
	tests := []struct {
		name     string
		uid      int
		change   func(*Policy)
		identity []string
		cred     *proc.Cred
		netHost  bool
	}{
		{name: "ordinary user", uid: 1000},
		{name: "host's network", uid: 1000, change: func(p *Policy) { p.Network = NetHost }, netHost: true},
		{name: "root", uid: 0, cred: &proc.Cred{UID: 65534, GID: 65534}},
		{name: "root, root inside", uid: 0, change: func(p *Policy) { p.User = &User{} }, identity: []string{"--uid 0", "--gid 0"}, cred: &proc.Cred{UID: 65534, GID: 65534}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := policy
			p.Mounts = slices.Clone(policy.Mounts)
			if tt.change != nil {
				tt.change(&p)
			}
			plan := prepare(t, p, tt.uid)
			list := parseOptions(t, plan.options(true))
			check.NoDiff(t, cmp.Diff(tt.cred, plan.cred), "credentials (-want +got)")

			want := []string{"--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup"}
			if !tt.netHost {
				want = append(want, "--unshare-net")
			}
			want = append(want, "--die-with-parent", "--cap-drop ALL")
			if !readOnlySysctl() {
				want = append(want, "--disable-userns")
			}
			want = append(append(want, tt.identity...), "--hostname sandbox")
			var head, tail, places []string
			for _, o := range list {
				text := strings.Join(append([]string{o.Name}, o.Args...), " ")
				switch {
				case o.place() != "":
					places = append(places, o.place())
				case o.Name == "--perms" || o.Name == "--size":
				case places == nil:
					head = append(head, text)
				default:
					tail = append(tail, text)
				}
			}
			check.NoDiff(t, cmp.Diff(want, head), "before the file tree (-want +got)")
			check.NoDiff(t, cmp.Diff([]string{"--remount-ro /dev", "--remount-ro /"}, tail), "after the file tree (-want +got)")
			wantVars := []string{"PATH=" + sandboxPathOf(plan.ops, os.Getenv("PATH")), "HOME=/home/sandbox", "USER=sandbox", "LOGNAME=sandbox",
				"V0=secret-1", "V1=secret-2\n--bind\n/\n/", "V2=", "V3=--ro-bind", "LANG=C.UTF-8", "PWD=/data/sub"}
			check.NoDiff(t, cmp.Diff(wantVars, plan.Entry().Env), "environment (-want +got)")

			for i, p := range places {
				for _, q := range places[i+1:] {
					check.That(t, !values.Within(p, q), "%s comes before %s, which hides it", p, q)
				}
			}
			for _, wanted := range []string{"/usr", "/etc/passwd", "/etc/group", "/proc", "/dev", "/dev/shm", "/tmp", "/run", "/var/tmp", Home, "/data", "/data/sub/deep"} {
				check.That(t, slices.Contains(places, wanted), "nothing at %s", wanted)
			}
			checkSources(t, plan, list)
		})
	}
}

// checkSources checks that a plan shows only the system, public files of /etc and /var/lib, and the user's mounts.
func checkSources(t *testing.T, plan *Plan, list []option) {
	t.Helper()
	for _, o := range list {
		switch o.Name {
		case "--bind":
			check.That(t, o.Args[1] == "/data", "writable: %q", o.Args)
		case "--ro-bind", "--symlink":
			dst := o.Args[1]
			check.That(t, slices.Contains(toplevel, dst) || values.Within(dst, "/etc") || values.Within(dst, "/var/lib") || dst == "/sys/devices/system" || dst == "/var/cache/man",
				"shown: %q", o.Args)
		case "--file":
			check.That(t, values.Within(o.Args[1], "/etc"), "copied: %q", o.Args)
		case "--tmpfs":
			i := slices.IndexFunc(list, func(p option) bool { return cmp.Equal(o, p) })
			check.That(t, list[i-1].Name == "--size" && list[i-2].Name == "--perms", "no size or no mode: %q", o.Args)
		}
		if dst := o.place(); dst != "" {
			for _, secret := range []string{"shadow", "gshadow", "ssh", "sudoers", "sudoers.d", "apt", "docker", "kubernetes", "krb5.keytab", "machine-id",
				"ssl/private", "pki/tls/private", "npmrc", "pip.conf", "wgetrc", "environment", "maven/settings.xml", "netrc"} {
				check.That(t, !values.Within(dst, "/etc/"+secret) && !values.Within("/etc/"+secret, dst) && dst != "/etc" && dst != "/" && !values.Within(dst, "/root") && !values.Within(dst, "/var/run"),
					"%s is in the sandbox", dst)
			}
		}
	}
	for _, c := range plan.those(func(o *op) bool { return o.kind == opCopy }) {
		check.That(t, values.Within(c.dst, "/etc"), "copied: %q", c.dst)
		check.That(t, !strings.Contains(c.dst, "passwd"), "%s, which the user has replaced, is copied", c.dst)
	}
}

// TestPlanBuild checks the complete translation, independently of this machine.
func TestPlanBuild(t *testing.T) {
	staged, err := os.Open("/")
	check.Must(t, err)
	plan := &Plan{
		Workdir:  "/w x",
		identity: []string{"--uid", "1"},
		env:      []values.Var{{Name: "A", Value: "1\n2"}, {Name: "B"}},
		ops: []op{
			{kind: opSymlink, dst: "/bin", src: "usr/bin"},
			{kind: opBind, dst: "/usr", src: "/usr"},
			{kind: opBindRW, dst: "/w", src: "/a b"},
			{kind: opBind, dst: "/s", src: "/root/s", from: staged, mount: new(Mount), staged: true},
			{kind: opProc, dst: "/proc"},
			{kind: opDev, dst: "/dev"},
			{kind: opTmpfs, dst: "/dev/shm", size: 1},
			{kind: opTmpfs, dst: "/tmp", size: 2},
			{kind: opTmpfs, dst: Home, size: 3},
			{kind: opTmpfs, dst: "/x", size: 4},
			{kind: opDir, dst: "/run"},
			{kind: opCopy, dst: "/etc/hosts", data: []byte("127.0.0.1 h\n")},
			{kind: opCopy, dst: "/etc/localtime", src: "/etc/localtime", data: []byte("UTC")},
			{kind: opCopy, dst: "/w/secret", data: []byte("\n"), over: true},
		},
	}
	defer plan.Close()
	plan.placeMounts()
	check.Must(t, plan.build(&Policy{Hostname: "h"}))
	off := ""
	if plan.NoUserns() {
		off = "--disable-userns\n"
	}
	want := `--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup
--unshare-net
--die-with-parent --cap-drop ALL
` + off + `--uid 1
--hostname h
--symlink usr/bin /bin
--ro-bind /usr /usr
--bind /a_b /w
--ro-bind /tmp/0 /s
--proc /proc
--dev /dev
--perms 1777 --size 1 --tmpfs /dev/shm
--perms 1777 --size 2 --tmpfs /tmp
--perms 0700 --size 3 --tmpfs /home/sandbox
--perms 0755 --size 4 --tmpfs /x
--dir /run
--perms 0644 --file 7 /etc/hosts
--perms 0644 --file 8 /etc/localtime
--ro-bind-data 9 /w/secret
--remount-ro /dev --remount-ro /`
	// Options that bubblewrap 0.4 does not know, that are slower than our own code, or that need files.
	without := regexp.MustCompile(`--(perms|size|remount-ro) \S+\s*|--disable-userns\s*|--file \d \S+\s*`)
	ours := strings.NewReplacer("--ro-bind-data 9 /w/secret", "--dir /etc", "--hostname h", "--hostname h --tmpfs /.layers").Replace(without.ReplaceAllString(want, ""))
	// Replace blanks and newlines in the words with visible characters.
	visible := strings.NewReplacer(" ", "_", "\n", "|")
	for _, tt := range []struct {
		got  []string
		want string
	}{{plan.options(true), want}, {plan.words, ours}} {
		var words []string
		for _, w := range tt.got {
			words = append(words, visible.Replace(w))
		}
		check.NoDiff(t, cmp.Diff(strings.Fields(tt.want), words), "(-want +got)")
	}
	wantFurnishing := &enter.Furnishing{
		Tmpfs:    []enter.Tmpfs{{Dest: "/dev/shm", Mode: 0o1777, Size: 1}, {Dest: "/tmp", Mode: 0o1777, Size: 2}, {Dest: Home, Mode: 0o700, Size: 3}, {Dest: "/x", Mode: 0o755, Size: 4}},
		Files:    []enter.File{{Dest: "/etc/hosts", Data: []byte("127.0.0.1 h\n")}, {Dest: "/etc/localtime", Data: []byte("UTC")}, {Dest: "/.layers/0", Data: []byte("\n")}},
		Mounts:   []enter.Mount{{Dest: "/s", Bind: enter.Bind{Place: "/s"}}, {Dest: "/w/secret", Base: "/w", File: true, Bind: enter.Bind{Place: "/.layers/0"}}},
		ReadOnly: []string{"/dev", "/"}, NoUserns: plan.NoUserns(),
	}
	check.NoDiff(t, cmp.Diff(wantFurnishing, plan.furnishing()), "furnishing (-want +got)")
}

// If user namespaces cannot be disabled in the room, the filter refuses them.
func TestPlanNoUserns(t *testing.T) {
	var plan Plan
	check.Must(t, plan.build(&Policy{}))
	check.That(t, plan.NoUserns() != readOnlySysctl() && (plan.filter == seccomp.Namespaces) != plan.NoUserns(), "/proc/sys is read-only: %v; user namespaces are switched off: %v; the filter: %v", readOnlySysctl(), plan.NoUserns(), plan.filter)
}

func TestPlanIdentity(t *testing.T) {
	type identity struct {
		User    User
		Options string
		Cred    *proc.Cred
	}
	tests := []struct {
		name     string
		user     *User
		uid, gid int
		want     identity
	}{
		{"ordinary", nil, 1000, 100, identity{User{1000, 100}, "", nil}},
		{"ordinary, itself", &User{1000, 100}, 1000, 100, identity{User{1000, 100}, "", nil}},
		{"ordinary, root inside", &User{0, 0}, 1000, 100, identity{User{0, 0}, "--uid 0 --gid 0", nil}},
		{"ordinary, group inside", &User{1000, 7}, 1000, 100, identity{User{1000, 7}, "--uid 1000 --gid 7", nil}},
		{"ordinary, greatest", &User{4294967294, 4294967294}, 1000, 100, identity{User{4294967294, 4294967294}, "--uid 4294967294 --gid 4294967294", nil}},
		{"root", nil, 0, 0, identity{User{65534, 65534}, "", &proc.Cred{UID: 65534, GID: 65534}}},
		{"root, another group", nil, 0, 50, identity{User{65534, 65534}, "", &proc.Cred{UID: 65534, GID: 65534}}},
		{"root, root inside", &User{0, 0}, 0, 0, identity{User{0, 0}, "--uid 0 --gid 0", &proc.Cred{UID: 65534, GID: 65534}}},
		{"root, root inside, a group", &User{0, 7}, 0, 0, identity{User{0, 7}, "--uid 0 --gid 7", &proc.Cred{UID: 65534, GID: 65534}}},
		{"root, a user", &User{7, 8}, 0, 0, identity{User{7, 8}, "", &proc.Cred{UID: 7, GID: 8}}},
		{"root, a user in root's group", &User{7, 0}, 0, 0, identity{User{7, 0}, "--uid 7 --gid 0", &proc.Cred{UID: 7, GID: 65534}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var plan Plan
			user := plan.identify(&Policy{User: tt.user}, Caller{UID: tt.uid, GID: tt.gid})
			check.NoDiff(t, cmp.Diff(tt.want, identity{user, strings.Join(plan.identity, " "), plan.cred}), "(-want +got)")
		})
	}
}

// A user's mount replaces only the defaults at and below its destination.
func TestLayoutReplacesDefaults(t *testing.T) {
	top := laidOut(t, "dir/")
	list := func(mounts ...Mount) (ops []op) {
		ops, err := layout(&Policy{TmpSize: 1, Mounts: mounts}, Caller{}, User{1, 1}, "h", nil)
		check.Must(t, err)
		for i := range ops {
			if ops[i].from != nil {
				ops[i].from.Close()
			}
		}
		return ops
	}
	places := func(ops []op) (names []string) {
		for _, o := range ops {
			names = append(names, o.dst)
		}
		return names
	}
	all := places(list())
	tests := []struct {
		name, dest string
		gone       func(place string) bool
	}{
		{"a file of /etc", "/etc/passwd", func(p string) bool { return p == "/etc/passwd" }},
		{"all of /etc", "/etc", func(p string) bool { return strings.HasPrefix(p, "/etc/") }},
		{"/tmp", "/tmp", func(p string) bool { return p == "/tmp" }},
		{"/bin, on most systems a link", "/bin", func(p string) bool { return p == "/bin" }},
		{"/usr", "/usr", func(p string) bool { return p == "/usr" }},
		{"/home", "/home", func(p string) bool { return p == "/home/sandbox" }},
		{"/var", "/var", func(p string) bool { return strings.HasPrefix(p, "/var/") }},
		{"below /tmp", "/tmp/x", func(string) bool { return false }},
		{"a name that only begins alike", "/et", func(string) bool { return false }},
		{"a place of its own", "/x/y", func(string) bool { return false }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			kept := slices.DeleteFunc(slices.Clone(all), tt.gone)
			for _, m := range []Mount{
				{Kind: ReadOnly, Source: top + "/dir", Dest: tt.dest},
				{Kind: ReadWrite, Source: top + "/dir", Dest: tt.dest},
				{Kind: Tmpfs, Dest: tt.dest, Size: 5},
			} {
				var defaults []op
				var users []op
				for _, o := range list(m) {
					if o.dst == tt.dest {
						users = append(users, op{kind: o.kind, dst: o.dst, src: o.src, size: o.size})
					} else {
						defaults = append(defaults, o)
					}
				}
				want := []op{{kind: map[MountKind]opKind{ReadOnly: opBind, ReadWrite: opBindRW, Tmpfs: opTmpfs}[m.Kind], dst: tt.dest, src: m.Source, size: m.Size}}
				check.NoDiff(t, cmp.Diff(want, users, cmp.AllowUnexported(op{})), "the user's (-want +got)")
				check.NoDiff(t, cmp.Diff(kept, places(defaults)), "defaults (-want +got)")
			}
			check.NoDiff(t, cmp.Diff(all, places(list(Mount{Source: top + "/none", Dest: tt.dest, Try: true}))), "defaults beside a source that is missing (-want +got)")
		})
	}
}

// /etc/passwd and /etc/group list the sandbox's accounts, without duplicate lines.
func TestEtcAccounts(t *testing.T) {
	tests := []struct {
		user          User
		passwd, group string
	}{
		{User{1000, 100},
			"root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:100:sandbox:/home/sandbox:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
			"root:x:0:\nsandbox:x:100:\nnogroup:x:65534:\n"},
		{User{0, 0},
			"sandbox:x:0:0:sandbox:/home/sandbox:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
			"sandbox:x:0:\nnogroup:x:65534:\n"},
		{User{65534, 65534},
			"root:x:0:0:root:/root:/bin/sh\nsandbox:x:65534:65534:sandbox:/home/sandbox:/bin/sh\n",
			"root:x:0:\nsandbox:x:65534:\n"},
	}
	for _, tt := range tests {
		ops, err := accountOps(&Policy{}, tt.user, "h", nil)
		check.Must(t, err)
		got := map[string]string{}
		for _, o := range ops {
			got[o.dst] = string(o.data)
		}
		want := map[string]string{"/etc/passwd": tt.passwd, "/etc/group": tt.group, "/etc/hosts": "127.0.0.1 localhost h\n::1 localhost h\n"}
		check.NoDiff(t, cmp.Diff(want, got), "%v (-want +got)", tt.user)
	}
}

// Root's sandbox may enter a directory with its owner's rights, however many mounts the plan has.
func TestPrepareWorkdirOfOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root's sandboxes have another identity
	}
	dir, lower := t.TempDir(), t.TempDir()
	check.Must(t, os.Chmod(dir, 0o700))
	p := Policy{Workdir: dir, Mounts: []Mount{{Kind: Overlaid, Source: dir, Dest: dir, Lower: []string{lower}}}}
	for i := range 100 {
		plan, err := Prepare(p, ThisCaller())
		check.Require(t, err == nil, "with %d more mounts: %v", i, err)
		plan.Close()
		p.Mounts = append(p.Mounts, Mount{Kind: Tmpfs, Dest: fmt.Sprintf("/more/%d", i)})
	}
}

func TestPrepareErrors(t *testing.T) {
	top := laidOut(t, "dir/", "file", "loop -> loop")
	tests := []struct {
		name   string
		change func(*Policy, *Caller)
		want   result.Error
	}{
		{"policy", func(p *Policy, _ *Caller) { p.Workdir = "x" }, result.Error{Code: "usage", Message: `working directory "x": must be an absolute path in the sandbox`, Hint: `write --cwd ro --workdir "$PWD"/x`}},
		{"current directory", func(p *Policy, _ *Caller) { p.Workdir = "./" }, result.Error{Code: "usage", Message: `working directory "./": must be an absolute path in the sandbox`, Hint: `write --cwd ro --workdir "$PWD"`}},
		{"no bwrap", func(_ *Policy, c *Caller) { c.Bwrap = top + "/none" },
			result.Error{Code: "bwrap-missing", Message: "cannot use the bubblewrap that SBXRUN_BWRAP names: stat " + top + "/none: no such file or directory", Hint: "unset the variable, or name the program by its absolute path"}},
		{"missing source", func(p *Policy, _ *Caller) { p.Mounts = []Mount{{Source: top + "/none", Dest: "/x"}} },
			result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: no such file or directory", top+"/none"),
				Hint: "create it, or use --ro-bind-try or --bind-try to leave it out when it is missing"}},
		{"source below a file", func(p *Policy, _ *Caller) { p.Mounts = []Mount{{Source: top + "/file/x", Dest: "/x", Kind: ReadWrite}} },
			result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: not a directory", top+"/file/x")}},
		{"source that is not missing but bad", func(p *Policy, _ *Caller) { p.Mounts = []Mount{{Source: top + "/loop", Dest: "/x", Try: true}} },
			result.Error{Code: "bind-source", Message: fmt.Sprintf("cannot bind %q: too many levels of symbolic links", top+"/loop")}},
		{"no place for a mount", func(p *Policy, _ *Caller) {
			p.Mounts = []Mount{{Source: top + "/dir", Dest: "/x"}, {Kind: Tmpfs, Dest: "/x/new"}}
		}, result.Error{Code: "bind-destination", Message: `cannot mount at "/x/new": it does not exist in the read-only /x`, Hint: "mount it at another place, such as /mnt/new"}},
		{"missing working directory", func(p *Policy, _ *Caller) { p.Workdir = "/none" },
			result.Error{Code: "workdir", Message: `working directory "/none" does not exist in the sandbox`,
				Hint: "--ro-bind or --bind the directory, or name an existing one with --workdir"}},
		{"missing command", func(p *Policy, _ *Caller) { p.Command = []string{"/none"} },
			result.Error{Code: "not-found", ExitCode: 127, Message: `command "/none": no such file`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, c := Policy{Command: []string{"sh"}, Workdir: "/tmp"}, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: 1000, GID: 1000}
			tt.change(&p, &c)
			plan, err := Prepare(p, c)
			var got *result.Error
			check.Require(t, plan == nil && errors.As(err, &got), "got %v, %v", plan, err)
			check.NoDiff(t, cmp.Diff(tt.want, *got, cmpopts.IgnoreFields(result.Error{}, "Err")), "(-want +got)")
		})
	}
}

// If only one command enters the room, that command gets the network namespace, and bwrap creates none.
func TestPrepareAlone(t *testing.T) {
	for _, tt := range []struct {
		name        string
		p           Policy
		room, alone bool
	}{
		{"a room's", Policy{Command: []string{"sh"}}, true, false},
		{"a command's", Policy{Command: []string{"sh"}, Alone: true}, false, true},
		{"no command", Policy{Alone: true}, true, false},
		{"the host's", Policy{Command: []string{"sh"}, Alone: true, Network: NetHost}, false, false},
	} {
		tt.p.Workdir = "/tmp"
		plan := prepare(t, tt.p, 1000)
		check.Equal(t, slices.Contains(plan.options(false), "--unshare-net"), tt.room, "%s: bwrap makes it", tt.name)
		check.Equal(t, plan.furnishing().OwnNet, tt.alone, "%s: the command gets it", tt.name)
		got, want := plan.Entry().HostNet, tt.alone || tt.p.Network == NetHost
		check.That(t, got == want, "%s: the room has the host's: %v", tt.name, got)
		// Without sbxrun, bwrap has to create it.
		got, want = slices.Contains(plan.options(true), "--unshare-net"), tt.p.Network != NetHost
		check.That(t, got == want, "%s: without sbxrun bwrap makes it: %v", tt.name, got)
	}
}

// Mount points can be created in a writable bind, but must exist in a read-only one.
func TestPrepareMountInMount(t *testing.T) {
	top := laidOut(t, "dir/there/")
	for _, m := range [][]Mount{
		{{Source: top + "/dir", Dest: "/x"}, {Kind: Tmpfs, Dest: "/x/there"}},
		{{Source: top + "/dir", Dest: "/x", Kind: ReadWrite}, {Kind: Tmpfs, Dest: "/x/new"}},
		{{Kind: Tmpfs, Dest: "/x"}, {Source: top + "/dir", Dest: "/x/new"}},
	} {
		prepare(t, Policy{Command: []string{"sh"}, Workdir: "/tmp", Mounts: m}, 1000)
	}
}

// Root stages sources that the unprivileged uid cannot reach.
func TestPrepareStages(t *testing.T) {
	top := laidOut(t, "private/data/", "public/")
	for name, mode := range map[string]os.FileMode{"": 0o755, "/private": 0o700, "/public": 0o755} {
		check.Must(t, os.Chmod(top+name, mode))
	}
	check.That(t, reachable("/usr/bin/env") && !reachable(top+"/private/data") && !reachable(top+"/none"), "reachable: /usr/bin/env %v, below a private directory %v, missing %v", reachable("/usr/bin/env"), reachable(top+"/private/data"), reachable(top+"/none"))
	mounts := []Mount{{Source: top + "/private/data", Dest: "/a"}, {Source: top + "/public", Dest: "/b", Kind: ReadWrite}}
	policy := Policy{Command: []string{"sh"}, Workdir: "/tmp", Mounts: mounts}
	plan := prepare(t, policy, 1000)
	check.That(t, plan.staged() == nil, "not root, but staged %v", plan.staged())
	plan = prepare(t, policy, 0)
	staged := 0
	for _, o := range parseOptions(t, plan.words) {
		if (o.Name == "--ro-bind" || o.Name == "--bind") && strings.HasPrefix(o.Args[0], proc.StageDir+"/") {
			n, err := strconv.Atoi(path.Base(o.Args[0]))
			check.That(t, err == nil && n == staged, "staged at %s, want number %d", o.Args[0], staged)
			if want := map[string]string{"/a": top + "/private/data", "/b": top + "/public"}[o.Args[1]]; plan.staged()[staged].from.Name() != want {
				t.Errorf("at %s: %s, want %s", o.Args[1], plan.staged()[staged].from.Name(), want)
			}
			staged++
		}
	}
	check.That(t, staged != 0 && staged == len(plan.staged()), "%d of %d staged files are bound", staged, len(plan.staged()))
	check.That(t, plan.Closed == nil, "closed: %q", plan.Closed)
	policy.Mounts = []Mount{{Source: top + "/private", Dest: "/a"}, {Source: top + "/public", Dest: "/b"}}
	plan = prepare(t, policy, 0)
	check.That(t, slices.Equal(plan.Closed, []string{top + "/private"}), "closed: %q", plan.Closed)
}

// Root opens no source behind a link that root did not create, because an earlier payload may have created it.
func TestPrepareStagesNoLinkOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root opens sources for another identity
	}
	top := laidOut(t, "private/data/", "private/file", "public/",
		"shared/out -> ../private/data", "shared/way -> TOP/private", "shared/file -> ../private/file", "shared/far -> near", "shared/near -> TOP/private/data",
		"shared/harmless -> TOP/public", "shared/rooted -> out")
	err := os.Chmod(top+"/private", 0o700)
	check.Must(t, err)
	for _, name := range []string{"out", "way", "file", "near", "harmless"} {
		check.Must(t, os.Lchown(top+"/shared/"+name, Nobody, Nobody))
	}
	for source, link := range map[string]string{
		"/shared/out": "/shared/out", "/shared/out/": "/shared/out", "/shared/way/data": "/shared/way", "/shared/file": "/shared/file", "/shared/rooted": "/shared/out",
		"/shared/far": "/shared/near", "/shared/../shared/way/file": "/shared/way", "/shared/way/../private/data": "/shared/way",
		"/shared/harmless": "/shared/harmless",
	} {
		for _, kind := range []MountKind{ReadOnly, ReadWrite} {
			plan, err := Prepare(Policy{Command: []string{"true"}, Workdir: "/tmp", Mounts: []Mount{{Kind: kind, Source: top + source, Dest: "/x"}, {Source: top + "/private/data", Dest: "/y"}}},
				Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH")})
			check.That(t, plan == nil && result.CodeOf(err) == "bind-source" && strings.Contains(err.Error(), top+link) && strings.Contains(err.Error(), "is a symbolic link that others could have put there"),
				"%s: got %v, %v; want that %s is refused", source, plan, err, link)
		}
	}
}

// Root follows its own links, with the same result as the kernel.
func TestTrustedLinkOfRoot(t *testing.T) {
	names := []string{"/bin/sh", "/bin", "/usr/../bin/./sh", "/etc/passwd", "/", "/usr/"}
	if os.Geteuid() == 0 {
		top := laidOut(t, "data/sub/", "a -> data", "b -> TOP/a", "c -> ./b/../a/sub", "d -> /..//../tmp", "e -> .")
		names = append(names, top+"/a", top+"/b", top+"/b/sub", top+"/c", top+"/c/..", top+"/c/../../a", top+"/d", top+"/e/e/e/a")
	}
	trusted := func(name string) (string, error) {
		o := op{mount: new(Mount), src: name}
		err := (&Plan{cred: &proc.Cred{UID: Nobody, GID: Nobody}}).open(&o)
		o.from.Close() // Close of a nil file only returns an error
		return o.src, err
	}
	for _, name := range names {
		want, err := filepath.EvalSymlinks(name)
		check.Must(t, err)
		got, err := trusted(name)
		check.That(t, err == nil && got == want, "trusted(%q) = %q, %v; want %q", name, got, err, want)
	}
	top := laidOut(t, "loop -> loop", "file")
	for _, name := range []string{"/none", "/none/x", "/loop", "/file/x"} {
		got, err := trusted(top + name)
		check.That(t, result.CodeOf(err) == "bind-source", "trusted(%q) = %q, %v", top+name, got, err)
	}
}

// Too many binds for bubblewrap are an error before it is started, and bubblewrap accepts all plans that pass. Arguments
// and variables of the command do not count.
func TestPrepareMoreWordsThanBwrapTakes(t *testing.T) {
	caller := Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), UID: os.Getuid(), GID: os.Getgid()}
	policy := func(binds, words int) Policy {
		p := Policy{Command: append([]string{"sh", "-c", "echo $# $(ls /b | wc -l)"}, slices.Repeat([]string{""}, words)...), Workdir: "/tmp"}
		for i := range binds {
			p.Mounts = append(p.Mounts, Mount{Source: "/etc/hostname", Dest: fmt.Sprintf("/b/%d", i)})
		}
		for i := range words {
			p.Env.Put(values.Var{Name: fmt.Sprintf("V%d", i)})
		}
		return p
	}
	plan, err := Prepare(policy(3000, 0), caller)
	var e *result.Error
	check.That(t, plan == nil && errors.As(err, &e) && e.ExitCode == 0 && strings.Contains(e.Message, "more than bubblewrap takes"), "3000 binds: got %v", err)
	for _, n := range [][2]int{{100, 0}, {0, 20000}} {
		want := fmt.Sprintf("%d %d\n", max(0, n[1]-1), n[0]) // $0 is not counted
		got, end := play(t, policy(n[0], n[1]))
		check.That(t, got == want && end != nil && end.Code() == 0, "%d binds, %d words and variables: got %q, %+v; want %q", n[0], n[1], got, end, want)
	}
}

// Messages quote escape sequences in names that a payload may have chosen.
func TestPrepareEscapeSequences(t *testing.T) {
	const odd = "\x1b[2J\x9b\a\r\n"
	top := laidOut(t, odd+"/home/", odd+"/file", "w/"+odd+" -> /", odd+"/sub/")
	check.Must(t, os.WriteFile(top+"/script", []byte("#!/none/\x1b[2J\x9b\a\r\n"), 0o755))
	err := os.Chmod(top+"/"+odd+"/sub", 0o700)
	check.Must(t, err)
	at := top + "/" + odd
	bind := func(source, dest string) Mount { return Mount{Kind: ReadWrite, Source: source, Dest: dest} }
	for name, tt := range map[string]struct {
		p    Policy
		dir  string // the current directory
		home string
	}{
		"interpreter":                  {p: Policy{Command: []string{"./script"}}, dir: top},
		"home directory":               {dir: at + "/home", home: at + "/home"},
		"above a home directory":       {dir: at, home: at + "/home"},
		"directory of another user":    {dir: at + "/sub"},
		"missing working directory":    {p: Policy{Workdir: "/" + odd}},
		"a file as working directory":  {p: Policy{Workdir: at + "/file", Mounts: []Mount{bind(at, at)}}},
		"missing source":               {p: Policy{Workdir: "/tmp", Mounts: []Mount{bind(at+"/none", "/x")}}},
		"a link at a mount":            {p: Policy{Workdir: "/tmp", Mounts: []Mount{bind(top+"/w", "/w"), {Kind: Tmpfs, Dest: "/w/" + odd}}}},
		"command in such a directory":  {p: Policy{Workdir: "/tmp", Command: []string{at + "/file"}}},
		"a directory as command":       {p: Policy{Workdir: at, Command: []string{"./sub"}, Mounts: []Mount{bind(at, at)}}},
		"missing command in such a":    {p: Policy{Workdir: at, Command: []string{at + "/none"}, Mounts: []Mount{bind(at, at)}}},
		"twice the same place":         {p: Policy{Workdir: "/tmp", Mounts: []Mount{bind("/", "/"+odd), bind("/", "/"+odd)}}},
		"no place in such a directory": {p: Policy{Workdir: "/tmp", Mounts: []Mount{{Source: at, Dest: "/x"}, {Kind: Tmpfs, Dest: "/x/none" + odd}}}},
	} {
		if tt.p.Command == nil {
			tt.p.Command = []string{"true"}
		}
		if tt.dir == "" {
			tt.dir = top
		}
		t.Chdir(tt.dir)
		uid := 1000
		if name == "directory of another user" {
			uid = 0
		}
		plan, err := Prepare(tt.p, Caller{Bwrap: os.Getenv("SBXRUN_BWRAP"), Path: os.Getenv("PATH"), Home: tt.home, UID: uid, GID: uid})
		if err == nil {
			plan.Close()
			t.Errorf("%s: no error", name)
			continue
		}
		if strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' || r >= 0x7f && r < 0xa0 || r == utf8.RuneError }) {
			t.Errorf("%s: %q", name, err.Error())
		}
	}
}
