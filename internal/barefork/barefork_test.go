// Package barefork has no code. Its tests read the object code of sbxrun, and check
// what runs after a bare fork: in the keeper, and in the processes that enter a
// sandbox. They are clones without exec of a process with many threads, so nothing
// in them may call into the Go runtime (see proc.BareFork), and their stack cannot
// grow: the fork sets the goroutine's stack guard so that every check of the stack
// aborts.
//
// The source says so with go:nosplit, go:norace and go:nocheckptr, but it is the
// compiler that decides where it calls the write barrier of the garbage collector,
// or a function that panics. The linker checks how much stack a chain of nosplit
// functions takes, but it does not know the target of a call through a pointer.
//
// So the test starts at the roots, follows every call in the disassembly, and fails
// on every call into the runtime that the tables do not allow. It adds the frames up
// along the deepest chain, and compares the sum with the stack that there is.
package barefork

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The tables. Change them when the engine changes. A symbol is a regular expression
// that matches the whole name, as "go tool nm" prints it. Every row must be needed:
// one that matches nothing fails the test.

const module = `github\.com/sbxrun/sbxrun/`

const (
	systemCall = `internal/runtime/syscall/linux\.Syscall6(\.abi0)?`
	bounds     = `runtime\.panicBounds`
)

var sbxrun = tables{
	roots: []root{
		// The child's half of BareFork runs in the child.
		{symbol: module + `internal/proc\.BareFork`, stack: nosplit},
		{symbol: module + `internal/proc\.\(\*keeperState\)\.run`, stack: nosplit},
		// A process with a stack of its own (CLONE_VM) has a row like this one:
		// {symbol: module + `nsenter\.inside`, stack: 16 << 10},
	},
	callers: []caller{
		{symbol: module + `internal/proc\.\(\*keeperState\)\.fork`, parent: `sync\.\(\*RWMutex\)\.(Lock|Unlock)`},
	},
	bridges: []bridge{
		// k.enter(k.arg)
		{from: module + `internal/proc\.\(\*keeperState\)\.run`, calls: 1, to: []string{module + `nsenter\.enter`}},
		// The assembly that starts such a process has a row like this one, and is itself
		// reached from a root:
		// {from: module + `nsenter\.spawn\.abi0`, calls: 1, to: []string{module + `nsenter\.inside`}, ownStack: true},
	},
	allowed: []allowance{
		{symbol: `syscall\.runtime_(Before|After)Fork(InChild)?`, from: module + `internal/proc\.BareFork`, leaf: true,
			reason: "the hooks that syscall.forkExec uses as well; made for this, and the linker checks their stack"},
		{symbol: systemCall, reason: "assembly without a frame"},

		// Checks of an index that is always in bounds, but the compiler cannot know: the
		// slice is in memory that a function in between could change. A range over a copy in
		// a local variable needs no check. Rather mend the code than add a row: a process
		// that panics after a bare fork can wait for ever for a lock of the runtime.
		{symbol: bounds, from: module + `internal/proc\.\(\*keeperState\)\.forkCommand`, leaf: true, reason: "cuts off what layBounds has appended"},
		{symbol: bounds, from: module + `internal/proc\.\(\*keeperState\)\.takeBounds`, leaf: true, reason: "i of a range over tasks; oom_score_adj has a digit at least"},
		{symbol: bounds, from: module + `internal/proc\.\(\*keeperState\)\.bindStage`, leaf: true, reason: "i of a range over stage; stageType and its like are constants"},
		{symbol: bounds, from: module + `internal/proc\.\(\*keeperState\)\.takeFiles`, leaf: true, reason: "i of a range over files"},
		{symbol: bounds, from: module + `internal/proc\.\(\*keeperState\)\.removeCgroups`, leaf: true, reason: "i of a range over remove"},
		{symbol: bounds, from: module + `nsenter\.\(\*entry\)\.setUp`, leaf: true, reason: "meminfoCopy is a constant"},
		{symbol: bounds, from: module + `nsenter\.\(\*entry\)\.become`, leaf: true, reason: "i of a range over rlimits or candidates; shell has two elements at least"},
	},
	forks: `syscall\.runtime_AfterForkInChild`,
	forkers: []string{
		`syscall\.forkAndExecInChild1`, // os/exec: the standard library's business
		module + `internal/proc\.BareFork`,
	},
}

// enterField is the field of proc.Command that is called through k.enter: whatever
// the source assigns to it must be a target of the bridge.
const enterField = "Enter"

// TestObjectCode checks sbxrun as it is released, for both architectures, and as
// distributions build it: position-independent.
func TestObjectCode(t *testing.T) {
	limit := nosplitLimit(t)
	for _, b := range []struct{ name, arch, mode string }{
		{"amd64", "amd64", "exe"},
		{"arm64", "arm64", "exe"},
		{"amd64-pie", "amd64", "pie"},
	} {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			o := build(t, repository(t), "./cmd/sbxrun", b.arch, "-buildmode="+b.mode)
			r := sbxrun.check(o, limit)
			short := strings.NewReplacer(modulePath(t)+"/", "")
			for _, p := range r.problems {
				t.Error(short.Replace(p))
			}
			for _, c := range r.chains {
				t.Log(short.Replace(c))
			}
			t.Logf("%d functions can run after a bare fork", len(r.seen))
			for _, name := range assembly(t) {
				if !r.seen[name] && !r.seen[name+".abi0"] {
					t.Errorf("%s is assembly and no root of the table reaches it: it may start a process that the table does not know", name)
				}
			}
		})
	}
}

// TestEnterFunctions finds every function that the source assigns to [enterField].
func TestEnterFunctions(t *testing.T) {
	targets := 0
	sources(t, ".go", func(dir string, file []byte) {
		tree, err := parser.ParseFile(token.NewFileSet(), dir, file, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		found := func(value ast.Expr) {
			targets++
			id, ok := value.(*ast.Ident)
			if !ok {
				t.Errorf("%s: %s is set to something that is not a function of the same package", dir, enterField)
				return
			}
			if symbol := path.Join(modulePath(t), dir) + "." + id.Name; !sbxrun.bridged(symbol) {
				t.Errorf("%s: %s is set to %s, which is in no bridge of the table", dir, enterField, symbol)
			}
		}
		ast.Inspect(tree, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.KeyValueExpr:
				if key, ok := n.Key.(*ast.Ident); ok && key.Name == enterField {
					found(n.Value)
				}
			case *ast.AssignStmt:
				for i, left := range n.Lhs {
					if s, ok := left.(*ast.SelectorExpr); ok && s.Sel.Name == enterField && len(n.Rhs) == len(n.Lhs) {
						found(n.Rhs[i])
					}
				}
			}
			return true
		})
	})
	if targets == 0 {
		t.Errorf("nothing sets the field %s: it has another name now, which belongs into the table", enterField)
	}
}

// nosplitLimit returns how much stack the toolchain guarantees below the frame of a
// function that is not nosplit: internal/abi, StackNosplitBase. Its prologue makes
// sure of that before the fork, and the child's stack is a copy.
func nosplitLimit(t *testing.T) int {
	t.Helper()
	file := filepath.Join(goEnv(t, "GOROOT"), "src/internal/abi/stack.go")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^\s*StackNosplitBase\s*=\s*(\d+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s does not define StackNosplitBase", file)
	}
	return number(string(m[1]))
}

// assembly returns the symbols of the functions that the module itself has in
// assembly.
func assembly(t *testing.T) (symbols []string) {
	t.Helper()
	text := regexp.MustCompile(`(?m)^TEXT\s+·(\w+)(?:<ABIInternal>)?\(SB\)`)
	sources(t, ".s", func(dir string, file []byte) {
		for _, m := range text.FindAllSubmatch(file, -1) {
			symbols = append(symbols, path.Join(modulePath(t), dir)+"."+string(m[1]))
		}
	})
	return symbols
}

// sources calls do for every file of the module that is built and has the extension.
func sources(t *testing.T, extension string, do func(dir string, file []byte)) {
	t.Helper()
	root := repository(t)
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := d.Name()
		if d.IsDir() {
			if name != root && (base == "testdata" || base[0] == '.' || base[0] == '_') {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(base) != extension || strings.HasSuffix(base, "_test.go") {
			return nil
		}
		file, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(name))
		if err != nil {
			return err
		}
		do(filepath.ToSlash(dir), file)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
