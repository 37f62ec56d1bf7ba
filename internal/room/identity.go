package room

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Outside returns the identity of the sandbox's processes and files as seen from outside.
func (p *Policy) Outside(c Caller) User {
	user := User{UID: uint32(c.UID), GID: uint32(c.GID)}
	if c.UID == 0 {
		user = User{UID: Nobody, GID: Nobody}
		if p.User != nil && p.User.UID != 0 {
			user = *p.User
		}
		if user.GID == 0 {
			user.GID = Nobody
		}
	}
	return user
}

// identify decides the payload's identity. If root starts sbxrun, bwrap runs with an unprivileged uid, because a
// payload with uid 0 outside would own all of root's files. Inside, the payload may still have uid 0.
func (p *Plan) identify(pol *Policy, c Caller) (user User) {
	user = pol.Outside(c)
	if c.UID == 0 {
		p.cred = &proc.Cred{UID: user.UID, GID: user.GID}
		p.mapOwners = pol.User == nil || pol.User.UID == 0
	}
	inside := pol.User
	if inside == nil {
		inside = pol.Inside
	}
	if inside != nil && *inside != user {
		user = *inside
		p.identity = []string{"--uid", strconv.Itoa(int(user.UID)), "--gid", strconv.Itoa(int(user.GID))}
	}
	return user
}

// checkIDs rejects IDs that bubblewrap (at least up to 0.12) writes into uid_map as negative numbers.
func checkIDs(inside, outside User, named bool) error {
	for _, id := range []uint32{inside.UID, inside.GID, outside.UID, outside.GID} {
		if id < 1<<31 {
			continue
		}
		e := &result.Error{Code: "user", Message: fmt.Sprintf("bubblewrap cannot set up a sandbox for uid or gid %d: ids must be below %d", id, uint32(1<<31)), Hint: "run sbxrun as another user"}
		if named {
			e.Hint = "name other ids with --user"
		}
		return e
	}
	return nil
}

// environment sets the payload's environment: the defaults and the additions of the policy. bwrap itself runs with an
// empty environment, because a LD_PRELOAD for the payload must not affect bwrap, which runs outside the sandbox.
func (p *Plan) environment(pol *Policy, sandboxPath string) {
	p.path = sandboxPath
	const libraries = "LD_LIBRARY_PATH"
	var set values.Environment
	put := func(list []values.Var) {
		for _, v := range list {
			set.Put(v)
		}
	}
	put(pol.Base.Vars())
	if p.devices != nil {
		put(p.devices.Env.Vars())
	}
	put([]values.Var{{Name: "PATH", Value: sandboxPath}, {Name: "HOME", Value: Home}, {Name: "USER", Value: UserName}, {Name: "LOGNAME", Value: UserName}})
	put(pol.Env.Vars())
	defaults := []values.Var{{Name: "PYTHONUNBUFFERED", Value: "1"}}
	if !pol.Captured {
		defaults = nil
	}
	if !slices.ContainsFunc([]string{"LANG", "LC_ALL", "LC_CTYPE"}, func(name string) bool { _, given := set.Lookup(name); return given }) {
		defaults = append(defaults, values.Var{Name: "LANG", Value: "C.UTF-8"}) // in the C locale, programs print ? instead of non-ASCII characters
	}
	for _, v := range defaults {
		if _, given := set.Lookup(v.Name); !given {
			set.Put(v)
		}
	}
	if p.devices != nil && len(p.devices.Libraries) > 0 {
		given, _ := set.Lookup(libraries)
		set.Put(values.Var{Name: libraries, Value: p.libraryPath(given)})
	}
	set.Put(values.Var{Name: "PWD", Value: p.Workdir})
	p.env = set.Vars()
}
