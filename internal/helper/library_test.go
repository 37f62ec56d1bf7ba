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
				out, err := build.CombinedOutput()
				check.Require(t, err == nil, "%v: %v\n%s", build.Args, err, out)
				out, err = exec.Command(name, "-test.v", "-test.run", "^Example").CombinedOutput()
				check.That(t, err == nil && strings.Contains(string(out), "--- PASS: Example"), "%v\n%s", err, out)
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
		seen := 0
		look := func(o types.Object, typ types.Type) {
			if o.Exported() {
				seen++
				check.That(t, !strings.Contains(typ.String(), module+"internal/"), "%s: %s is %v", name, o.Name(), typ)
			}
		}
		for _, object := range pkg.Scope().Names() {
			o := pkg.Scope().Lookup(object)
			typ := types.Unalias(o.Type())
			look(o, typ)
			named, ok := typ.(*types.Named)
			if _, isType := o.(*types.TypeName); !ok || !isType || !o.Exported() {
				continue
			}
			for m := range named.Methods() {
				look(m, m.Type())
			}
			if u, ok := named.Underlying().(*types.Struct); ok {
				for f := range u.Fields() {
					look(f, f.Type())
				}
			} else {
				look(o, named.Underlying())
			}
		}
		check.That(t, seen >= 5, "only %d types were seen in %s", seen, name)
	}
}
