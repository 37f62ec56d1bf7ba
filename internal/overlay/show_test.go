package overlay

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

// git(1) accepts a patch of every change between files, links and directories, and the result is that of an apply.
func TestPatchTaken(t *testing.T) {
	t.Parallel()
	git, err := exec.LookPath("git")
	if err != nil {
		t.Skip(err)
	}
	layer, source, tree := laid(t)
	kinds := map[string]func(dir, name string){
		"text":  func(dir, name string) { put(t, dir, name, dir+"\n") },
		"open":  func(dir, name string) { put(t, dir, name, dir) }, // without a final newline
		"empty": func(dir, name string) { put(t, dir, name, "") },
		"closed": func(dir, name string) {
			put(t, dir, name, "same\n")
			check.Must(t, os.Chmod(filepath.Join(dir, name), 0o600))
		},
		"group": func(dir, name string) {
			put(t, dir, name, "same\n")
			check.Must(t, os.Chmod(filepath.Join(dir, name), 0o654))
		},
		"program": func(dir, name string) {
			put(t, dir, name, "same\n")
			check.Must(t, os.Chmod(filepath.Join(dir, name), 0o744))
		},
		"link":  func(dir, name string) { check.Must(t, os.Symlink(dir, filepath.Join(dir, name))) },
		"dir":   func(dir, name string) { put(t, dir, name+"/in", dir+"\n"); put(t, dir, name+"/deep/in", "same\n") },
		"other": func(dir, name string) { check.Must(t, unix.Mkfifo(filepath.Join(dir, name), 0o644)) },
		"none":  func(dir, name string) {},
	}
	for before, old := range kinds {
		for after, now := range kinds {
			if before == "other" && after != "none" {
				continue // it blocks a later path
			}
			name := before + " to " + after
			old(source, name)
			switch {
			case after == "none" && before != "none":
				wipe(t, layer, name)
			case after == "dir" && before == "dir":
				put(t, layer, name+"/in", "other\n")
				wipe(t, layer, name+"/deep")
			default:
				now(layer, name)
			}
		}
	}
	for _, name := range []string{"end ", " ", "tab\t", "new\nline", "a b/a b", "\xff", `quote"`, "b/x b/x"} {
		put(t, source, "odd/"+name, "old\n")
		put(t, layer, "odd/"+name, "new\n")
	}
	list, _ := lines(t, tree)
	var b bytes.Buffer
	check.Must(t, tree.Patch(&b, list))
	copied := filepath.Join(filepath.Dir(source), "copied")
	out, err := exec.Command("cp", "-a", source, copied).CombinedOutput()
	check.Require(t, err == nil, "%v %s", err, out)
	apply := exec.Command(git, "apply", "--whitespace=nowarn", "-")
	apply.Dir, apply.Stdin, apply.Env = copied, &b, []string{"GIT_CEILING_DIRECTORIES=" + filepath.Dir(source), "GIT_CONFIG_NOSYSTEM=1", "HOME=/"}
	text := b.String()
	out, err = apply.CombinedOutput()
	check.Require(t, err == nil && len(out) <= 0, "%v\n%s\nof:\n%s", err, out, text)
	_, err = tree.Apply(context.Background(), list, Options{Delete: true})
	check.Must(t, err)
	check.NoDiff(t, cmp.Diff(files(t, source), files(t, copied)), "-apply +git apply")
}

// files returns the files in a directory as git(1) sees them.
func files(t *testing.T, dir string) map[string]string {
	found := map[string]string{}
	check.Must(t, filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		check.Must(t, err)
		below, _ := filepath.Rel(dir, name)
		switch info.Mode().Type() {
		case 0:
			text, err := os.ReadFile(name)
			check.Must(t, err)
			found[below] = fmt.Sprintf("%v %q", info.Mode()&0o100, text)
		case os.ModeSymlink:
			target, err := os.Readlink(name)
			check.Must(t, err)
			found[below] = "-> " + target
		}
		return nil
	}))
	return found
}
