package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/tools"
	"github.com/sbxrun/sbxrun/internal/values"
)

// policyOf turns the flags that say what a sandbox shows into a policy.
func policyOf(f *cli.View, l *cli.Limits, command []string) (p room.Policy, err error) {
	p = room.Policy{
		Command:  command,
		Cwd:      room.Cwd(f.Cwd),
		CwdRoot:  f.CwdRoot,
		Workdir:  f.Workdir,
		TmpSize:  int64(f.TmpSize),
		Network:  room.Network(f.Net),
		Hostname: f.Hostname,
		NoFilter: f.Seccomp == "off",
	}
	if f.Write {
		if f.Cwd != "" && p.Cwd != room.CwdReadWrite {
			return p, fmt.Errorf("-w means --cwd rw, but --cwd %s is given, too", f.Cwd)
		}
		p.Cwd = room.CwdReadWrite
	}
	if f.TmpSize == 0 {
		return p, errors.New("--tmp-size: must be greater than 0")
	}
	if p.Mounts, err = mounts(f); err != nil {
		return p, err
	}
	var vars []values.Var
	if f.Tools {
		vars = showTools(&p)
	}
	if p.Env, err = environment(&f.Vars, float64(l.Cpus), vars); err != nil {
		return p, err
	}
	p.User, err = parseUser(f.User)
	return p, err
}

// showTools adds to a policy what stands behind PATH, and returns the variables for it.
func showTools(p *room.Policy) []values.Var {
	set := tools.Find(thisCaller(), os.LookupEnv, p.Shows)
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
		dir = "" // ParseBind refuses a relative path
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
	} {
		for _, arg := range kind.args {
			source, dest, err := room.ParseBind(arg, dir)
			if err != nil {
				return nil, err
			}
			list = append(list, room.Mount{Kind: kind.kind, Source: source, Dest: dest, Try: kind.try})
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

// passed are the variables every payload gets from the caller, beside LC_*.
var passed = []string{"LANG", "LANGUAGE", "TERM", "TZ"}

// own are the variables that describe the sandbox and not the host.
var own = []string{"PATH", "HOME", "USER", "LOGNAME", "PWD", "OLDPWD"}

// environment is what the payload of a new sandbox gets beside PATH, HOME and
// USER: what comes later wins.
func environment(f *cli.Vars, cpus float64, tools []values.Var) (set values.Environment, err error) {
	inherit(&set, f.InheritEnv)
	for _, v := range tools {
		set.Put(v)
	}
	return set, addVariables(&set, f, cpus)
}

// inherit adds the caller's variables: all, or those that are always passed.
func inherit(set *values.Environment, all bool) {
	for _, pair := range os.Environ() {
		v, ok, err := values.ParseVar(pair)
		if err != nil || !ok || slices.Contains(own, v.Name) {
			continue // names that no shell could set, such as exported functions
		}
		if all || slices.Contains(passed, v.Name) || strings.HasPrefix(v.Name, "LC_") {
			set.Put(v)
		}
	}
}

// addVariables adds what the flags name: the limit on CPUs first, then files, then
// --env.
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

// parseUser parses UID[:GID]; the group id is the user id unless given.
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
