package overlay

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/proc"
	tr "github.com/sbxrun/sbxrun/internal/tree"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// laid creates a layer and an original as overlayfs would have them.
func laid(t testing.TB) (layer, source string, tree *Tree) {
	dir := t.TempDir()
	layer, source = filepath.Join(dir, "layer"), filepath.Join(dir, "source")
	check.Must(t, os.Mkdir(layer, 0o755), os.Mkdir(source, 0o755), os.Mkdir(filepath.Join(dir, "outside"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(dir, "outside/secret"), []byte("secret"), 0o600))
	upper, err := os.Open(layer)
	check.Must(t, err)
	tree, err = Open(upper, source, time.Now().Add(time.Minute))
	check.Must(t, err)
	t.Cleanup(func() { upper.Close(); tree.Close() })
	return layer, source, tree
}

func put(t testing.TB, dir, name, text string) {
	t.Helper()
	name = filepath.Join(dir, name)
	check.Must(t, os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644))
}

// wipe creates a whiteout.
func wipe(t testing.TB, dir, name string) {
	t.Helper()
	check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
	check.Must(t, unix.Mknod(filepath.Join(dir, name), unix.S_IFCHR, 0)) // allowed for every user since Linux 5.8 (mknod(2))
}

func lines(t testing.TB, tree *Tree) (list []Change, text string) {
	t.Helper()
	list, warnings, err := tree.Changes(context.Background())
	check.Must(t, err)
	for _, c := range list {
		text += fmt.Sprintf("%s %s %q", c.Kind, c.Type, c.Path)
		if c.Was != "" {
			text += " was " + string(c.Was)
		}
		if c.Same != "" {
			text += " same as " + c.Same
		}
		if c.Conflict {
			text += " conflict"
		}
		text += "\n"
	}
	for _, w := range warnings {
		text += "warning " + w.Error() + "\n"
	}
	return list, text
}

// nothingOutside fails if anything outside of layer and original has changed.
func nothingOutside(t testing.TB, source string) {
	t.Helper()
	outside := filepath.Join(filepath.Dir(source), "outside")
	entries, err := os.ReadDir(outside)
	check.Must(t, err)
	text, err := os.ReadFile(filepath.Join(outside, "secret"))
	check.Must(t, err)
	info, err := os.Stat(outside)
	check.Must(t, err)
	check.Require(t, len(entries) == 1 && string(text) == "secret" && info.Mode().Perm() == 0o755, "outside: %v, %q, %v", entries, text, info.Mode())
	left, _ := filepath.Glob(source + "/.sbxrun-*")
	check.Require(t, len(left) == 0, "left: %q", left)
}

func TestChanges(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, source, "same", "same")
	put(t, layer, "same", "same") // only touched
	put(t, source, "text", "old")
	put(t, layer, "text", "new!")
	put(t, source, "executable", "x")
	put(t, layer, "executable", "x")
	check.Must(t, os.Chmod(filepath.Join(layer, "executable"), 0o755))
	put(t, source, "gone/a/b", "x")
	wipe(t, layer, "gone")
	wipe(t, layer, "never") // of a file created and deleted
	put(t, source, "replaced/old", "x")
	put(t, source, "replaced/kept", "x")
	put(t, layer, "replaced/new", "y")
	put(t, layer, "replaced/kept", "x")
	check.Must(t, unix.Setxattr(filepath.Join(layer, "replaced"), "user.overlay.opaque", []byte("y"), 0))
	put(t, source, "file-to-dir", "x")
	put(t, layer, "file-to-dir/in", "y")
	put(t, source, "dir-to-file/in", "x")
	put(t, layer, "dir-to-file", "y")
	put(t, layer, "bad\xff\nname", "y")
	check.Must(t, os.Symlink("../outside", filepath.Join(layer, "link")))
	check.Must(t, os.Link(filepath.Join(layer, "text"), filepath.Join(layer, "twin")))
	check.Must(t, unix.Mkfifo(filepath.Join(layer, "zfifo"), 0o644))
	list, got := lines(t, tree)
	want := `added file "bad\xff\nname"
changed file "dir-to-file" was directory
mode file "executable"
changed directory "file-to-dir" was file
added file "file-to-dir/in"
deleted directory "gone"
added link "link"
deleted file "replaced/old"
added file "replaced/new"
changed file "text"
added file "twin" same as text
added other "zfifo"
`
	diff := cmp.Diff(want, got)
	check.Require(t, diff == "", "-want +got:\n%s", diff)
	a, err := tree.Apply(context.Background(), list, Options{})
	check.Must(t, err)
	check.That(t, len(a.Left) == 4 && len(a.Made) == len(list)-4, "%d made, left %v", len(a.Made), a.Left)
	// The remaining changes, with the current contents.
	list, _ = lines(t, tree)
	_, err = tree.Apply(context.Background(), list, Options{Delete: true, Force: true})
	check.Must(t, err)
	_, got = lines(t, tree)
	check.That(t, got == "added other \"zfifo\"\n", "after the apply:\n%s", got)
	var one, two unix.Stat_t
	check.Must(t, unix.Stat(filepath.Join(source, "text"), &one), unix.Stat(filepath.Join(source, "twin"), &two))
	check.That(t, one.Ino == two.Ino, "two names of a file have become two files")
	nothingOutside(t, source)
}

func TestConflict(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, source, "text", "old")
	put(t, source, "dir/deep/file", "x")
	put(t, layer, "text", "new")
	wipe(t, layer, "dir")
	tree.Since = time.Now().Add(-time.Minute)
	list, got := lines(t, tree)
	want := "deleted directory \"dir\" conflict\nchanged file \"text\" conflict\n"
	check.That(t, got == want, "%s, want %s", got, want)
	_, err := tree.Apply(context.Background(), list, Options{Delete: true})
	check.That(t, err != nil && strings.Contains(err.Error(), "has changed on the host"), "applied: %v", err)
	_, err = tree.Apply(context.Background(), list, Options{Delete: true, Force: true})
	check.OK(t, err)
	// A removed file is a conflict only if the layer's is a copy of the original's.
	for _, name := range []string{"copy", "dir2/file", "new", "sub/moved"} {
		put(t, layer, name, "mine")
	}
	check.Must(t, os.Mkdir(filepath.Join(source, "sub"), 0o755))
	for _, name := range []string{"copy", "dir2", "dir2/file", "sub/moved"} {
		check.Must(t, unix.Setxattr(filepath.Join(layer, name), tr.CopiedXattr, nil, 0))
	}
	_, got = lines(t, tree)
	check.That(t, got == "added file \"copy\" conflict\nadded directory \"dir2\" conflict\nadded file \"dir2/file\"\nadded file \"new\"\nadded file \"sub/moved\" conflict\n", "%v", got)
	check.Must(t, os.RemoveAll(filepath.Join(layer, "sub")), os.RemoveAll(filepath.Join(layer, "dir2")), os.RemoveAll(filepath.Join(layer, "copy")))
	// Changes of the original after the comparison.
	put(t, source, "text", "old")
	put(t, layer, "text", "newer")
	tree.Since = time.Now().Add(time.Minute)
	list, _ = lines(t, tree)
	check.Must(t, os.Remove(filepath.Join(source, "text")))
	_, err = tree.Apply(context.Background(), Select(list, []string{"text"}), Options{})
	check.That(t, err != nil, "made anew, although somebody has removed it")
	tree.Since = time.Now().Add(time.Minute)
	put(t, layer, "another", "mine")
	list, _ = lines(t, tree)
	tree.Since = time.Now().Add(-time.Minute)
	put(t, source, "another", "theirs")
	_, err = tree.Apply(context.Background(), list, Options{})
	check.That(t, err != nil, "applied over a file of somebody else's")
	nothingOutside(t, source)
}

// Apply copies permissions without special bits, also those that exclude the owner.
func TestApplyModes(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, layer, "setuid", "x")
	check.Must(t, unix.Chmod(filepath.Join(layer, "setuid"), 0o6755))
	check.Must(t, unix.Setxattr(filepath.Join(layer, "setuid"), "user.attribute", []byte("x"), 0))
	if os.Geteuid() == 0 {
		check.Must(t, unix.Mknod(filepath.Join(layer, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		check.Must(t, os.Chown(source, 1234, 1234))
	}
	list, _ := lines(t, tree)
	_, err := tree.Apply(context.Background(), list, Options{})
	check.Must(t, err)
	var st unix.Stat_t
	check.Must(t, unix.Stat(filepath.Join(source, "setuid"), &st))
	check.That(t, st.Mode&0o7777 == 0o755, "mode %o", st.Mode)
	n, err := unix.Getxattr(filepath.Join(source, "setuid"), "user.attribute", nil)
	check.That(t, err != nil, "an attribute of %d bytes", n)
	check.That(t, os.Geteuid() != 0 || st.Uid == 1234, "owner %d", st.Uid)
	_, err = os.Lstat(filepath.Join(source, "null"))
	check.That(t, err != nil, "a device was made")
}

// Apply stays in the original while another process exchanges directories of layer and original with
// links that lead out.
func TestApplyRace(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	for i := range 40 {
		put(t, layer, fmt.Sprintf("d/f%d", i), strings.Repeat("x", 1000))
		put(t, source, fmt.Sprintf("d/f%d", i), "old")
		put(t, source, fmt.Sprintf("d/sub/g%d", i), "old")
	}
	wipe(t, layer, "d/sub")
	outside := filepath.Join(filepath.Dir(source), "outside")
	for _, dir := range []string{layer, source} {
		check.Must(t, os.Symlink(outside, filepath.Join(dir, ".evil")))
	}
	list, _ := lines(t, tree)
	stop := harness.Meanwhile(func() {
		for _, dir := range []string{layer, source} {
			_ = unix.Renameat2(unix.AT_FDCWD, dir+"/d", unix.AT_FDCWD, dir+"/.evil", unix.RENAME_EXCHANGE)
		}
	})
	for range 200 {
		_, _ = tree.Apply(context.Background(), list, Options{Delete: true, Force: true})
	}
	stop()
	nothingOutside(t, source)
}

// A file that another process puts in place at any moment of an apply is kept.
func TestApplyTheirs(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, layer, "changed", strings.Repeat("mine", 10_000))
	put(t, layer, "file-to-dir/in", "mine")
	put(t, layer, "dir-to-file", "mine")
	wipe(t, layer, "gone")
	wipe(t, layer, "gone-dir")
	names := map[string]string{"changed": "", "file-to-dir": "", "dir-to-file": "/new", "gone": "", "gone-dir": "/deep/new"}
	conflicts := 0
	for name, below := range names {
		for n := range 60 {
			at := filepath.Join(source, name)
			check.Must(t, os.RemoveAll(at))
			if below == "" {
				put(t, source, name, "old")
			} else {
				check.Must(t, os.MkdirAll(filepath.Dir(at+below), 0o755))
			}
			// The kernel's clock for st_ctime may advance only in ticks.
			var st unix.Stat_t
			check.Must(t, unix.Stat(filepath.Dir(at+below), &st))
			if below == "" {
				check.Must(t, unix.Stat(at, &st))
			}
			tree.Since = time.Unix(st.Ctim.Unix())
			theirs := filepath.Join(filepath.Dir(source), "theirs")
			for check.Must(t, os.WriteFile(theirs, []byte("theirs"), 0o644)); !tree.later(&st); check.Must(t, os.Chmod(theirs, 0o644), unix.Stat(theirs, &st)) {
			}
			list, _ := lines(t, tree)
			list = Select(list, []string{name})
			begun, done := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(done)
				<-begun
				for range n * 20 {
					_, _ = os.Lstat(source + "/none/1")
				}
				_ = os.Rename(theirs, at+below) // may fail
			}()
			close(begun)
			_, err := tree.Apply(context.Background(), list, Options{Delete: true})
			<-done
			if result.CodeOf(err) == "conflict" {
				conflicts++
			} else if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			_, gone := os.Lstat(theirs)
			b, err := os.ReadFile(at + below)
			check.Require(t, gone == nil || string(b) == "theirs", "%s, try %d: there is %.40q, %v", name, n, b, err)
			_ = os.Remove(theirs) // it may have been moved
			nothingOutside(t, source)
		}
	}
	t.Logf("%d conflicts", conflicts)
}

// tick waits until later changes get a later st_ctime than earlier ones: the kernel's clock may advance only in ticks.
func tick(t testing.TB) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "tick")
	check.Must(t, os.WriteFile(name, nil, 0o644))
	var first, st unix.Stat_t
	for check.Must(t, unix.Stat(name, &first)); st.Ctim == (unix.Timespec{}) || st.Ctim == first.Ctim; check.Must(t, unix.Stat(name, &st)) {
		check.Must(t, os.Chmod(name, 0o644))
	}
}

// Apply's changes to one name of a file do not make its other name a conflict, but changes by other
// processes in between do.
func TestApplyHardLinks(t *testing.T) {
	t.Parallel()
	for _, theirs := range []string{"", "chmod", "write"} {
		layer, source, tree := laid(t)
		for _, name := range []string{"changed", "mode", "gone", "gone-dir/x", "gone-dir2/y", "last"} {
			check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(source, name)), 0o755))
			if name == "changed" {
				put(t, source, name, "old")
			} else {
				check.Must(t, os.Link(filepath.Join(source, "changed"), filepath.Join(source, name)))
			}
		}
		check.Must(t, os.Symlink("old", filepath.Join(source, "link1")), os.Link(filepath.Join(source, "link1"), filepath.Join(source, "link2")))
		put(t, layer, "changed", "new")
		put(t, layer, "mode", "old")
		check.Must(t, os.Chmod(filepath.Join(layer, "mode"), 0o600))
		put(t, layer, "last", "new")
		for _, name := range []string{"gone", "gone-dir", "gone-dir2", "link1", "link2"} {
			wipe(t, layer, name)
		}
		var st unix.Stat_t
		check.Must(t, unix.Lstat(filepath.Join(source, "link1"), &st))
		tree.Since = time.Unix(st.Ctim.Unix())
		tick(t)
		list, _ := lines(t, tree)
		last := Select(list, []string{"last"})
		_, err := tree.Apply(context.Background(), slices.DeleteFunc(slices.Clone(list), func(c Change) bool { return c.Path == "last" }), Options{Delete: true})
		check.Must(t, err)
		switch theirs {
		case "chmod":
			tick(t)
			check.Must(t, os.Chmod(filepath.Join(source, "last"), 0o600))
		case "write":
			check.Must(t, os.WriteFile(filepath.Join(source, "last"), []byte("theirs"), 0o600))
		}
		_, err = tree.Apply(context.Background(), last, Options{})
		check.That(t, (err != nil) == (theirs != ""), "%q: %v", theirs, err)
		nothingOutside(t, source)
	}
}

// noted returns a Note function that collects notes and calls each with the last one.
func noted(notes *[]Staging, each func(Staging)) func(Staging) error {
	return func(s Staging) error {
		*notes = append(*notes, s)
		if each != nil {
			each(s)
		}
		return nil
	}
}

// Sweep removes the directory of a killed apply, and keeps any other directory of that name.
func TestSweep(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, layer, "file", "new")
	list, _ := lines(t, tree)
	victim := filepath.Join(source, "victim")
	var notes []Staging
	_, err := tree.Apply(context.Background(), list, Options{Note: noted(&notes, func(s Staging) {
		// The process could be killed here.
		if s.Identity != "" {
			put(t, source, s.Name+"/1", "temporary")
			check.Must(t, s.Sweep())
		}
	})})
	check.Require(t, err != nil && len(notes) == 2 && notes[0].Identity == "" && notes[0].Name == notes[1].Name, "%v: %+v", err, notes)
	nothingOutside(t, source)
	for _, s := range append(notes, Staging{Source: []byte(source), Name: ".sbxrun-apply"}) {
		put(t, victim, "kept", "kept")
		check.Must(t, os.Chmod(victim, 0o700), os.Rename(victim, filepath.Join(source, s.Name)), s.Sweep())
		got := held(t, source)
		check.That(t, got[s.Name+"/kept"] == "kept", "%+v: %v", s, got)
		check.Must(t, os.RemoveAll(filepath.Join(source, s.Name)))
	}
	for _, note := range []string{"", "/some/path", "{}", `{"name": "../x"}`} {
		s, err := ReadStaging([]byte(note))
		check.That(t, err != nil, "%q: %+v", note, s)
	}
	for _, rest := range []string{"", `{"name": "a", "ident`} { // the second write was cut off
		s, err := ReadStaging([]byte(`{"name": "a"}` + "\n" + rest))
		check.That(t, err == nil && s.Name == "a" && s.Identity == "", "%q: %+v, %v", rest, s, err)
	}
}

// Apply keeps another directory that was moved to the name of its staging directory.
func TestStagingExchanged(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, layer, "file", "new")
	list, _ := lines(t, tree)
	put(t, source, "victim/kept", "kept")
	var notes []Staging
	_, err := tree.Apply(context.Background(), list, Options{Note: noted(&notes, func(s Staging) {
		if s.Identity != "" {
			check.Must(t, os.Rename(filepath.Join(source, s.Name), source+"/moved"), os.Rename(source+"/victim", filepath.Join(source, s.Name)))
		}
	})})
	check.Must(t, err)
	got := held(t, source)
	check.That(t, maps.Equal(got, map[string]string{"file": "new", notes[0].Name + "/kept": "kept"}), "%v", got)
}

// replaceDir creates a tree with a directory that the layer has a copy of, replaces it, and returns the changes.
func replaceDir(t *testing.T, replace func(source string)) (layer, source string, tree *Tree, list []Change, text string) {
	layer, source, tree = laid(t)
	for _, name := range []string{"cur/f", "cur/deep/g", "v2/f", "v2/deep/g", "other/h"} {
		put(t, source, name, "old")
	}
	put(t, layer, "cur/f", "new")
	put(t, layer, "cur/deep/g", "new")
	put(t, layer, "other/h", "new")
	wipe(t, layer, "cur/gone")
	put(t, source, "v2/gone", "old")
	for _, name := range []string{"cur", "cur/deep", "other"} {
		check.Must(t, unix.Setxattr(filepath.Join(layer, name), tr.CopiedXattr, nil, 0))
	}
	tick(t)
	var st unix.Stat_t
	name := filepath.Join(layer, "last")
	put(t, layer, "last", "")
	check.Must(t, unix.Stat(name, &st), os.Remove(name))
	tree.Since = time.Unix(st.Ctim.Unix())
	tick(t)
	replace(source)
	list, text = lines(t, tree)
	return layer, source, tree, list, text
}

// All changes in a directory that was replaced since the sandbox began are conflicts, even if the files in it are old.
func TestReplacedDirectory(t *testing.T) {
	t.Parallel()
	exchange := func(source string) {
		check.Must(t, os.Rename(source+"/cur", source+"/v1"), os.Rename(source+"/v2", source+"/cur"))
	}
	for name, replace := range map[string]func(source string){
		"moved": exchange,
		"copied": func(source string) {
			check.Must(t, os.Rename(source+"/cur", source+"/v1"))
			put(t, source, "cur/other", "theirs")
		},
		"exchanged": func(source string) {
			check.Must(t, unix.Renameat2(unix.AT_FDCWD, source+"/cur", unix.AT_FDCWD, source+"/v2", unix.RENAME_EXCHANGE))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, source, tree, list, text := replaceDir(t, replace)
			check.That(t, strings.Contains(text, "file \"cur/f\" conflict\n") && strings.Contains(text, "\"cur/deep/g\" conflict\n") && strings.Contains(text, "changed file \"other/h\"\n"),
				"%s", text)
			before := held(t, source)
			_, err := tree.Apply(context.Background(), list, Options{Delete: true})
			check.That(t, err != nil && strings.Contains(err.Error(), `directory "cur" was replaced`), "%v", err)
			got := held(t, source)
			check.That(t, maps.Equal(got, before), "%v, want %v", got, before)
			_, err = tree.Apply(context.Background(), list, Options{Delete: true, Force: true})
			check.OK(t, err)
			got = held(t, source)
			check.That(t, got["cur/f"] == "new" && got["cur/deep/g"] == "new", "with Force: %v", got)
		})
	}
	// Files added by other processes, and the changes of an apply, are no conflicts.
	_, source, tree, list, text := replaceDir(t, func(source string) {
		put(t, source, "top", "theirs")
		put(t, source, "cur/theirs", "theirs")
		put(t, source, "other/theirs", "theirs")
	})
	check.That(t, !strings.Contains(text, "conflict"), "%s", text)
	list = slices.DeleteFunc(list, func(c Change) bool { return c.Path == "other/h" })
	_, err := tree.Apply(context.Background(), list, Options{Delete: true})
	check.Must(t, err)
	list, text = lines(t, tree)
	check.That(t, !strings.Contains(text, "conflict") && len(list) != 0, "after an apply: %s", text)
	_, err = tree.Apply(context.Background(), list, Options{Delete: true})
	check.Must(t, err)
	nothingOutside(t, source)
}

// A second apply may add files to directories whose modes the first one has set.
func TestApplyTwice(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, source, "old/f", "old")
	put(t, layer, "old/f", "new")
	put(t, layer, "made/sub/f", "new")
	put(t, layer, "empty/x", "new")
	put(t, source, "mode/f", "old")
	put(t, layer, "mode/f", "old")
	check.Must(t, os.Chmod(layer+"/mode", 0o700), unix.Setxattr(layer+"/mode", tr.CopiedXattr, nil, 0))
	check.Must(t, os.Remove(layer+"/empty/x"), os.Chmod(layer+"/old", 0o700), unix.Setxattr(layer+"/old", tr.CopiedXattr, nil, 0))
	tree.Since = time.Now()
	tick(t)
	for _, name := range []string{"", "old/g", "made/sub/g", "empty/g", "mode/g"} {
		if name != "" {
			put(t, layer, name, "new")
		}
		list, text := lines(t, tree)
		_, err := tree.Apply(context.Background(), list, Options{})
		check.That(t, err == nil, "%s: %v\n%s", name, err, text)
		tick(t)
	}
	got := held(t, source)
	check.That(t, len(got) == 7, "%v", got)
}

// A directory that is replaced after the comparison is a conflict, too.
func TestReplacedMeanwhile(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	for _, name := range []string{"cur/deep/g", "v2/deep/g"} {
		put(t, source, name, "old")
	}
	put(t, layer, "cur/deep/g", "new")
	put(t, layer, "made/x/f", "new")
	list, _ := lines(t, tree)
	check.Must(t, os.Rename(source+"/cur", source+"/v1"), os.Rename(source+"/v2", source+"/cur"))
	_, err := tree.Apply(context.Background(), Select(list, []string{"cur"}), Options{})
	check.That(t, err != nil && strings.Contains(err.Error(), "was replaced"), "%v", err)
	put(t, source, "made/x/theirs", "theirs")
	_, err = tree.Apply(context.Background(), Select(list, []string{"made/x/f"})[2:], Options{})
	check.That(t, err != nil && strings.Contains(err.Error(), "was replaced"), "a directory that another process has made: %v", err)
	got := held(t, source)
	check.That(t, maps.Equal(got, map[string]string{"cur/deep/g": "old", "v1/deep/g": "old", "made/x/theirs": "theirs"}), "%v", got)
	nothingOutside(t, source)
}

// Apply does not write to a directory that another process has exchanged for one that was not compared.
func TestApplyExchange(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	for i := range 40 {
		put(t, layer, fmt.Sprintf("d/sub/f%d", i), "new")
	}
	for _, dir := range []string{"d/sub", "keep/sub"} {
		check.Must(t, os.MkdirAll(filepath.Join(source, dir), 0o755))
	}
	keep, err := os.Open(source + "/keep/sub")
	check.Must(t, err)
	defer keep.Close()
	list, _ := lines(t, tree)
	stop := harness.Meanwhile(func() {
		_ = unix.Renameat2(unix.AT_FDCWD, source+"/d", unix.AT_FDCWD, source+"/keep", unix.RENAME_EXCHANGE)
	})
	for range 100 {
		_, err := tree.Apply(context.Background(), list, Options{})
		check.That(t, err == nil || strings.Contains(err.Error(), "was replaced"), "%v", err)
	}
	stop()
	names, err := keep.Readdirnames(-1)
	check.That(t, err == nil && len(names) == 0, "written to another directory: %q, %v", names, err)
	nothingOutside(t, source)
}

// Mark finds new scripts and programs, and not those that were executable before.
func TestMark(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	for name, f := range map[string]struct {
		was, now         string // "" for no file
		wasMode, nowMode os.FileMode
	}{
		"new": {"", "x", 0, 0o755}, "group": {"", "x", 0, 0o654}, "script": {"", "#!/bin/sh", 0, 0o644}, "data": {"", "#", 0, 0o644}, "empty": {"", " ", 0, 0o600},
		"chmod": {"x", "x", 0o644, 0o755}, "became": {"x", "#!/bin/sh", 0o644, 0o644}, "edited": {"#!/bin/sh", "#!/bin/sh -e", 0o644, 0o755}, "closed": {"", "#!", 0, 0o111},
	} {
		put(t, layer, name, f.now)
		check.Must(t, os.Chmod(filepath.Join(layer, name), f.nowMode))
		if f.was != "" {
			put(t, source, name, f.was)
			check.Must(t, os.Chmod(filepath.Join(source, name), f.wasMode))
		}
	}
	wipe(t, layer, "gone")
	put(t, source, "gone", "#!")
	list, _ := lines(t, tree)
	tree.Mark(context.Background(), list)
	var got []string
	for _, c := range list {
		if c.Executable {
			got = append(got, c.Path)
		}
	}
	check.NoDiff(t, cmp.Diff([]string{"became", "chmod", "closed", "group", "new", "script"}, got))
}

// Root does not enter directories of other owners than the original's, because these can move directories there.
func TestForeignDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		return // only root can write to other users' directories
	}
	t.Parallel()
	for _, owner := range []int{0, 61001} {
		layer, source, _ := laid(t)
		put(t, source, "d/f", "old")
		put(t, source, "x/y/f", "old")
		put(t, layer, "d/f", "new")
		put(t, layer, "d/g", "new")
		wipe(t, layer, "x")
		check.Must(t, filepath.WalkDir(source, func(name string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(name, 61000, 61000))
		}))
		check.Must(t, os.Chown(source+"/d", owner, owner), os.Chown(source+"/x/y", owner, owner))
		upper, err := os.Open(layer)
		check.Must(t, err)
		defer upper.Close()
		tree, err := Open(upper, source, time.Now().Add(time.Minute))
		check.Must(t, err)
		defer tree.Close()
		list, text := lines(t, tree)
		want := "changed file \"d/f\" conflict\nadded file \"d/g\" conflict\ndeleted directory \"x\" conflict\n"
		check.That(t, text == want, "%s, want %s", text, want)
		_, err = tree.Apply(context.Background(), list, Options{Delete: true})
		check.That(t, err != nil && strings.Contains(err.Error(), "belongs to uid"), "%v", err)
		got := held(t, source)
		check.That(t, maps.Equal(got, map[string]string{"d/f": "old", "x/y/f": "old"}), "%v", got)
		_, err = tree.Apply(context.Background(), list, Options{Delete: true, Force: true})
		check.Must(t, err)
	}
}

// A tar of selected changes has no hard link to a path outside the selection, and no file in it deletes another.
func TestTar(t *testing.T) {
	layer, source, tr := laid(t)
	put(t, source, "first", "text")
	put(t, layer, "first", "text") // only touched, which is no change
	check.Must(t, os.Link(layer+"/first", layer+"/second"), os.Link(layer+"/first", layer+"/third"))
	put(t, layer, ".wh.kept", "")
	list, _, err := tr.Changes(context.Background())
	check.Must(t, err)
	var b bytes.Buffer
	check.Must(t, tr.Tar(&b, list))
	got := ""
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		check.Must(t, err)
		text, err := io.ReadAll(r)
		check.Must(t, err)
		got += fmt.Sprintf("%s %q %s %s\n", h.Name, h.Linkname, text, h.PAXRecords["SBXRUN.kind"])
	}
	want := ".wh.kept \"\"  file\nsecond \"\" text \nthird \"second\"  \n"
	check.That(t, got == want, "%s, want %s", got, want)
}

// A deletion of more files than the bound is a conflict, and reading is bounded.
func TestManyDeleted(t *testing.T) {
	layer, source, tr := laid(t)
	tr.Since = time.Now().Add(time.Hour)
	for i := range 30 {
		put(t, source, fmt.Sprintf("gone/%d", i), "")
	}
	wipe(t, layer, "gone")
	put(t, layer, "later/file", "")
	w := tr.comparison(context.Background())
	w.walk.Entries = 20
	check.That(t, w.laterBelow(proc.Descriptor(tr.Source), "gone"), "not in conflict")
	check.That(t, w.walk.Entries >= 0 && w.walk.Entries <= 20, "%d entries are left", w.walk.Entries)
}

// Apply of random layers gives the same result as a model of overlayfs, which is in part compared with
// overlayfs itself: each name comes from the uppermost layer, and directories of one name are merged down
// to the first that is opaque or not a directory.
func TestLayers(t *testing.T) {
	names := []string{"a", "b", "c"}
	for seed := range 60 {
		r := rand.New(rand.NewPCG(uint64(seed), 0))
		dir := t.TempDir()
		dirs := []string{dir + "/original"} // the lowest first
		for i := range 1 + r.IntN(3) {
			dirs = append(dirs, fmt.Sprintf("%s/%d", dir, i))
		}
		var grow func(at string, depth int, layer bool)
		grow = func(at string, depth int, layer bool) {
			check.Must(t, os.Mkdir(at, 0o755))
			if layer && r.IntN(4) == 0 {
				check.Must(t, unix.Setxattr(at, "user.overlay.opaque", []byte("y"), 0))
			}
			for _, name := range names {
				name = filepath.Join(at, name)
				switch what := r.IntN(6); {
				case what < 2 && depth < 3:
					grow(name, depth+1, layer)
				case what == 2:
					check.Must(t, os.WriteFile(name, fmt.Appendf(nil, "%d", r.IntN(3)), 0o644))
				case what == 3:
					check.Must(t, os.Symlink(fmt.Sprint(r.IntN(3)), name))
				case what == 4 && layer:
					check.Must(t, unix.Mknod(name, unix.S_IFCHR, 0))
				}
			}
		}
		shown := map[string]string{}
		for i, at := range dirs {
			grow(at, 0, i > 0)
			merge(t, shown, at, ".")
		}
		slices.Reverse(dirs)
		if seed%3 == 0 {
			check.NoDiff(t, cmp.Diff(mounted(t, dirs), shown), "seed %d: -overlayfs +model", seed)
		}
		upper, err := os.Open(dirs[0])
		check.Must(t, err)
		tree, err := Open(upper, dir+"/original", time.Now().Add(time.Minute), dirs[1:len(dirs)-1]...)
		check.Must(t, err)
		list, text := lines(t, tree)
		check.That(t, slices.IsSortedFunc(list, func(a, b Change) int { return comparePaths(a.Path, b.Path) }) || len(dirs) <= 2, "seed %d: not in order:\n%s", seed, text)
		_, err = tree.Apply(context.Background(), list, Options{Delete: true})
		check.That(t, err == nil, "seed %d: %v", seed, err)
		made := map[string]string{}
		merge(t, made, dir+"/original", ".")
		diff := cmp.Diff(shown, made)
		check.That(t, diff == "", "seed %d:\n%s\nof:\n%s", seed, diff, text)
		tree.Close()
		upper.Close()
	}
}

// mounted returns what overlayfs shows for directories, the uppermost first.
func mounted(t testing.TB, dirs []string) map[string]string {
	t.Helper()
	at := filepath.Join(t.TempDir(), "mounted")
	check.Must(t, os.Mkdir(at, 0o755))
	script := `mount -t overlay -o userxattr,lowerdir="$1" overlay "$2" && cd "$2" && find . -type d -printf '%P=directory\0' -o -type l -printf '%P=link %l\0' -o -type f -printf '%P=file ' -exec cat {} \; -printf '\0'`
	out, err := exec.Command("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", strings.Join(dirs, ":"), at).CombinedOutput()
	check.Require(t, err == nil, "%v %s", err, out)
	found := map[string]string{}
	for text := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		name, what, _ := strings.Cut(text, "=")
		found[filepath.Join(".", name)] = what
	}
	return found
}

// merge adds a layer to the model.
func merge(t testing.TB, shown map[string]string, dir, at string) {
	t.Helper()
	forget := func(name string) {
		maps.DeleteFunc(shown, func(other, _ string) bool { return other == name || strings.HasPrefix(other, name+"/") || name == "." })
	}
	var st unix.Stat_t
	check.Must(t, unix.Lstat(filepath.Join(dir, at), &st))
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		forget(at)
	case unix.S_IFREG:
		forget(at)
		b, err := os.ReadFile(filepath.Join(dir, at))
		check.Must(t, err)
		shown[at] = "file " + string(b)
	case unix.S_IFLNK:
		forget(at)
		target, err := os.Readlink(filepath.Join(dir, at))
		check.Must(t, err)
		shown[at] = "link " + target
	default:
		var value [8]byte
		if n, err := unix.Getxattr(filepath.Join(dir, at), "user.overlay.opaque", value[:]); err == nil && n > 0 && at != "." || shown[at] != "directory" {
			forget(at)
		}
		shown[at] = "directory"
		entries, err := os.ReadDir(filepath.Join(dir, at))
		check.Must(t, err)
		for _, e := range entries {
			merge(t, shown, dir, filepath.Join(at, e.Name()))
		}
	}
}

// Apply changes an ordinary user's directories that are closed to their owner, as the sandbox could, and
// keeps their modes.
func TestApplyReadOnly(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	put(t, source, "gone/sub/f", "old")
	put(t, source, "replaced/f", "old")
	put(t, source, "kept/f", "old")
	put(t, source, "kept/g", "old")
	put(t, layer, "replaced", "new")
	put(t, layer, "kept/f", "new")
	put(t, layer, "kept/new", "new")
	wipe(t, layer, "gone")
	wipe(t, layer, "kept/g")
	if os.Geteuid() == 0 {
		check.Must(t, filepath.WalkDir(filepath.Dir(source), func(name string, _ os.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(name, 65534, 65534))
		}))
	}
	for _, name := range []string{"gone/sub", "gone", "replaced", "kept", "."} {
		check.Must(t, os.Chmod(filepath.Join(source, name), 0o555))
	}
	t.Cleanup(func() { // so that an ordinary user can remove it
		check.Must(t, os.Chmod(source, 0o755), os.Chmod(source+"/kept", 0o755), os.Chmod(layer, 0o755), os.Chmod(layer+"/kept", 0o755))
	})
	check.Must(t, os.Chmod(layer, 0o555), os.Chmod(layer+"/kept", 0o555))
	list, _ := lines(t, tree)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		var errno unix.Errno
		if os.Geteuid() == 0 {
			_, _, errno = unix.RawSyscall(unix.SYS_SETRESUID, 65534, 65534, 65534) // of this thread only
		}
		if errno != 0 {
			done <- errno
			return
		}
		_, err := tree.Apply(context.Background(), list, Options{Delete: true})
		done <- err
	}()
	check.Must(t, <-done)
	want := map[string]string{"replaced": "new", "kept/f": "new", "kept/new": "new"}
	got := held(t, source)
	check.That(t, maps.Equal(got, want), "%v", got)
	for _, name := range []string{".", "kept"} {
		st, err := os.Stat(filepath.Join(source, name))
		check.That(t, err == nil && st.Mode().Perm() == 0o555, "%s: %v %v", name, st.Mode(), err)
	}
	nothingOutside(t, source)
}

// Apply skips a file that the running sandbox removes after the comparison.
func TestGoneMeanwhile(t *testing.T) {
	t.Parallel()
	layer, source, tree := laid(t)
	for _, name := range []string{"a", "b", "c", "d/e", "f"} {
		put(t, layer, name, "new")
	}
	list, _ := lines(t, tree)
	check.Must(t, os.Remove(layer+"/a"), os.Remove(layer+"/b"), os.Symlink("c", layer+"/b"), os.RemoveAll(layer+"/d"), os.Remove(layer+"/f"), os.Mkdir(layer+"/f", 0o755))
	var b bytes.Buffer
	check.Must(t, tree.Tar(&b, list))
	r := tar.NewReader(&b)
	for _, want := range []string{"c", "d/"} {
		h, err := r.Next()
		check.Require(t, err == nil && h.Name == want, "%v, %v, want %s", h, err, want)
	}
	a, err := tree.Apply(context.Background(), list, Options{})
	got := held(t, source)
	check.That(t, err == nil && len(a.Made) == 2 && maps.Equal(got, map[string]string{"c": "new"}), "%v, %v, %v", got, a, err)
	nothingOutside(t, source)
}

// held returns the contents of the files in a directory.
func held(t testing.TB, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	check.Must(t, filepath.WalkDir(dir, func(name string, e os.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			var b []byte
			b, err = os.ReadFile(name)
			files[strings.TrimPrefix(name, dir+"/")] = string(b)
		}
		return err
	}))
	return files
}

// If the original is on overlayfs itself, as in a container, directories of its lower layers can be
// removed but not moved.
func TestApplyOnOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		return // cannot mount
	}
	runtime.LockOSThread() // the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		t.Skip(err)
	}
	check.Must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	for _, force := range []bool{false, true} {
		dir := t.TempDir()
		for _, name := range []string{"layer", "lower", "upper", "work", "source"} {
			check.Must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		}
		for _, name := range []string{"gone/f", "gone/a/b/c/f", "replaced/a/f", "kept"} {
			put(t, dir+"/lower", name, "old")
		}
		source := dir + "/source"
		options := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work,redirect_dir=off", dir)
		if err := unix.Mount("overlay", source, "overlay", 0, options); err != nil {
			t.Skip(err)
		}
		t.Cleanup(func() { check.Must(t, unix.Unmount(source, unix.MNT_DETACH)) })
		put(t, source, "gone/a/here/f", "of the upper layer")
		put(t, dir+"/layer", "replaced", "new")
		wipe(t, dir+"/layer", "gone")
		upper, err := os.Open(dir + "/layer")
		check.Must(t, err)
		defer upper.Close()
		tree, err := Open(upper, source, time.Now().Add(time.Minute))
		check.Must(t, err)
		defer tree.Close()
		list, _ := lines(t, tree)
		_, err = tree.Apply(context.Background(), list, Options{Delete: true, Force: force})
		check.That(t, err == nil, "force %v: %v", force, err)
		got := held(t, source)
		check.That(t, maps.Equal(got, map[string]string{"replaced": "new", "kept": "old"}), "force %v: %v", force, got)
	}
}
