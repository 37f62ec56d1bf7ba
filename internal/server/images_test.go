package server

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/tests/check"
)

// roots is a source without slots that records the root of each.
type roots struct {
	nowhere
	list *[]string
}

func (r roots) Take(_ context.Context, _ string, p slot.Policy) (slot.Slot, error) {
	*r.list = append(*r.list, p.Rootfs())
	return nil, &result.Error{Code: "setup", Message: "there is no place"}
}

// Requests name images by their keys, as far as the tenant may use them; the image of a language is the default.
func TestImages(t *testing.T) {
	var s *Server
	var took []string
	h := handler(t, func(it *Server) {
		s = it
		s.source = roots{list: &took}
		s.open = func(c *config.Config, key string) (*image, error) {
			if c.Images[key].Image == "missing" {
				return nil, errors.New("no image named missing")
			}
			p, err := c.Policy()
			p.Mounts = append(p.Mounts, room.Mount{Kind: room.ReadOnly, Source: "/images/" + c.Images[key].Image, Dest: "/"})
			return &image{Image: api.Image{Name: key, Digest: "sha256:x", Platform: "linux/amd64"}, policy: slot.Policy{Policy: p}, users: 1}, err
		}
	})
	c := config.Default()
	c.StateDir = filepath.Join(t.TempDir(), "state")
	c.Images = map[string]config.Image{"data": {Image: "data:1"}, "other": {Image: "other:1"}}
	c.Tenant.Images = []string{"data"}
	c.Languages["lisp"] = cells.Language{Command: []string{"lisp"}, File: "x", Image: "data"}
	c.Languages["cobol"] = cells.Language{Command: []string{"cobol"}, File: "x", Image: "other"}
	check.Must(t, s.Reload(c, nil))

	for _, test := range []struct {
		path, body string
		code       api.Code
		root       string
	}{
		{"/v1/run", `{"argv":["x"]}`, api.Setup, ""},
		{"/v1/run", `{"argv":["x"],"image":"data"}`, api.Setup, "/images/data:1"},
		{"/v1/run", `{"language":"lisp","code":"x"}`, api.Setup, "/images/data:1"},
		{"/v1/sessions", `{"image":"data"}`, api.Setup, "/images/data:1"},
		{"/v1/run", `{"argv":["x"],"image":"other"}`, api.Policy, "-"},
		{"/v1/run", `{"argv":["x"],"image":"data:1"}`, api.Policy, "-"},
		{"/v1/run", `{"argv":["x"],"image":"oci:/etc"}`, api.Policy, "-"},
		{"/v1/run", `{"language":"cobol","code":"x"}`, api.Policy, "-"},
		{"/v1/sessions", `{"image":"../data"}`, api.Policy, "-"},
	} {
		took = nil
		w := ask(h, http.MethodPost, test.path, test.body)
		var e api.Error
		check.Must(t, json.Unmarshal(w.Body.Bytes(), &e))
		check.That(t, e.Failure.Code == test.code, "%s %s: %s", test.path, test.body, w.Body)
		check.That(t, (test.root != "-" || len(took) == 0) && (test.root == "-" || slices.Equal(took, []string{test.root})), "%s %s: roots %q", test.path, test.body, took)
	}
	w := ask(h, http.MethodGet, "/v1/images", "")
	check.That(t, strings.TrimSpace(w.Body.String()) == `{"images":[{"name":"data","digest":"sha256:x","platform":"linux/amd64"}]}`, "images: %s", w.Body)
	w = ask(h, http.MethodGet, "/v1/languages", "")
	check.That(t, strings.Contains(w.Body.String(), `"lisp"`) && !strings.Contains(w.Body.String(), `"cobol"`), "languages: %s", w.Body)

	// A reload resolves the names again, or changes nothing.
	c.Images = map[string]config.Image{"data": {Image: "missing"}, "other": {Image: "other:1"}}
	err := s.Reload(c, nil)
	check.That(t, err != nil && err.Error() == "images.data: no image named missing", "reload: %v", err)
	took = nil
	ask(h, http.MethodPost, "/v1/run", `{"argv":["x"],"image":"data"}`)
	c.Images = map[string]config.Image{"data": {Image: "data:2"}, "other": {Image: "other:1"}}
	check.Must(t, s.Reload(c, nil))
	ask(h, http.MethodPost, "/v1/run", `{"argv":["x"],"image":"data"}`)
	check.That(t, slices.Equal(took, []string{"/images/data:1", "/images/data:2"}), "roots around a reload: %q", took)
	c.Images = nil
	err = s.Reload(c, nil)
	check.That(t, err != nil && strings.Contains(err.Error(), `no "data" in [images]`), "reload: %v", err)
}

// Calls during reloads find an image that is held, and a former image is released after its last use.
func TestImagesReload(t *testing.T) {
	var s *Server
	var opened []*image
	h := handler(t, func(it *Server) {
		s = it
		s.source = nowhere{}
		s.open = func(c *config.Config, key string) (*image, error) {
			m := &image{Image: api.Image{Name: key}, users: 1}
			opened = append(opened, m)
			return m, nil
		}
	})
	c := config.Default()
	c.Images = map[string]config.Image{"data": {Image: "data:1"}}
	c.Tenant.Images = []string{"data"}
	check.Must(t, s.Reload(c, nil))
	var calls sync.WaitGroup
	done := make(chan struct{})
	for range 4 {
		calls.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if w := ask(h, http.MethodPost, "/v1/run", `{"argv":["x"],"image":"data"}`); !strings.Contains(w.Body.String(), "there is no place") {
					t.Errorf("%s", w.Body)
					return
				}
			}
		})
	}
	for range 50 {
		check.Must(t, s.Reload(c, nil))
	}
	close(done)
	calls.Wait()
	for i, m := range opened {
		want := i / (len(opened) - 1)
		check.That(t, m.users == want, "image %d of %d has %d users, want %d", i, len(opened), m.users, want)
	}
}
