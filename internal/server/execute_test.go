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

	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/workspace"
	"github.com/sbxrun/sbxrun/tests/harness"
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
	if p := <-source.policies; p.Commands.Memory != 1_000_000_000 {
		t.Errorf("%+v", p)
	}
}

// Copying a call's files stops when the client has disconnected.
func TestBringEnds(t *testing.T) {
	root, err := unix.Open(t.TempDir(), unix.O_PATH, 0)
	harness.Must(t, err)
	dir, err := workspace.Open(root, ".", nil)
	harness.Must(t, err)
	defer dir.Close()
	ctx, cancel := context.WithCancel(t.Context())
	s := &Server{}
	file := fileIn{path: "a", text: strings.NewReader("x"), size: 1, mode: 0o600}
	harness.Must(t, s.writeFile(ctx, dir, &execution{}, file))
	cancel()
	file.text = strings.NewReader("x")
	if err := s.writeFile(ctx, dir, &execution{}, file); !errors.Is(err, errEnded) {
		t.Error(err)
	}
}

type filesPlace struct {
	brokenPlace
	dir *workspace.Dir
}

func (p filesPlace) Files() (*workspace.Dir, error) { return p.dir, nil }

// So does collecting files.
func TestCollectEnds(t *testing.T) {
	root, err := unix.Open(t.TempDir(), unix.O_PATH, 0)
	harness.Must(t, err)
	dir, err := workspace.Open(root, ".", nil)
	harness.Must(t, err)
	defer dir.Close()
	harness.Must(t, (&Server{}).writeFile(t.Context(), dir, &execution{}, fileIn{path: "a", text: strings.NewReader("x"), size: 1, mode: 0o600}))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := &Server{walking: tenants.NewScheduler(1)}
	files := s.collect(ctx, filesPlace{dir: dir}, &execution{collect: []string{"*"}})
	if len(files) != 1 || files[0].Path != "." || files[0].Error != errEnded.Error() {
		t.Errorf("%+v", files)
	}
}

// Matching that would take minutes ends with an error; usual patterns and names need few steps.
func TestMatcher(t *testing.T) {
	const (
		deepest = "out/0123456789/0123456789/" // a usual name
		bad     = "*aaaaaaaaaaaaaaaaaaaaaaaaaaaaaab"
	)
	usual := matcher{[]string{"*.png", "*.csv", "out/*.png", "out/*/*.csv", "report.html", "out/[a-f]*/*", deepest + "*"}, maxMatchSteps}
	for i := range maxEntries {
		name := fmt.Sprintf("%s%06d.log", deepest, i)
		if ok, err := usual.any(name); !ok || err != nil {
			t.Fatalf("%s: %v %v", name, ok, err)
		}
	}
	hostile := matcher{slices.Repeat([]string{strings.Repeat(bad, 2)}, 64), maxMatchSteps}
	name := strings.Repeat("a", 250)
	for i := range maxEntries {
		if ok, err := hostile.any(name); err != nil {
			t.Logf("after %d names", i)
			return
		} else if ok {
			t.Fatal("a name matches")
		}
	}
	t.Error("all names were compared with all patterns")
}
