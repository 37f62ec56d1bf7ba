package server

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/sandbox"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
)

// Concurrent sessions of a tenant cannot exceed its limit on volumes; those of other tenants are not counted.
func TestVolumesAtOnce(t *testing.T) {
	const most = 3
	s := &Server{}
	var all sync.WaitGroup
	begin := make(chan struct{})
	var made [2]atomic.Int32
	for tenant := range made {
		data := t.TempDir()
		for i := range 100 {
			all.Go(func() {
				<-begin
				out := &slot.Policy{Parts: &sandbox.Parts{}}
				defer out.Parts.End()
				err := s.useVolumes(config.Tenant{Volumes: most}, &parts{data: data, volumes: []sandbox.Volume{{Name: fmt.Sprint("v", i), Dest: "/v"}}}, out)
				var e *api.Error
				switch {
				case err == nil:
					made[tenant].Add(1)
				case !errors.As(err, &e) || e.Failure.Code != api.QuotaKept:
					t.Error(err)
				}
			})
		}
	}
	close(begin)
	all.Wait()
	for i := range made {
		n := made[i].Load()
		check.That(t, n == most, "%d volumes of tenant %d", n, i)
	}
}

// The variables of a call with a network list do not change those of other calls.
func TestNetworkVariables(t *testing.T) {
	s, set := &Server{}, &settings{}
	set.policy.Env.Put(values.Var{Name: "JAVA_HOME", Value: "/opt/java"})
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			out := set.policyOf(nil)
			err := s.addParts(t.Context(), set, config.Tenant{}, &parts{spec: network.Spec{Proxied: true}}, &out)
			_, found := out.Env.Lookup("http_proxy")
			check.That(t, err == nil && found, "http_proxy: %v; %v", found, err)
			out.Parts.End()
		})
	}
	all.Wait()
	_, found := set.policy.Env.Lookup("http_proxy")
	check.That(t, !found && len(set.policy.Env.Vars()) == 1, "the variables of all calls: %q", set.policy.Env.Vars())
}
