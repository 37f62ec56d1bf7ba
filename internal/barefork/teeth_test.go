package barefork

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestTeeth verifies that the check finds every broken rule in testdata/teeth.
func TestTeeth(t *testing.T) {
	const own = 4096
	through := func(from, to string, calls int) []bridge {
		return []bridge{{from: `main\.` + from, calls: calls, to: []string{`main\.` + to}}}
	}
	deep := []root{{symbol: `main\.deepAbove`, stack: nosplit}}
	fork := []caller{{symbol: `main\.fork`, parent: `main\.harmless`}}
	spawned := []bridge{{from: `main\.spawn\.abi0`, calls: 1, to: []string{`main\.deepBelow`}, ownStack: true}}
	rows := []struct {
		name   string
		tables tables
		want   string // part of the only problem; "" for none
	}{
		{name: "harmless", want: ""},
		{name: "copies", want: "calls runtime.memmove"},
		{name: "copies", tables: tables{allowed: []allowance{{symbol: `runtime\.memmove`}}}, want: ""},
		{name: "copies", tables: tables{allowed: []allowance{{symbol: `runtime\.memmove`, from: `main\.harmless`}}}, want: "calls runtime.memmove"},
		{name: "harmless", tables: tables{allowed: []allowance{{symbol: `runtime\.memmove`}}}, want: "allowance of runtime\\.memmove: not needed"},
		{name: "storesPointer", want: "write barrier"},
		{name: "clearsPointers", want: "write barrier"},
		{name: "indexes", want: "can panic"},
		{name: "slices", want: "can panic"},
		{name: "divides", want: "can panic"},
		{name: "shifts", want: "can panic"},
		{name: "grows", want: "stack can grow"},
		{name: "callsWhatGrows", want: "main.grows: main.go:"},
		{name: "allocates", want: "allocates"},
		{name: "appends", want: "allocates"},
		{name: "entersRuntime", want: "gives up the processor"},
		{name: "locks", want: "sync.(*RWMutex)"},
		{name: "callsUnlisted", want: "in no bridge of the table"},
		{name: "callsUnlisted", tables: tables{bridges: through("callsUnlisted", "target", 1)}, want: ""},
		{name: "callsUnlisted", tables: tables{bridges: through("callsUnlisted", "storesPointer", 1)}, want: "main.storesPointer: main.go:"},
		{name: "callsUnlisted", tables: tables{bridges: through("callsUnlisted", "absent", 1)}, want: "no such function"},
		{name: "callsUnlisted", tables: tables{bridges: []bridge{{from: `main\.callsUnlisted`, calls: 1, to: []string{`main\.target`}, ownStack: true}}},
			want: "is no root"},
		{name: "callsTwo", tables: tables{bridges: through("callsTwo", "target", 1)}, want: "2 calls through a pointer, the bridge is for 1"},
		{name: "callsItself", tables: tables{bridges: through("callsItself", "callsItself", 1)}, want: "calls itself"},
		{name: "switches", want: "in no bridge of the table"},
		{name: "switches", tables: tables{bridges: []bridge{{from: `main\.switches`, calls: 1}}}, want: ""},
		{name: "harmless", tables: tables{bridges: through("callsItself", "callsItself", 1)}, want: "bridge from main\\.callsItself: no root reaches"},
		{name: "absent", want: "no such function"},
		{name: `stack\.abi0`, want: "changes the stack pointer"},

		// Stack size.
		{name: "deepBelow", tables: tables{roots: []root{{symbol: `main\.deepBelow`, stack: 500}}}, want: ""},
		{name: "deepBelow", tables: tables{roots: []root{{symbol: `main\.deepBelow`, stack: 400}}}, want: "bytes of stack, and has 400"},
		{name: "deepAbove", tables: tables{roots: deep, callers: fork, bridges: through("deepAbove", "deepBelow", 1)}, want: "bytes of stack, and has 800"},
		{name: "deepAbove", tables: tables{roots: deep, callers: fork, bridges: through("deepAbove", "target", 1)}, want: ""},
		{name: "deepAbove", tables: tables{
			roots:   append([]root{{symbol: `main\.deepBelow`, stack: own}}, deep...),
			callers: fork,
			bridges: []bridge{{from: `main\.deepAbove`, calls: 1, to: []string{`main\.deepBelow`}, ownStack: true}},
		}, want: ""},

		// A process with its own stack, started in assembly.
		{name: `spawn\.abi0`, want: "in no bridge of the table"},
		{name: `spawn\.abi0`, tables: tables{
			roots:   []root{{symbol: `main\.spawn\.abi0`, stack: 4}, {symbol: `main\.deepBelow`, stack: 500}},
			bridges: spawned,
		}, want: "main.spawn.abi0: takes"},
		{name: `spawn\.abi0`, tables: tables{
			roots:   []root{{symbol: `main\.spawn\.abi0`, stack: 16}, {symbol: `main\.deepBelow`, stack: 500}},
			bridges: spawned,
		}, want: ""},

		// Callers of roots.
		{name: "deepAbove", tables: tables{roots: deep, bridges: through("deepAbove", "target", 1)}, want: "main.fork calls the root main.deepAbove, and is not in the table"},
		{name: "deepAbove", tables: tables{roots: deep, callers: []caller{{symbol: `main\.fork`}}, bridges: through("deepAbove", "target", 1)},
			want: "calls main.harmless, which is no root"},
		{name: "harmless", tables: tables{callers: []caller{{symbol: `main\.absent`}}}, want: "no such function"},
		{name: "harmless", tables: tables{callers: []caller{{symbol: `main\.forkWithoutPrologue`}}}, want: "nosplit itself"},
		{name: "harmless", tables: tables{callers: []caller{{symbol: `main\.callsUnlisted`}}}, want: "caller main.callsUnlisted: calls through a pointer"},
		{name: "main", tables: tables{roots: []root{{symbol: `main\.deepBelow`, stack: nosplit}}}, want: "nothing calls it"},

		// Functions that fork.
		{name: "harmless", tables: tables{forks: `main\.fill`}, want: "main.deepAbove forks, and is not in the table"},
		{name: "harmless", tables: tables{forks: `main\.fill`, forkers: []string{`main\.deep\w+`}}, want: ""},
		{name: "harmless", tables: tables{forks: `main\.fill`, forkers: []string{`main\.deep\w+`, `main\.target`}}, want: "main\\.target does not fork"},
	}
	limit := nosplitLimit(t)
	for _, arch := range []string{"amd64", "arm64"} {
		if testing.Short() && arch != runtime.GOARCH {
			continue // it would compile the Go runtime again
		}
		t.Run(arch, func(t *testing.T) {
			t.Parallel()
			o := buildTeeth(t, arch)
			for _, row := range rows {
				if row.tables.roots == nil {
					row.tables.roots = []root{{symbol: `main\.` + row.name, stack: own}}
				}
				row.tables.allowed = append([]allowance{{symbol: systemCall, optional: true}}, row.tables.allowed...)
				expect(t, row.name, row.tables.check(o, limit), row.want)
			}
		})
	}
	t.Run("checkptr", func(t *testing.T) {
		t.Parallel()
		o := buildTeeth(t, "amd64", "-gcflags=-d=checkptr")
		pointers := tables{roots: []root{{symbol: `main\.pointers`, stack: own}}}
		expect(t, "pointers", pointers.check(o, limit), "check of unsafe pointers")
	})
}

func buildTeeth(t *testing.T, arch string, flags ...string) *object {
	t.Helper()
	o := build(t, repository(t), "./internal/barefork/testdata/teeth", arch, flags...)
	// Disassemble all functions at once, because objdump spends most of its time starting.
	harness.Must(t, o.disassemble(o.matching(`main\..*|syscall\.RawSyscall6?|`+systemCall)))
	return o
}

// expect fails unless a problem contains want, or, if want is "", if there is any problem.
func expect(t *testing.T, name string, r result, want string) {
	t.Helper()
	t.Logf("%s: %s", name, strings.Join(append(slices.Clone(r.problems), r.chains...), "; "))
	found := slices.ContainsFunc(r.problems, func(p string) bool { return strings.Contains(p, want) })
	if want == "" && len(r.problems) > 0 || want != "" && !found {
		t.Errorf("%s: problems %q, want %q", name, r.problems, want)
	}
}
