package barefork

import (
	"fmt"
	"slices"
	"strings"
)

// This file follows the calls from the roots.

// tables describe a program. The patterns match whole symbols.
type tables struct {
	roots   []root
	callers []caller
	bridges []bridge
	allowed []allowance
	// forks is the runtime's hook that a bare fork must call, and forkers are all
	// functions of the program that call it, so that no fork is missed.
	forks   string
	forkers []string
}

// root is a function in which a bare fork starts.
type root struct {
	symbol string
	// stack is the maximum size in bytes of its frame and all frames below it,
	// including the return address. nosplit stands for the size that the toolchain
	// guarantees to a nosplit function whose caller is not nosplit; then only callers
	// may call the root.
	stack int
}

// caller is a function that continues in both processes after the fork. In the child
// it calls a root; all its other calls must be for the parent alone. It is not nosplit,
// so its prologue guarantees the stack below its frame, and the child's stack is a copy.
type caller struct{ symbol, parent string }

const nosplit = -1

// bridge names the targets of a function's calls through pointers. It includes their
// number, so that a new one is noticed. A jump table, to which the compiler translates a
// large switch, needs a bridge without targets.
type bridge struct {
	from  string
	calls int
	to    []string
	// ownStack is set if each target begins on another stack and is a root.
	ownStack bool
}

// allowance allows calls into the runtime, from any function if from is "". With leaf,
// the check does not follow the call. An optional allowance may be unused.
type allowance struct {
	symbol, from   string
	leaf, optional bool
	reason         string
}

// result is the result of [tables.check].
type result struct {
	problems []string
	chains   []string        // the deepest chain of each root
	seen     map[string]bool // functions that can run
}

// checker is one check of one program.
type checker struct {
	tables
	*object
	result
	limit            int
	needed           map[any]bool // used rows of the tables
	isRoot, isCaller map[string]bool
	walking          map[string]bool
	deep             map[string]chain
}

// chain is a function and the deepest chain of calls below it.
type chain struct {
	bytes int
	names []string
}

// check follows all calls from the roots. limit is the value of nosplit.
func (t tables) check(o *object, limit int) result {
	c := &checker{tables: t, object: o, limit: limit, needed: map[any]bool{}, isRoot: map[string]bool{}, isCaller: map[string]bool{},
		walking: map[string]bool{}, deep: map[string]chain{}, result: result{seen: map[string]bool{}}}
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

// bridged reports whether a function is the target of a bridge.
func (t tables) bridged(name string) bool {
	return slices.ContainsFunc(t.bridges, func(b bridge) bool {
		return slices.ContainsFunc(b.to, func(to string) bool { return whole(to).MatchString(name) })
	})
}

// some returns the functions that a pattern matches. No match is a problem.
func (c *checker) some(pattern, what string) []string {
	names := c.matching(pattern)
	if len(names) == 0 {
		c.problem("%s %s: the program has no such function", what, pattern)
	}
	return names
}

func (c *checker) run() error {
	type start struct {
		root
		name string
	}
	var starts []start
	var next []string
	for _, r := range c.roots {
		for _, name := range c.some(r.symbol, "root") {
			c.isRoot[name] = true
			starts = append(starts, start{r, name})
			next = append(next, name)
		}
	}
	if err := c.findForks(); err != nil {
		return err
	}
	if err := c.checkCallers(); err != nil {
		return err
	}
	// Disassemble in rounds, because objdump spends most of its time starting.
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
			targets, _ := c.follow(name)
			found = append(found, targets...)
		}
		next = found
	}
	for _, s := range starts {
		if err := c.measure(s.root, s.name); err != nil {
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

// findForks reports forks of the program that are missing in the tables.
func (c *checker) findForks() error {
	if c.forks == "" {
		return nil
	}
	for _, hook := range c.some(c.forks, "hook") {
		names, err := c.object.callers(hook)
		if err != nil {
			return err
		}
		for _, name := range names {
			if i := slices.IndexFunc(c.forkers, func(f string) bool { return whole(f).MatchString(name) }); i >= 0 {
				c.needed[&c.forkers[i]] = true
			} else {
				c.problem("%s forks, and is not in the table of those that do", name)
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

// checkCallers reports callers that call anything but roots and the functions allowed in the parent,
// and callers that do not check their stack: those may have less of it than the toolchain guarantees.
func (c *checker) checkCallers() error {
	for _, row := range c.tables.callers {
		names := c.some(row.symbol, "caller")
		if err := c.disassemble(names); err != nil {
			return err
		}
		for _, name := range names {
			c.isCaller[name] = true
			f, checked := c.functions[name], false
			for _, call := range f.calls {
				switch {
				case strings.HasPrefix(call.to, "runtime.morestack"):
					checked = true
				case !c.isRoot[call.to] && !whole(row.parent).MatchString(call.to):
					c.problem("caller %s: %s: calls %s, which is no root, nor for the parent alone", name, call.at, call.to)
				}
			}
			for _, at := range f.indirect {
				c.problem("caller %s: calls through a pointer: %s", name, at)
			}
			if !checked {
				c.problem("caller %s: does not make sure of its stack: it is nosplit itself", name)
			}
		}
	}
	return nil
}

// follow returns the functions that a function calls on the same stack and that need
// checking. pushes is true if it makes any call at all. follow reports forbidden calls.
func (c *checker) follow(name string) (targets []string, pushes bool) {
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
			} else if !c.isRoot[target] {
				c.problem("%s begins on a stack of its own, and is no root", target)
			}
		}
	}
	return targets, pushes
}

// measure compares the stack use of the deepest chain below a root with the stack size.
func (c *checker) measure(r root, name string) error {
	stack := r.stack
	if stack == nosplit {
		stack = c.limit
		names, err := c.object.callers(name)
		if err != nil {
			return err
		}
		for _, from := range names {
			if !c.isCaller[from] {
				c.problem("%s calls the root %s, and is not in the table of callers", from, name)
			}
		}
		if len(names) == 0 {
			c.problem("root %s: nothing calls it; is it on a stack of its own?", name)
		}
	}
	deepest := c.deepest(name)
	// A word below the caller's frame is in use: on amd64 for the return address, on
	// arm64 for the frame pointer, which each function saves just below its frame.
	bytes := word + deepest.bytes
	c.chains = append(c.chains, fmt.Sprintf("%s: %d of %d bytes of stack, %d left: %s", name, bytes, stack, stack-bytes, strings.Join(deepest.names, " → ")))
	if bytes > stack {
		c.problem("%s: takes %d bytes of stack, and has %d: %s", name, bytes, stack, strings.Join(deepest.names, " → "))
	}
	return nil
}

// word is the size of an address.
const word = 8

// deepest returns the stack use of a function and the deepest chain below it: frames,
// and on amd64 the return addresses that calls push.
func (c *checker) deepest(name string) chain {
	if d, ok := c.deep[name]; ok {
		return d
	}
	f := c.functions[name]
	if f == nil {
		return chain{} // a forbidden call, already reported
	}
	if c.walking[name] {
		c.problem("%s: calls itself, directly or not", name)
		return chain{}
	}
	c.walking[name] = true
	targets, pushes := c.follow(name)
	push := 0
	if pushes && c.arch == "amd64" {
		push = word
	}
	below := chain{}
	for _, target := range targets {
		if d := c.deepest(target); d.bytes > below.bytes || below.names == nil {
			below = d
		}
	}
	delete(c.walking, name)
	d := chain{f.frame + push + below.bytes, append([]string{fmt.Sprintf("%s (%d)", name, f.frame)}, below.names...)}
	c.deep[name] = d
	return d
}

// inRuntime reports whether a symbol's name belongs to the runtime.
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
	// Functions that the runtime provides to other packages under their names (go:linkname).
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
