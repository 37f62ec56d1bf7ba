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
	"github.com/sbxrun/sbxrun/tests/check"
)

// A full disk is reported without its path.
func TestDiskFull(t *testing.T) {
	for _, no := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		e := AsError(fmt.Errorf("store: %w", &fs.PathError{Op: "write", Path: "/srv/files/1", Err: no}))
		check.That(t, e.Failure.Code == QuotaDisk && e.Failure.Message == "the server's disk is full: "+no.Error(), "%+v", e.Failure)
	}
}

// A server without free descriptors is busy, whichever operation needs one. An unproven teardown is still reported.
func TestFilesUsedUp(t *testing.T) {
	full := &fs.PathError{Op: "open", Path: "/srv/files/1", Err: syscall.EMFILE}
	for _, err := range []error{full, &result.Error{Code: "bwrap-unusable", Message: "cannot use bwrap: " + full.Error(), Err: full}} {
		e := AsError(err)
		check.That(t, e.Failure.Code == Busy && e.GetHeaders().Get("Retry-After") != "" && !strings.Contains(e.Failure.Message, "/srv") && !e.Started, "%+v", e)
	}
	e := AsError(&result.Error{Code: "unproven", Err: full})
	check.That(t, e.Failure.Code == Unproven && e.Started, "%+v", e)
}

// Errors are readable for people, and browsers do not treat them as HTML.
func TestWrite(t *testing.T) {
	w := httptest.NewRecorder()
	NewError(Usage, "unknown language <b> & so on", "").Write(w)
	check.That(t, strings.Contains(w.Body.String(), `"hint":"see GET /openapi.json`), "no hint: %s", w.Body)
	check.That(t, w.Code == 400 && strings.Contains(w.Body.String(), "language <b> & so on") && w.Header().Get("Content-Type") == "application/json",
		"%d %v %s", w.Code, w.Header(), w.Body)
}

// Only temporary errors have Retry-After.
func TestRetryAfter(t *testing.T) {
	for code, status := range Codes() {
		again := NewError(code, "", "").GetHeaders().Get("Retry-After") != ""
		check.That(t, again == (status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable), "%s, status %d: %v", code, status, again)
	}
}
