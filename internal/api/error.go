package api

import (
	"errors"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"syscall"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Code identifies an error for programs.
type Code string

// The error codes.
const (
	Usage         Code = "usage"
	TooLarge      Code = "too-large"
	MediaType     Code = "media-type"
	Auth          Code = "auth"
	Policy        Code = "policy"
	NoSuchSession Code = "no-such-session"
	NoSuchCall    Code = "no-such-call"
	NoSuchProcess Code = "no-such-process"
	NoSuchFile    Code = "no-such-file"
	NoSuchPath    Code = "no-such-path"
	NoSuchMethod  Code = "no-such-method"
	NoSuchSnap    Code = "no-such-snapshot"
	NoSuchVolume  Code = "no-such-volume"
	BusyVolume    Code = "volume-busy"
	NameInUse     Code = "name-in-use"
	Ended         Code = "ended"
	BusySession   Code = "busy-session"
	Idempotency   Code = "idempotency"
	Quota         Code = "quota"
	QuotaKept     Code = "quota-kept"
	Busy          Code = "busy"
	Draining      Code = "draining"
	Setup         Code = "setup"
	Limit         Code = "limit"
	Unproven      Code = "unproven"
	QuotaDisk     Code = "quota-disk"
	Internal      Code = "internal"
	Lost          Code = "lost"
)

// status is the HTTP status of each code.
var status = map[Code]int{
	Usage: http.StatusBadRequest, TooLarge: http.StatusRequestEntityTooLarge, MediaType: http.StatusUnsupportedMediaType,
	Auth: http.StatusUnauthorized, Policy: http.StatusForbidden,
	NoSuchSession: http.StatusNotFound, NoSuchCall: http.StatusNotFound, NoSuchProcess: http.StatusNotFound, NoSuchFile: http.StatusNotFound, NoSuchPath: http.StatusNotFound, NoSuchMethod: http.StatusMethodNotAllowed,
	NoSuchSnap: http.StatusNotFound, NoSuchVolume: http.StatusNotFound, BusyVolume: http.StatusConflict, NameInUse: http.StatusConflict,
	Ended: http.StatusGone, BusySession: http.StatusConflict, Idempotency: http.StatusConflict,
	Quota: http.StatusTooManyRequests, QuotaKept: http.StatusConflict, Busy: http.StatusServiceUnavailable, Draining: http.StatusServiceUnavailable,
	Limit: http.StatusNotImplemented, Setup: http.StatusInternalServerError, Unproven: http.StatusInternalServerError, QuotaDisk: http.StatusInsufficientStorage,
	Internal: http.StatusInternalServerError, Lost: http.StatusBadGateway,
}

// Codes returns all codes with their HTTP statuses.
func Codes() map[Code]int { return status }

// Error is the response to a request that failed, or whose teardown is unproven.
type Error struct {
	Failure Failure `json:"error"`
	Started bool    `json:"started" doc:"Whether anything has started. A retry is safe only if false."`
	Report  *Answer `json:"report,omitempty" doc:"Report of a command that has run, with the codes unproven and ended"`
}

// Failure describes an error and what to do about it.
type Failure struct {
	Code    Code   `json:"code" doc:"Error code for programs"`
	Message string `json:"message" doc:"What happened"`
	Hint    string `json:"hint,omitempty" doc:"What to do about it"`
}

// NewError returns an error for a request of which nothing has started.
func NewError(code Code, message, hint string) *Error {
	if code == Usage && hint == "" {
		hint = "see GET /openapi.json"
	}
	return &Error{Failure: Failure{Code: code, Message: message, Hint: hint}}
}

func (e *Error) Error() string { return e.Failure.Message }

// GetStatus returns the HTTP status.
func (e *Error) GetStatus() int { return status[e.Failure.Code] }

// retryAfter is the Retry-After of temporary errors in seconds.
const retryAfter = 1

// GetHeaders returns Retry-After and WWW-Authenticate where they apply.
func (e *Error) GetHeaders() http.Header {
	h := http.Header{}
	switch e.Failure.Code {
	case Quota, Busy, Draining:
		h.Set("Retry-After", strconv.Itoa(retryAfter))
	case Auth:
		h.Set("WWW-Authenticate", "Bearer")
	}
	return h
}

// Write sends the error as the response.
func (e *Error) Write(w http.ResponseWriter) {
	maps.Copy(w.Header(), e.GetHeaders())
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(e.GetStatus())
	text, _ := result.JSON(e) // always encodable
	_, _ = w.Write(text)      // the client may have disconnected
}

// AsError converts an error of the engine.
func AsError(err error) *Error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e
	}
	// Use the errno without its path, which does not concern the client.
	no := syscall.Errno(0)
	_ = errors.As(err, &no) // stays 0 otherwise
	var e *result.Error
	if !errors.As(err, &e) {
		if no == syscall.ENOSPC || no == syscall.EDQUOT {
			return NewError(QuotaDisk, "the server's disk is full: "+no.Error(), "")
		}
		e = &result.Error{Code: string(Setup), Message: err.Error()}
	}
	code := Code(e.Code)
	switch {
	case code == "workdir" || code == "not-found" || code == "not-executable":
		code = Usage
	case status[code] == 0:
		code = Setup // the message has the details
	}
	if code == Setup && (no == syscall.EMFILE || no == syscall.ENFILE) {
		return NewError(Busy, "the server has no free file descriptors: "+no.Error(), "try again later")
	}
	// Flags belong to the command line.
	hint := e.Hint
	switch {
	case code == Limit:
		hint = "run sbxrun doctor as the server's user"
	case strings.Contains(hint, "--"):
		hint = ""
	}
	out := NewError(code, e.Message, hint)
	out.Started = code == Unproven // it may still be running
	return out
}
