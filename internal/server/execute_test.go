package server

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/workspace"
	"github.com/sbxrun/sbxrun/tests/check"
)

// seen is a source without slots that records the requested limits.
type seen struct {
	nowhere
	policies chan slot.Policy
}

func (s seen) Take(ctx context.Context, tenant string, p slot.Policy) (slot.Slot, error) {
	s.policies <- p
	return s.nowhere.Take(ctx, tenant, p)
}

// Take gets the limits of a command, because they cannot change once files are in the workspace.
func TestLimitsOfPlace(t *testing.T) {
	source := seen{policies: make(chan slot.Policy, 1)}
	h := handler(t, func(s *Server) { s.source = source })
	ask(h, http.MethodPost, "/v1/run", `{"argv":["true"],"limits":{"memory":1000000000}}`)
	p := <-source.policies
	check.That(t, p.Commands.Memory == 1_000_000_000, "%+v", p)
}

// The workspace of a session is at most as large as its memory limit, because files that the server writes are not
// charged to the sandbox.
func TestSizeOfWorkspace(t *testing.T) {
	source := seen{policies: make(chan slot.Policy, 1)}
	h := handler(t, func(s *Server) { s.source = source })
	for _, test := range []struct {
		session string
		memory  int64
		size    int64
	}{
		{`{}`, 0, 256 << 20},
		{`{"limits":{"memory":67108864}}`, 64 << 20, 64 << 20},
		{`{"limits":{"memory":1073741824}}`, 1 << 30, 256 << 20},
	} {
		ask(h, http.MethodPost, "/v1/sessions", test.session)
		p := <-source.policies
		check.That(t, p.TmpSize == test.size && p.Limits.Memory == test.memory, "%s: %d, %+v", test.session, p.TmpSize, p.Limits)
	}
}

// Copying a call's files stops when the client has disconnected.
func TestBringEnds(t *testing.T) {
	root, err := unix.Open(t.TempDir(), unix.O_PATH, 0)
	check.Must(t, err)
	dir, err := workspace.Open(root, ".", nil)
	check.Must(t, err)
	defer dir.Close()
	ctx, cancel := context.WithCancel(t.Context())
	s := &Server{}
	file := fileIn{path: "a", text: strings.NewReader("x"), size: 1, mode: 0o600}
	check.Must(t, s.writeFile(ctx, dir, &execution{}, file))
	cancel()
	file.text = strings.NewReader("x")
	err = s.writeFile(ctx, dir, &execution{}, file)
	check.That(t, errors.Is(err, errEnded), "%v", err)
}

type filesPlace struct {
	brokenPlace
	dir *workspace.Dir
}

func (p filesPlace) Files() (*workspace.Dir, error) { return p.dir, nil }

// So does collecting files.
func TestCollectEnds(t *testing.T) {
	root, err := unix.Open(t.TempDir(), unix.O_PATH, 0)
	check.Must(t, err)
	dir, err := workspace.Open(root, ".", nil)
	check.Must(t, err)
	defer dir.Close()
	check.Must(t, (&Server{}).writeFile(t.Context(), dir, &execution{}, fileIn{path: "a", text: strings.NewReader("x"), size: 1, mode: 0o600}))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := &Server{walking: tenants.NewScheduler(1)}
	files, _ := s.collect(ctx, filesPlace{dir: dir}, &execution{collect: []string{"*"}})
	check.That(t, len(files) == 1 && files[0].Path == "." && files[0].Error == errEnded.Error(), "%+v", files)
}

// Matching that would take minutes ends with an error; usual patterns and names need few steps.
func TestMatcher(t *testing.T) {
	const (
		deepest = "out/0123456789/0123456789/" // a usual name
		bad     = "*aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"
	)
	usual := newMatcher([]string{"*.png", "*.csv", "out/*.png", "out/*/*.csv", "report.html", "out/[a-f]*/*", "**/*.html", deepest + "*"})
	for i := range maxEntries {
		name := fmt.Sprintf("%s%06d.log", deepest, i)
		ok, _, err := usual.any(name)
		check.Require(t, ok && err == nil, "%s: %v %v", name, ok, err)
	}
	hostile := newMatcher(slices.Repeat([]string{strings.Repeat(bad, 2)}, 64))
	name := strings.Repeat("a", 250)
	for i := range maxEntries {
		if ok, _, err := hostile.any(name); err != nil {
			t.Logf("after %d names", i)
			return
		} else if ok {
			t.Fatal("a name matches")
		}
	}
	t.Error("all names were compared with all patterns")
}

// A pattern matches files and everything in directories; ** stands for any number of directories. Only
// directories in which something can match are visited.
func TestPatterns(t *testing.T) {
	for _, test := range []struct {
		pattern, name  string
		matches, below bool
	}{
		{"*.png", "a.png", true, true}, {"*.png", "d/a.png", false, false}, {"*.png", "d", false, false},
		{"out/*.png", "out", false, true}, {"out/*.png", "other", false, false}, {"out/*.png", "out/a.png", true, true},
		{"out", "out", true, true}, {"out", "out/a/b", true, true}, {"out/", "out/a", true, true}, {"out", "outer", false, false}, {"o*", "out/a/b", true, true},
		{"**", "a", true, true}, {"**", "a/b/c", true, true},
		{"**/*.csv", "a.csv", true, true}, {"**/*.csv", "a/b/c.csv", true, true}, {"**/*.csv", "a/b", false, true}, {"**/*.csv", "a/b/c.txt", false, true},
		{"out/**", "out", false, true}, {"out/**", "out/a", true, true}, {"out/**", "out/a/b", true, true}, {"out/**", "other", false, false},
		{"a/**/z/*", "a/z/f", true, true}, {"a/**/z/*", "a/b/c/z/f", true, true}, {"a/**/z/*", "a/b/f", false, true},
	} {
		matches, below, err := newMatcher([]string{test.pattern}).any(test.name)
		check.That(t, matches == test.matches && below == test.below && err == nil, "%s and %s: %v, below %v, %v", test.pattern, test.name, matches, below, err)
	}
	m := newMatcher([]string{"a", "b*", "*.c", "**/x"})
	for _, name := range []string{"a", "bb", "d/y"} {
		_, _, _ = m.any(name)
	}
	got := m.unmatched()
	check.That(t, slices.Equal(got, []string{"*.c", "**/x"}), "%q", got)
}

// Results of a cell are no longer stored when the session has ended.
func TestResultsEnd(t *testing.T) {
	s := newServer(t, nowhere{})
	ex := &execution{caller: Identity{Tenant: "uid-1"}, ceilings: s.Settings().Tenant}
	ctx, cancel := context.WithCancel(t.Context())
	in := cells.Medium{Type: "image/png", Base64: []byte("x")}
	m := s.medium(ctx, ex, in)
	check.That(t, m.ID != "" && m.Error == "", "%+v", m)
	cancel()
	m = s.medium(ctx, ex, in)
	check.That(t, m.ID == "" && m.Error == errEnded.Message, "%+v", m)
}

// Text that would be much longer in JSON is stored instead.
func TestReadable(t *testing.T) {
	for text, want := range map[string]bool{"a": true, "\x00": false, "\x7f": false, "\u0080": false, "\u009f": false, "\u00a0": true, "ä": true, "\n": true} {
		check.That(t, readable(strings.Repeat(text, 8<<10)) == want, "%q: want %v", text, want)
	}
}
