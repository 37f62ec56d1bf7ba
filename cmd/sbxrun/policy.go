package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/tools"
	"github.com/sbxrun/sbxrun/internal/values"
)

// policyOf turns flags into the policy of a sandbox and its other parts.
// It calls admit before it creates files.
func policyOf(ctx context.Context, f *cli.View, l *cli.LimitFlags, command []string, admit func() error) (p room.Policy, parts *sandbox.Parts, err error) {
	parts = new(sandbox.Parts)
	if f.Upper != "" {
		if f.Upper, err = filepath.Abs(f.Upper); err != nil {
			return p, parts, err
		}
	}
	net, err := networkOf(f)
	if err != nil {
		return p, parts, err
	}
	p = room.Policy{
		Command:  command,
		Cwd:      room.Cwd(f.Cwd),
		CwdRoot:  f.CwdRoot,
		CwdUpper: f.Upper,
		Workdir:  f.Workdir,
		TmpSize:  int64(f.TmpSize),
		Network:  room.Network(f.Net),
		Hostname: f.Hostname,
		NoFilter: f.Seccomp == "off",
		Devices:  f.Device,
	}
	for _, name := range f.Device {
		if err := devices.Check(name); err != nil {
			return p, parts, fmt.Errorf("--device: %w", err)
		}
	}
	if f.Write {
		if f.Cwd != "" && p.Cwd != room.CwdReadWrite {
			return p, parts, fmt.Errorf("-w cannot be combined with --cwd %s: it means --cwd rw", f.Cwd)
		}
		p.Cwd = room.CwdReadWrite
	}
	if f.TmpSize == 0 {
		return p, parts, errors.New("--tmp-size: must be greater than 0")
	}
	if net.Proxied {
		p.Network = room.NetNone
	}
	if err = parts.List(net, &p); err != nil {
		return p, parts, err
	}
	if p.User, err = parseUser(f.User); err != nil {
		return p, parts, err
	}
	if p.Mounts, err = mounts(f); err != nil {
		return p, parts, err
	}
	image, err := useImage(ctx, f, parts, &p, admit)
	if err != nil {
		return p, parts, err
	}
	if err = protect(f, &p); err != nil {
		return p, parts, err
	}
	if _, err = parseVolumes(f.Volume); err != nil {
		return p, parts, err
	}
	var vars []values.Var
	if f.Tools {
		if f.Rootfs != "" {
			return p, parts, errors.New("--tools shows programs of the host, which need the host's libraries: leave it out with --rootfs")
		}
		vars = showTools(&p)
	}
	vars = append(vars, parts.Variables(p.Rootfs())...)
	terminal, described := tools.Terminal(room.ThisCaller(), os.LookupEnv, p.Shows)
	p.Mounts, vars = append(p.Mounts, terminal...), append(vars, described...)
	for _, arg := range f.Put {
		p.Put = append(p.Put, cmp.Or(strings.Join(values.SplitColon(arg)[1:], ""), "."))
	}
	if f.FakeMeminfo {
		if p.Meminfo, err = fakeMeminfo(l); err != nil {
			return p, parts, err
		}
	}
	p.Base, p.Env, err = environment(&f.Vars, float64(l.Cpus), image, vars)
	return p, parts, err
}

func networkOf(f *cli.View) (spec network.Spec, err error) {
	list, proxied := strings.CutPrefix(f.Net, "allow=")
	if proxied {
		spec.Proxied = true
		if spec.Allow, err = network.ParseAllow(list); err != nil {
			return spec, err
		}
	}
	for _, arg := range f.Publish {
		p, err := network.ParsePublish(arg)
		if err != nil {
			return spec, err
		}
		spec.Publish = append(spec.Publish, p)
	}
	if len(f.Connect) > 0 {
		dir, err := unix.Getwd()
		if err != nil {
			dir = "/" // relative paths do not exist there
		}
		for _, arg := range f.Connect {
			c, err := network.ParseConnect(arg, dir)
			if err != nil {
				return spec, err
			}
			spec.Connect = append(spec.Connect, c)
		}
	}
	return spec, nil
}

// showTools adds the tools in PATH to a policy, and returns their variables.
func showTools(p *room.Policy) []values.Var {
	set := tools.Find(room.ThisCaller(), os.LookupEnv, p.Shows)
	for _, m := range set.Mounts {
		if !slices.ContainsFunc(p.Mounts, func(users room.Mount) bool { return users.Dest == m.Dest }) {
			p.Mounts = append(p.Mounts, m)
		}
	}
	p.Tools = set.Path
	return set.Vars
}

func mounts(f *cli.View) (list []room.Mount, err error) {
	dir, err := unix.Getwd()
	if err != nil {
		dir = "" // ParseBind rejects relative paths
	}
	if f.Rootfs != "" {
		m, err := rootMount(f, dir)
		if err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	for _, kind := range []struct {
		args []string
		kind room.MountKind
		try  bool
	}{
		{f.RoBind, room.ReadOnly, false},
		{f.Bind, room.ReadWrite, false},
		{f.RoBindTry, room.ReadOnly, true},
		{f.BindTry, room.ReadWrite, true},
		{f.Overlay, room.Overlaid, false},
	} {
		for _, arg := range kind.args {
			if kind.kind == room.Overlaid && arg == "/" {
				if f.Rootfs == "" && f.Image == "" {
					return nil, errors.New("--overlay /: goes with --image or --rootfs, because the host's own system is always read-only")
				}
				continue // see rootMount
			}
			source, dest, err := room.ParseBind(arg, dir)
			if err != nil {
				return nil, err
			}
			m := room.Mount{Kind: kind.kind, Source: source, Dest: dest, Try: kind.try}
			if given := values.SplitColon(arg)[0]; !path.IsAbs(given) {
				m.Here = path.Clean(given)
			}
			if kind.kind == room.Overlaid {
				m.Upper = f.Upper
			}
			list = append(list, m)
		}
	}
	for _, arg := range f.Tmpfs {
		dest, size, err := room.ParseTmpfs(arg)
		if err != nil {
			return nil, err
		}
		m := room.Mount{Kind: room.Tmpfs, Dest: dest}
		if size != "" {
			var bytes values.Size
			if err := bytes.UnmarshalText([]byte(size)); err != nil {
				return nil, fmt.Errorf("tmpfs %q: %w", arg, err)
			}
			if bytes == 0 {
				return nil, fmt.Errorf("tmpfs %q: the size must be greater than 0", arg)
			}
			m.Size = int64(bytes)
		}
		list = append(list, m)
	}
	return list, nil
}

// rootMount returns the mount that replaces the host's system.
func rootMount(f *cli.View, dir string) (m room.Mount, err error) {
	m = room.Mount{Kind: room.ReadOnly, Source: f.Rootfs, Dest: "/", Owned: true}
	if slices.Contains(f.Overlay, "/") {
		m.Kind, m.Upper = room.Overlaid, f.Upper
	}
	if !path.IsAbs(m.Source) {
		if dir == "" {
			return m, fmt.Errorf("--rootfs %q: the current directory was removed, or cannot be reached; give an absolute path", f.Rootfs)
		}
		m.Source, m.Here = path.Join(dir, m.Source), path.Clean(m.Source)
	}
	return m, nil
}

// protect sets the read-only paths in writable binds.
func protect(f *cli.View, p *room.Policy) error {
	p.Git = !slices.Contains(f.Protect, "none")
	for i := range p.Mounts {
		p.Mounts[i].Git = p.Git && p.Mounts[i].Kind == room.ReadWrite
	}
	for _, name := range f.Protect {
		if name == "none" {
			continue
		}
		if !path.IsAbs(name) {
			dir, err := unix.Getwd()
			if err != nil || name == "" {
				return fmt.Errorf("--protect %q: give an absolute path", name)
			}
			name = path.Join(dir, name)
		}
		p.Protect = append(p.Protect, path.Clean(name))
	}
	return nil
}

// passed are the caller's variables that every command gets, in addition to LC_*.
var passed = []string{"LANG", "LANGUAGE", "TERM", "COLORTERM", "NO_COLOR", "TZ"}

// sandboxVars are variables that describe the sandbox, not the host.
var sandboxVars = []string{"PATH", "HOME", "USER", "LOGNAME", "PWD", "OLDPWD"}

// environment returns the variables of the command in a new sandbox, except HOME, USER, and PATH without an image, as
// in [room.Policy]. An image's variables replace the caller's, unless the caller passes all of them.
func environment(f *cli.Vars, cpus float64, image, tools []values.Var) (base, set values.Environment, err error) {
	if f.InheritEnv {
		inherit(&set, true)
	} else {
		inherit(&base, false)
	}
	for _, v := range image {
		base.Put(v)
	}
	for _, v := range tools {
		set.Put(v)
	}
	return base, set, addVariables(&set, f, cpus)
}

// inherit adds the caller's variables: all, or those that every command gets.
func inherit(set *values.Environment, all bool) {
	for _, pair := range os.Environ() {
		// Any name goes: bash exports functions as BASH_FUNC_NAME%%.
		name, value, ok := strings.Cut(pair, "=")
		v := values.Var{Name: name, Value: value}
		if !ok || name == "" || slices.Contains(sandboxVars, name) {
			continue
		}
		if all || slices.Contains(passed, v.Name) || strings.HasPrefix(v.Name, "LC_") {
			set.Put(v)
		}
	}
}

// addVariables adds the variables for a limit on CPUs, of --env-file, and of --env, in this order.
func addVariables(set *values.Environment, f *cli.Vars, cpus float64) error {
	for _, pair := range limits.Environment(cpus) {
		name, value, _ := strings.Cut(pair, "=")
		set.Put(values.Var{Name: name, Value: value})
	}
	for _, name := range f.EnvFile {
		if err := environmentFile(set, name); err != nil {
			return err
		}
	}
	for _, arg := range f.Env {
		v, ok, err := values.ParseVar(arg)
		if err != nil {
			return fmt.Errorf("--env: %w", err)
		}
		if ok {
			set.Put(v)
		}
	}
	return nil
}

// parseUser parses UID[:GID]. The default GID is the UID.
func parseUser(arg string) (*room.User, error) {
	if arg == "" {
		return nil, nil
	}
	uid, gid, found := strings.Cut(arg, ":")
	if !found {
		gid = uid
	}
	u, err1 := strconv.ParseUint(uid, 10, 32)
	g, err2 := strconv.ParseUint(gid, 10, 32)
	if err1 != nil || err2 != nil || u == 1<<32-1 || g == 1<<32-1 {
		return nil, fmt.Errorf("--user %q: want UID or UID:GID, as numbers", arg)
	}
	return &room.User{UID: uint32(u), GID: uint32(g)}, nil
}
