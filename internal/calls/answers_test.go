package calls

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A stored answer is sent with its status. The tenant's oldest answers are dropped for new ones, and their
// requests then fail as started, so that they do not run again. Other tenants' answers stay.
func TestAnswers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "answers")
	harness.Must(t, os.MkdirAll(dir, 0o700))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "of-a-killed-server"), nil, 0o600))
	a, err := NewAnswers(dir, 5*blockSize)
	harness.Must(t, err)
	put := func(tenant, text string) *Answer {
		return a.Put(tenant, 3*blockSize, func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusAccepted)
			fmt.Fprint(w, text)
		})
	}
	read := func(one *Answer) string {
		w := httptest.NewRecorder()
		if err := a.Write(w, one); err != nil {
			e := api.AsError(err)
			return fmt.Sprintf("%s %v", e.Failure.Code, e.Started)
		}
		return fmt.Sprintf("%d %s", w.Code, w.Body)
	}
	const dropped = "idempotency true"
	other := put("other", "x")
	var all []*Answer
	for i := range 5 {
		all = append(all, put("t", fmt.Sprint(i)))
	}
	for i, want := range []string{dropped, dropped, "202 2", "202 3", "202 4"} {
		if got := read(all[i]); got != want {
			t.Errorf("answer %d: %s, want %s", i, got, want)
		}
	}
	if got := read(other); got != "202 x" {
		t.Error(got)
	}
	if got := read(put("t", strings.Repeat("x", 4*blockSize))); got != dropped {
		t.Errorf("an answer above the limit: %s", got)
	}
	if got := read(all[4]); got != "202 4" {
		t.Errorf("after it: %s", got)
	}
	for _, one := range all {
		a.Drop(one)
	}
	a.Drop(other)
	a.Drop(other)
	if files, err := os.ReadDir(dir); len(files) > 0 || err != nil || a.disk.Used("t") != 0 || a.disk.Used("other") != 0 {
		t.Errorf("%v, %v", files, err)
	}
}
