package barefork

import (
	"fmt"
	"slices"
	"strings"
)

// This file follows the calls from the roots.

// tables are what is known about a program. The patterns match whole symbols.
type tables struct {
	roots   []root
	bridges []bridge
	allowed []allowance
	// forks is the hook of the runtime that a bare fork must call, and forkers are
	// all functions of the program that call it. Whatever calls a forker that is
	// also a root must be the caller of a root: so no fork is forgotten.
	forks   string
	forkers []string
}

// root is a function that begins to run in a bare fork.
type root struct {
	symbol string
	// stack is how many bytes its frame and all below it may take, the return
	// address included; or nosplit, for what a nosplit function may take that is
	// called by one that is not, which is the caller then.
	stack  int
	caller string
}

const nosplit = -1

// bridge says where the calls through a pointer go that a function contains. They are
// counted, so that no other can come in unseen. A jump table, which a large switch is
// compiled to, needs a bridge to nowhere.
type bridge struct {
	from  string
	calls int
	to    []string
	// ownStack: each target begins on another stack, and is a root.
	ownStack bool
}

// allowance allows calls into the runtime, from any function if from is "". With leaf,
// the callee is not looked at. An optional one need not be needed.
type allowance struct {
	symbol, from   string
	leaf, optional bool
	reason         string
}

// result is what [tables.check] finds.
type result struct {
	problems []string
	chains   []string        // the deepest chain of each root
	depths   map[string]int  // of each root, what it takes of the stack
	seen     map[string]bool // what can run
}

// checker is one check of one program.
type checker struct {
	tables
	*object
	result
	limit   int
	needed  map[any]bool // rows of the tables
	walking map[string]bool
	deep    map[string]chain
}

// chain is a function and the deepest chain of calls below it.
type chain struct {
	bytes int
	names []string
}

// check follows all calls from the roots. limit is what stands for nosplit.
func (t tables) check(o *object, limit int) result {
	c := &checker{tables: t, object: o, limit: limit, needed: map[any]bool{}, walking: map[string]bool{}, deep: map[string]chain{},
		result: result{seen: map[string]bool{}, depths: map[string]int{}}}
	if err := c.run(); err != nil {
		c.problem("%v", err)
	}
	slices.Sort(c.problems)
	c.problems = slices.Compact(c.problems)
	return c.result
}

func (c *checker) problem(format string, args ...any) {
	c.problems = append(c.problems, fmt.Sprintf(format, args...))
}

// bridged says whether a function is the target of a bridge.
func (t tables) bridged(name string) bool {
	return slices.ContainsFunc(t.bridges, func(b bridge) bool {
		return slices.ContainsFunc(b.to, func(to string) bool { return whole(to).MatchString(name) })
	})
}

// some returns the functions that a pattern matches, and finds fault if there is none.
func (c *checker) some(pattern, what string) []string {
	names := c.matching(pattern)
	if len(names) == 0 {
		c.problem("%s %s: the program has no such function", what, pattern)
	}
	return names
}

func (c *checker) run() error {
	isRoot, callers := map[string]bool{}, map[string]bool{}
	type start struct {
		root
		name string
	}
	var starts []start
	for _, r := range c.roots {
		for _, name := range c.some(r.symbol, "root") {
			isRoot[name] = true
			starts = append(starts, start{r, name})
		}
		if r.caller != "" {
			for _, name := range c.some(r.caller, "caller") {
				callers[name] = true
			}
		}
	}
	if err := c.findForks(isRoot, callers); err != nil {
		return err
	}
	// In rounds, because to start objdump takes longer than what it does.
	next := make([]string, 0, len(starts))
	for _, s := range starts {
		next = append(next, s.name)
	}
	for len(next) > 0 {
		if err := c.disassemble(next); err != nil {
			return err
		}
		var found []string
		for _, name := range next {
			if c.seen[name] {
				continue
			}
			c.seen[name] = true
			targets, _ := c.follow(name, isRoot)
			found = append(found, targets...)
		}
		next = found
	}
	for _, s := range starts {
		if err := c.measure(s.root, s.name, isRoot); err != nil {
			return err
		}
	}
	for i := range c.bridges {
		if b := &c.bridges[i]; !c.needed[b] {
			c.problem("bridge from %s: no root reaches such a function, or it calls nothing through a pointer", b.from)
		}
	}
	for i := range c.allowed {
		if a := &c.allowed[i]; !c.needed[a] && !a.optional {
			c.problem("allowance of %s: not needed, from %q", a.symbol, a.from)
		}
	}
	return nil
}

// findForks finds fault if the program forks in a place that is not in the tables.
func (c *checker) findForks(isRoot, callers map[string]bool) error {
	if c.forks == "" {
		return nil
	}
	for _, hook := range c.some(c.forks, "hook") {
		forkers, err := c.callers(hook)
		if err != nil {
			return err
		}
		for _, name := range forkers {
			i := slices.IndexFunc(c.forkers, func(f string) bool { return whole(f).MatchString(name) })
			if i < 0 {
				c.problem("%s forks, and is not in the table of those that do", name)
				continue
			}
			c.needed[&c.forkers[i]] = true
			if !isRoot[name] {
				continue
			}
			from, err := c.callers(name)
			if err != nil {
				return err
			}
			for _, f := range from {
				if !callers[f] {
					c.problem("%s calls %s, and is the caller of no root", f, name)
				}
			}
		}
	}
	for i := range c.forkers {
		if f := &c.forkers[i]; !c.needed[f] {
			c.problem("%s does not fork", *f)
		}
	}
	return nil
}

// follow returns the functions that a function calls on the same stack, and those
// that take nothing of it. It finds fault with what must not be called.
func (c *checker) follow(name string, isRoot map[string]bool) (targets []string, pushes bool) {
	f := c.functions[name]
	for _, u := range f.unknown {
		c.problem("%s: not understood: %s", name, u)
	}
	for _, call := range f.calls {
		pushes = true
		a := slices.IndexFunc(c.allowed, func(a allowance) bool {
			return whole(a.symbol).MatchString(call.to) && (a.from == "" || whole(a.from).MatchString(name))
		})
		if a >= 0 {
			c.needed[&c.allowed[a]] = true
		}
		switch {
		case a >= 0 && c.allowed[a].leaf:
		case a >= 0 || !inRuntime(call.to):
			targets = append(targets, call.to)
		default:
			c.problem("%s: %s: calls %s: %s", name, call.at, call.to, meaning(call.to))
		}
	}
	if len(f.indirect) == 0 {
		return targets, pushes
	}
	pushes = true
	i := slices.IndexFunc(c.bridges, func(b bridge) bool { return whole(b.from).MatchString(name) })
	if i < 0 {
		c.problem("%s: calls through a pointer, in no bridge of the table: %s", name, strings.Join(f.indirect, "; "))
		return targets, pushes
	}
	b := &c.bridges[i]
	c.needed[b] = true
	if len(f.indirect) != b.calls {
		c.problem("%s: %d calls through a pointer, the bridge is for %d: %s", name, len(f.indirect), b.calls, strings.Join(f.indirect, "; "))
	}
	for _, to := range b.to {
		for _, target := range c.some(to, "target") {
			if !b.ownStack {
				targets = append(targets, target)
			} else if !isRoot[target] {
				c.problem("%s begins on a stack of its own, and is no root", target)
			}
		}
	}
	return targets, pushes
}

// measure compares what the deepest chain below a root takes with the stack there is.
func (c *checker) measure(r root, name string, isRoot map[string]bool) error {
	stack := r.stack
	if stack == nosplit {
		stack = c.limit
		// The limit is what the prologue of the caller guarantees.
		if r.caller == "" {
			c.problem("root %s: without a stack of its own it needs a caller", name)
			return nil
		}
		for _, caller := range c.matching(r.caller) {
			if err := c.disassemble([]string{caller}); err != nil {
				return err
			}
			calls := func(is func(string) bool) bool {
				return slices.ContainsFunc(c.functions[caller].calls, func(call call) bool { return is(call.to) })
			}
			if !calls(func(to string) bool { return to == name }) {
				c.problem("caller %s: does not call %s", caller, name)
			}
			if !calls(func(to string) bool { return strings.HasPrefix(to, "runtime.morestack") }) {
				c.problem("caller %s: makes not sure of its stack: it is nosplit itself", caller)
			}
		}
	}
	deepest := c.deepest(name, isRoot)
	// Below the caller's frame: on amd64 the address to return to; on arm64 the frame
	// pointer, which each function saves just below its frame.
	bytes := word + deepest.bytes
	c.depths[name] = bytes
	c.chains = append(c.chains, fmt.Sprintf("%s: %d of %d bytes of stack, %d left: %s", name, bytes, stack, stack-bytes, strings.Join(deepest.names, " → ")))
	if bytes > stack {
		c.problem("%s: takes %d bytes of stack, and has %d: %s", name, bytes, stack, strings.Join(deepest.names, " → "))
	}
	return nil
}

// word is the size of an address.
const word = 8

// deepest returns what a function and all below it take of the stack: frames, and on
// amd64 the addresses that calls push.
func (c *checker) deepest(name string, isRoot map[string]bool) chain {
	if d, ok := c.deep[name]; ok {
		return d
	}
	f := c.functions[name]
	if f == nil {
		return chain{} // one that must not be called, and has been found
	}
	if c.walking[name] {
		c.problem("%s: calls itself, directly or not", name)
		return chain{}
	}
	c.walking[name] = true
	targets, pushes := c.follow(name, isRoot)
	push := 0
	if pushes && c.arch == "amd64" {
		push = word
	}
	below := chain{}
	for _, target := range targets {
		if d := c.deepest(target, isRoot); d.bytes > below.bytes || below.names == nil {
			below = d
		}
	}
	delete(c.walking, name)
	d := chain{f.frame + push + below.bytes, append([]string{fmt.Sprintf("%s (%d)", name, f.frame)}, below.names...)}
	c.deep[name] = d
	return d
}

// inRuntime says whether a symbol is the runtime's, by its name.
func inRuntime(name string) bool {
	pkg, rest, ok := strings.Cut(name[strings.LastIndexByte(name, '/')+1:], ".")
	if !ok {
		return true // no package: made by the linker, or C
	}
	dir := name[:strings.LastIndexByte(name, '/')+1]
	switch {
	case dir == "" && pkg == "runtime", dir == "runtime/", strings.HasPrefix(dir, "internal/runtime/"):
		return true
	case dir == "internal/" && (pkg == "race" || pkg == "msan" || pkg == "asan"):
		return true
	}
	// What the runtime gives to other packages under their name (go:linkname).
	return strings.HasPrefix(rest, "runtime_")
}

// meaning explains a call into the runtime.
func meaning(name string) string {
	name = strings.TrimPrefix(name, "runtime.")
	for _, m := range []struct{ prefix, meaning string }{
		{"gcWriteBarrier", "write barrier: the code stores a pointer; store a uintptr, or an index, or lay it out before the fork"},
		{"wb", "write barrier: the code stores or clears a value with pointers in it"},
		{"typed", "write barrier: the code copies a value with pointers in it"},
		{"morestack", "the function is not nosplit, its stack can grow"},
		{"panic", "the code can panic: an index, a slice or a conversion of one, a division, or a shift"},
		{"goPanic", "the code can panic: an index or a slice"},
		{"race", "instrumentation of the race detector"},
		{"msan", "instrumentation for msan"},
		{"asan", "instrumentation for asan"},
		{"checkptr", "check of unsafe pointers: the function is not nosplit, which implies nocheckptr"},
		{"entersyscall", "a system call that gives up the processor: use syscall.RawSyscall"},
		{"newobject", "the code allocates: a variable escapes"},
		{"makeslice", "the code allocates"},
		{"growslice", "the code allocates: append"},
	} {
		if strings.HasPrefix(name, m.prefix) {
			return m.meaning
		}
	}
	return "a function of the runtime that no row of the table allows"
}
