package api

import (
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// A full disk is reported without its path.
func TestDiskFull(t *testing.T) {
	for _, no := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		e := AsError(fmt.Errorf("store: %w", &fs.PathError{Op: "write", Path: "/srv/files/1", Err: no}))
		if e.Failure.Code != QuotaDisk || e.Failure.Message != "the server's disk is full: "+no.Error() {
			t.Errorf("%+v", e.Failure)
		}
	}
}

// A server without free descriptors is busy, whichever operation needs one. An unproven teardown is still
// reported.
func TestFilesUsedUp(t *testing.T) {
	full := &fs.PathError{Op: "open", Path: "/srv/files/1", Err: syscall.EMFILE}
	for _, err := range []error{full, &result.Error{Code: "bwrap-unusable", Message: "cannot use bwrap: " + full.Error(), Err: full}} {
		e := AsError(err)
		if e.Failure.Code != Busy || e.GetHeaders().Get("Retry-After") == "" || strings.Contains(e.Failure.Message, "/srv") || e.Started {
			t.Errorf("%+v", e)
		}
	}
	if e := AsError(&result.Error{Code: "unproven", Err: full}); e.Failure.Code != Unproven || !e.Started {
		t.Errorf("%+v", e)
	}
}

// Errors are readable for people, and browsers do not treat them as HTML.
func TestWrite(t *testing.T) {
	w := httptest.NewRecorder()
	NewError(Usage, "unknown language <b> & so on", "").Write(w)
	if !strings.Contains(w.Body.String(), `"hint":"see GET /openapi.json`) {
		t.Errorf("no hint: %s", w.Body)
	}
	if w.Code != 400 || !strings.Contains(w.Body.String(), "language <b> & so on") || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%d %v %s", w.Code, w.Header(), w.Body)
	}
}

// Only temporary errors have Retry-After.
func TestRetryAfter(t *testing.T) {
	for code, status := range Codes() {
		again := NewError(code, "", "").GetHeaders().Get("Retry-After") != ""
		if again != (status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable) {
			t.Errorf("%s, status %d: %v", code, status, again)
		}
	}
}
