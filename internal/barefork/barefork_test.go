// Package barefork has no code. Its tests read the object code of sbxrun and check
// the code that runs after a bare fork: in the keeper and in the processes that enter a
// room. These are clones without exec of a process with many threads, so their code
// must not call into the Go runtime (see bareFork in package proc), and their stacks
// cannot grow: each has a stack of fixed size, outside Go's heap.
//
// The source requests this with go:nosplit, go:norace and go:nocheckptr, but the
// compiler decides where to call the write barrier of the garbage collector or a
// function that panics. The linker checks the stack size of a chain of nosplit
// functions, but it does not know the target of a call through a pointer.
//
// So the test starts at the roots, follows every call in the disassembly, and fails
// on every call into the runtime that the tables do not allow. It adds up the frames
// along the deepest chain and compares the sum with the size of the stack.
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
	"runtime"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// These are the tables. Change them when the engine changes. A symbol is a regular
// expression that matches the whole name, as "go tool nm" prints it. Every row must
// be needed: a row that matches nothing fails the test.

const module = `github\.com/sbxrun/sbxrun/`

const systemCall = `internal/runtime/syscall/linux\.Syscall6(\.abi0)?`

// ownStack is the size of a process's own stack: proc.StackSize without the reserved
// space above.
const ownStack = proc.StackSize - 256

// started matches the functions in which a process with its own stack starts.
const started = module + `(internal/proc\.start(Keeper|Exec|Enter)|internal/enter\.start(Inside|Init|Payload))`

var sbxrun = tables{
	roots: []root{
		{symbol: module + `internal/proc\.startKeeper`, stack: ownStack},
		{symbol: module + `internal/proc\.startExec`, stack: ownStack},
		{symbol: module + `internal/proc\.startEnter`, stack: ownStack},
		{symbol: module + `internal/enter\.startInside`, stack: ownStack},
		{symbol: module + `internal/enter\.startInit`, stack: ownStack},
		{symbol: module + `internal/enter\.startPayload`, stack: ownStack},
	},
	bridges: []bridge{
		// c.enter(c.arg)
		{from: module + `internal/proc\.startEnter`, calls: 1, to: []string{module + `internal/enter\.enter`}},
		// The child of a clone.
		{from: module + `internal/proc\.cloneCall\.abi0`, calls: 1, to: []string{started}, ownStack: true},
	},
	allowed: []allowance{
		{symbol: systemCall, reason: "assembly without a frame"},
	},
	forks: module + `internal/proc\.cloneCall\.abi0`,
	forkers: []string{
		module + `internal/proc\.forkNow`,                  // sbxrun forks the keeper
		module + `internal/proc\.\(\*keeperState\)\.spawn`, // the keeper forks its children, into a cgroup
		module + `internal/proc\.Clone`,                    // the entering processes fork
	},
}

// launcher matches the code of the launcher, a separate program that sbxrun copies and never calls,
// and the function that returns its address.
var launcher = regexp.MustCompile(`^` + module + `internal/enter\.launch(Code)?$`)

// enterField is the field of proc.Way that is called as c.enter. Every function that
// the source assigns to it must be a target of the bridge.
const enterField = "Enter"

// TestObjectCode checks sbxrun for both architectures, as released and, as
// distributions build it, position-independent. With -short it checks only builds for
// this machine.
func TestObjectCode(t *testing.T) {
	limit := nosplitLimit(t)
	for _, b := range []struct{ name, arch, mode string }{
		{"amd64", "amd64", "exe"},
		{"arm64", "arm64", "exe"},
		{"amd64-pie", "amd64", "pie"},
	} {
		if testing.Short() && b.name != runtime.GOARCH {
			continue
		}
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
				if launcher.MatchString(name) {
					continue
				}
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
		harness.Must(t, err)
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

// nosplitLimit returns the stack size that the toolchain guarantees below the frame of
// a function that is not nosplit (internal/abi, StackNosplitBase). The function's
// prologue ensures it before the fork, and the child's stack is a copy.
func nosplitLimit(t *testing.T) int {
	t.Helper()
	file := filepath.Join(goEnv(t, "GOROOT"), "src/internal/abi/stack.go")
	text, err := os.ReadFile(file)
	harness.Must(t, err)
	m := regexp.MustCompile(`(?m)^\s*StackNosplitBase\s*=\s*(\d+)$`).FindSubmatch(text)
	if m == nil {
		t.Fatalf("%s does not define StackNosplitBase", file)
	}
	return number(string(m[1]))
}

// assembly returns the symbols of the module's own assembly functions.
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

// sources calls do for every file of the module with the extension, except tests and test data.
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
	harness.Must(t, err)
}
