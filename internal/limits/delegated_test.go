package limits

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

// fakeManager moves the caller by changing its recorded cgroup.
type fakeManager struct {
	root, cgroup string
	err          error
	asked        []string
}

func (f *fakeManager) Cgroup() string { return f.cgroup }

func (f *fakeManager) Enter(name string) (string, error) {
	f.asked = append(f.asked, name)
	if f.err != nil {
		return "", f.err
	}
	dir := f.root + "/cg" + f.cgroup + "/" + name
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	return f.cgroup + "/" + name, os.WriteFile(dir+"/cgroup.controllers", []byte("memory pids\n"), 0o644)
}

// A manager is asked only for limits that are not possible without it, and entered only when cgroups are made.
func TestDelegated(t *testing.T) {
	silent := &result.Error{Code: "limit", Message: "systemd is silent", Hint: "wake it"}
	for _, tt := range []struct {
		name          string
		own           string // controllers of a writable cgroup
		manager       string
		none, refuses error
		request       Request
		want          string // error of Plan, "" for none
		asked         bool   // whether Make enters
	}{
		{"not needed", all, all, nil, nil, Request{Pids: 5}, "", false},
		{"nothing requested", "", all, silent, nil, Request{NoFile: 5}, "", false},
		{"needed", "", all, nil, nil, Request{Pids: 5}, "", true},
		{"no manager", "", all, silent, nil, Request{Pids: 5}, "asked systemd for a scope: systemd is silent", false},
		{"it refuses", "", all, nil, silent, Request{Pids: 5}, "", true},
		{"it has no more", "", "io", nil, nil, Request{Pids: 5}, "lacks the controller pids", false},
		{"it has one of two", "", "pids", nil, nil, Request{Pids: 5, Memory: 1 << 20}, "lacks the controller memory", false},
		{"the scope lacks one", "", all, nil, nil, Request{CPUs: 1}, "", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, required := range []bool{true, false} {
				m, root := fake(t, "/a/leaf", layout{"/a", tt.own, tt.own, "", 0}, layout{"/a/leaf", tt.own, "", "2\n", 0}, layout{"/user", tt.manager, "", "", 0})
				f := &fakeManager{root: root, cgroup: "/user", err: tt.refuses}
				m.manager = func() (manager, error) { return f, tt.none }
				p, err := m.Plan(tt.request, required)
				if required && tt.want != "" {
					e, ok := errors.AsType[*result.Error](err)
					check.Require(t, ok && strings.Contains(e.Message, tt.want) && e.Hint != "", "%#v", err)
					continue
				}
				check.Must(t, err)
				check.That(t, len(f.asked) == 0, "Plan has entered")
				// These are ordinary directories without a cgroup's files, so a required limit always fails.
				_, err = p.Make("x", false)
				check.That(t, required || err == nil, "%v", err)
				entered := len(f.asked) == 1 && f.asked[0] == "sbxrun-x.scope"
				check.That(t, tt.want != "" || entered == tt.asked, "asked %q", f.asked)
				l := p.Limits[0]
				check.That(t, required || tt.refuses == nil || !l.Enforced && strings.Contains(l.Reason, "systemd is silent"), "%+v", l)
			}
		})
	}
}

// A reason that systemd cannot remedy keeps its own hint.
func TestOwnRemedy(t *testing.T) {
	m, root := fake(t, "/c", layout{"/c", all, "", "1\n", 0})
	m.manager = func() (manager, error) {
		return nil, &result.Error{Code: "limit", Message: "systemd is silent", Hint: "wake it"}
	}
	_, err := m.Plan(Request{Pids: 5}, true)
	e, ok := errors.AsType[*result.Error](err)
	check.That(t, ok && !strings.Contains(e.Message, "systemd") && strings.HasPrefix(e.Hint, "d="+root+"/cg/c; mkdir $d/leaf"), "%#v", err)
}
