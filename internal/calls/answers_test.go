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
	"github.com/sbxrun/sbxrun/tests/check"
)

// A stored answer is sent with its status. The tenant's oldest answers are dropped for new ones, and their
// requests then fail as started, so that they do not run again. Other tenants' answers stay.
func TestAnswers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "answers")
	check.Must(t, os.MkdirAll(dir, 0o700))
	check.Must(t, os.WriteFile(filepath.Join(dir, "of-a-killed-server"), nil, 0o600))
	a, err := NewAnswers(dir, 5*blockSize)
	check.Must(t, err)
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
		check.Equal(t, read(all[i]), want, "answer %d", i)
	}
	check.Equal(t, read(other), "202 x")
	check.Equal(t, read(put("t", strings.Repeat("x", 4*blockSize))), dropped, "an answer above the limit")
	check.Equal(t, read(all[4]), "202 4", "after it")
	for _, one := range all {
		a.Drop(one)
	}
	a.Drop(other)
	a.Drop(other)
	files, err := os.ReadDir(dir)
	check.That(t, len(files) == 0 && err == nil && a.disk.Used("t") == 0 && a.disk.Used("other") == 0, "%v, %v", files, err)
}
