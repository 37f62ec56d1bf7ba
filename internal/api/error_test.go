package api

import (
	"net/http/httptest"
	"strings"
	"testing"
)

// People read errors too, and no browser takes them for HTML.
func TestWrite(t *testing.T) {
	w := httptest.NewRecorder()
	NewError(Usage, "there is no language <b> & so on", "").Write(w)
	if !strings.Contains(w.Body.String(), `"hint":"GET /openapi.json`) {
		t.Errorf("no hint: %s", w.Body)
	}
	if w.Code != 400 || !strings.Contains(w.Body.String(), "language <b> & so on") || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}
