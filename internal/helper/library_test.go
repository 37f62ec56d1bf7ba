//go:build check

package helper

import (
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// TestLibrary runs the examples of the library as in other programs: with a C library and its threads, and
// position-independent.
func TestLibrary(t *testing.T) {
	for _, b := range []struct {
		name, env string
		flags     []string
		cgo       bool
	}{
		{"position-independent", "CGO_ENABLED=0", []string{"-buildmode=pie"}, false},
		{"with a C library", "CGO_ENABLED=1", nil, true},
		{"for a debugger", "CGO_ENABLED=0", []string{"-gcflags=all=-N -l"}, false},
		{"with the race detector", "CGO_ENABLED=1", []string{"-race"}, true},
	} {
		if _, err := exec.LookPath("gcc"); b.cgo && err != nil {
			continue // no C compiler here
		}
		for _, pkg := range []string{"bwrap", "nsenter", "cleanup"} {
			t.Run(pkg+" "+b.name, func(t *testing.T) {
				t.Parallel()
				name := filepath.Join(t.TempDir(), "examples")
				build := exec.Command("go", append(append([]string{"test", "-c", "-o", name}, b.flags...), "./"+pkg)...)
				build.Dir, build.Env = "../..", append(os.Environ(), b.env)
				if out, err := build.CombinedOutput(); err != nil {
					t.Fatalf("%v: %v\n%s", build.Args, err, out)
				}
				if out, err := exec.Command(name, "-test.v", "-test.run", "^Example").CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: Example") {
					t.Errorf("%v\n%s", err, out)
				}
			})
		}
	}
}

// Other programs can name every type in the API of the library.
func TestLibraryTypes(t *testing.T) {
	list := exec.Command("go", "list", "-trimpath", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}", "./bwrap", "./nsenter", "./cleanup/...")
	list.Dir = "../.."
	out, err := list.Output()
	check.Must(t, err)
	exports := map[string]string{}
	for line := range strings.Lines(string(out)) {
		name, file, _ := strings.Cut(strings.TrimSpace(line), " ")
		exports[name] = file
	}
	load := importer.ForCompiler(token.NewFileSet(), "gc", func(name string) (io.ReadCloser, error) { return os.Open(exports[name]) })
	const module = "github.com/sbxrun/sbxrun/"
	for _, name := range []string{"bwrap", "nsenter", "cleanup", "cleanup/result"} {
		pkg, err := load.Import(module + name)
		check.Must(t, err)
		seen := map[types.Type]bool{}
		var look func(from string, typ types.Type)
		look = func(from string, typ types.Type) {
			if seen[typ] {
				return
			}
			seen[typ] = true
			switch typ := typ.(type) {
			case *types.Alias:
				look(from, types.Unalias(typ))
			case *types.Named:
				for arg := range typ.TypeArgs().Types() {
					look(from, arg)
				}
				owner := typ.Obj().Pkg()
				if owner == nil || !strings.HasPrefix(owner.Path(), module) {
					return
				}
				if strings.Contains(owner.Path(), "/internal/") {
					t.Errorf("%s%s has %v", module, from, typ)
					return
				}
				for m := range typ.Methods() {
					if m.Exported() {
						look(from+"."+m.Name(), m.Type())
					}
				}
				look(from, typ.Underlying())
			case *types.Struct:
				for f := range typ.Fields() {
					if f.Exported() || f.Embedded() { // its fields are promoted
						look(from+"."+f.Name(), f.Type())
					}
				}
			case *types.Interface:
				for m := range typ.Methods() {
					look(from+"."+m.Name(), m.Type())
				}
			case *types.Signature:
				look(from, typ.Params())
				look(from, typ.Results())
			case *types.Tuple:
				for v := range typ.Variables() {
					look(from, v.Type())
				}
			case *types.Map:
				look(from, typ.Key())
				look(from, typ.Elem())
			case interface{ Elem() types.Type }:
				look(from, typ.Elem())
			}
		}
		for _, object := range pkg.Scope().Names() {
			if o := pkg.Scope().Lookup(object); o.Exported() {
				look(name+"."+object, o.Type())
			}
		}
		if len(seen) < 5 {
			t.Errorf("only %d types were seen in %s", len(seen), name)
		}
	}
}
