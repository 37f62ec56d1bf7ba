package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/tests/check"
)

// report returns a report and its text.
func report(t *testing.T) (result.Report, string) {
	t.Helper()
	rep := result.Result{Cause: result.StartFailed, Verdict: result.NotApplicable}.Report("ID", []string{"x"})
	text, err := rep.JSON()
	check.Must(t, err)
	return rep, string(text)
}

// contents maps the files of a directory to their contents.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	check.Must(t, err)
	files := map[string]string{}
	for _, e := range entries {
		if files[e.Name()] = e.Type().String(); e.Type().IsRegular() {
			text, err := os.ReadFile(filepath.Join(dir, e.Name()))
			check.Must(t, err)
			files[e.Name()] = string(text)
		}
	}
	return files
}

// The report replaces a file, also one that the command has created in its place, and does not write to it.
func TestReportFile(t *testing.T) {
	rep, text := report(t)
	old := func(name string) func(dir string) error {
		return func(dir string) error {
			return os.WriteFile(dir+"/"+name, []byte(strings.Repeat("old", 10_000)), 0o444)
		}
	}
	link := func(dir string) error { return errors.Join(old("target")(dir), os.Symlink("target", dir+"/r.json")) }
	dangling := func(dir string) error { return os.Symlink("none", dir+"/r.json") }
	hardLink := func(dir string) error { return errors.Join(old("target")(dir), os.Link(dir+"/target", dir+"/r.json")) }
	for _, tt := range []struct {
		name, place   string
		before, while func(dir string) error // while the command runs
	}{
		{"new file", "r.json", nil, nil},
		{"absolute path", "DIR/r.json", nil, nil},
		{"odd name", "-r \n'\xff", nil, nil},
		{"hidden file", ".r", nil, nil},
		{"looks like a descriptor", "./fd:1", nil, nil},
		{"existing file", "r.json", old("r.json"), nil},
		{"link", "r.json", link, nil}, // replaced, not followed, because a command may have chosen its target
		{"dangling link", "r.json", dangling, nil},
		{"hard link", "r.json", hardLink, nil},
		{"forged file", "r.json", nil, old("r.json")},
		{"forged link", "r.json", nil, link},
		{"forged dangling link", "r.json", nil, dangling},
		{"forged hard link", "r.json", nil, hardLink},
		{"forged pipe", "r.json", nil, func(dir string) error { return unix.Mkfifo(dir+"/r.json", 0o666) }}, // without a reader
		{"forged socket", "r.json", nil, func(dir string) error { return unix.Mknod(dir+"/r.json", unix.S_IFSOCK|0o666, 0) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Chdir(dir)
			if tt.before != nil {
				check.Must(t, tt.before(dir))
			}
			want := contents(t, dir)
			r, err := openReport(&cli.Run{}, strings.ReplaceAll(tt.place, "DIR", dir))
			check.Must(t, err)
			// Until the report is written, the old file is there.
			for name, content := range want {
				check.Equal(t, contents(t, dir)[name], content, "before the report is written: %s holds", name)
			}
			if tt.while != nil {
				check.Must(t, tt.while(dir))
				want = contents(t, dir)
			}
			check.Must(t, r.report(rep))
			want[filepath.Base(tt.place)] = text
			check.NoDiff(t, cmp.Diff(want, contents(t, dir)), "directory afterwards (-want +got)")
		})
	}
}

// The report goes to the original directory even if that has moved.
func TestReportDirectoryMoved(t *testing.T) {
	rep, text := report(t)
	top := t.TempDir()
	for _, dir := range []string{"/a", "/b"} {
		check.Must(t, os.Mkdir(top+dir, 0o755))
	}
	r, err := openReport(&cli.Run{}, top+"/a/r.json")
	check.Must(t, err)
	check.Must(t, errors.Join(os.Rename(top+"/a", top+"/c"), os.Symlink("b", top+"/a")))
	check.Must(t, r.report(rep))
	check.NoDiff(t, cmp.Diff(map[string]string{"r.json": text}, contents(t, top+"/c")), "the directory (-want +got)")
	got := contents(t, top+"/b")
	check.That(t, len(got) == 0, "in the directory that took its name: %q", got)
}

// A named pipe without a reader is an error at once. One with a reader gets the report.
func TestReportNamedPipe(t *testing.T) {
	rep, text := report(t)
	place := t.TempDir() + "/pipe"
	check.Must(t, unix.Mkfifo(place, 0o600))
	opened := make(chan error, 1)
	go func() {
		_, err := openReport(&cli.Run{}, place)
		opened <- err
	}()
	select {
	case err := <-opened:
		e, ok := errors.AsType[*result.Error](err)
		check.That(t, ok && e.Code == "report" && errors.Is(err, unix.ENXIO), "without a reader: %v", err)
	case <-time.After(10 * time.Second):
		t.Fatal("waits for a reader")
	}
	in, err := os.OpenFile(place, os.O_RDONLY|unix.O_NONBLOCK, 0)
	check.Must(t, err)
	defer in.Close()
	r, err := openReport(&cli.Run{}, place)
	check.Must(t, err)
	check.Must(t, r.report(rep))
	r.file.Close()
	got, err := io.ReadAll(in)
	check.That(t, err == nil && string(got) == text, "got %q, %v; want %q", got, err, text)
	st, err := os.Lstat(place)
	check.That(t, err == nil && st.Mode()&fs.ModeNamedPipe != 0, "it is no named pipe any more: %v, %v", st, err)
}

func TestReportErrors(t *testing.T) {
	dir := t.TempDir()
	readOnly, err := os.Open(os.DevNull)
	check.Must(t, err)
	defer readOnly.Close()
	number := strconv.Itoa(int(readOnly.Fd()))
	tests := []struct{ place, code, message string }{
		{dir, "report", "cannot write the report to " + strconv.Quote(dir) + ": is a directory"},
		{dir + "/", "report", "cannot write the report to " + strconv.Quote(dir+"/") + ": is a directory"},
		{dir + "/none/r", "report", "cannot write the report to " + strconv.Quote(dir+"/none/r") + ": open " + dir + "/none: no such file or directory"},
		{"/dev/null/r", "report", `cannot write the report to "/dev/null/r": open /dev/null: not a directory`},
		{"fd:", "usage", "--report fd:: want the number of an open descriptor"},
		{"fd:-1", "usage", "--report fd:-1: want the number of an open descriptor"},
		{"fd:x", "usage", "--report fd:x: want the number of an open descriptor"},
		{"fd:1x", "usage", "--report fd:1x: want the number of an open descriptor"},
		{"fd:99999999999", "usage", "--report fd:99999999999: want the number of an open descriptor"},
		{"fd:2147483647", "usage", "--report fd:2147483647: no such descriptor is open"},
		{"fd:" + number, "usage", "--report fd:" + number + ": it is open for reading only"},
	}
	for _, tt := range tests {
		r, err := openReport(&cli.Run{}, tt.place)
		var e *result.Error
		check.That(t, r == nil && errors.As(err, &e) && e.Code == tt.code && strings.HasPrefix(e.Message, tt.message), "openReport(%q) = %v, %v; want error %s", tt.place, r, err, tt.message)
	}
	var e *result.Error
	_, err = openReport(&cli.Exec{}, "fd:x")
	check.That(t, errors.As(err, &e) && e.Hint == "see sbxrun exec --help", "of exec: %v", err)
	got := contents(t, dir)
	check.That(t, len(got) == 0, "left behind: %q", got)
}

// A write error is reported.
func TestReportPlaceThatCannotBe(t *testing.T) {
	rep, _ := report(t)
	dir := t.TempDir()
	for _, place := range []string{"/proc/r", dir + "/" + strings.Repeat("x", 256)} {
		r, err := openReport(&cli.Run{}, place)
		if err == nil {
			err = r.report(rep)
		}
		var e *result.Error
		want := "cannot write the report to " + strconv.Quote(place) + ": "
		check.That(t, errors.As(err, &e) && e.Code == "report" && strings.HasPrefix(e.Message, want), "%v; want error %s", err, want)
	}
	got := contents(t, dir)
	check.That(t, len(got) == 0, "left behind: %q", got)
}

// A failed write leaves no temporary file.
func TestReportWriteFails(t *testing.T) {
	rep, _ := report(t)
	dir := t.TempDir()
	r, err := openReport(&cli.Run{}, dir+"/r.json")
	check.Must(t, err)
	err = os.Mkdir(dir+"/r.json", 0o755)
	check.Must(t, err) // cannot be replaced by a file
	err = r.report(rep)
	check.That(t, result.CodeOf(err) == "report", "got %v", err)
	check.NoDiff(t, cmp.Diff(map[string]string{"r.json": fs.ModeDir.String()}, contents(t, dir)), "(-want +got)")
}
