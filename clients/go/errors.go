package sbxrun

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Refused says that a request came to nothing: nothing of it has run.
type Refused struct {
	Failure
	Status int           // of HTTP; 0 if the server was not reached
	Again  time.Duration // after how long it may be tried again; negative if that is no use
}

func (e *Refused) Error() string {
	if e.Hint != "" {
		return e.Message + "; " + e.Hint
	}
	return e.Message
}

// Unproven says that it has run, and that something of it may be left. Report may be nil.
type Unproven struct {
	Failure
	Report *Report
}

func (e *Unproven) Error() string { return e.Message }

// Lost says that the answer did not come, or not whole. It may have run; the server ends a call
// whose client has left.
type Lost struct{ Err error }

func (e *Lost) Error() string { return fmt.Sprintf("the answer did not come, or broke off: %v", e.Err) }
func (e *Lost) Unwrap() error { return e.Err }

// failure is an error as the server tells it.
type failure struct {
	Error   *Failure `json:"error"`
	Started *bool    `json:"started"`
	Report  *Report  `json:"report"`
}

func (f *failure) err(status int) error {
	if f.Error == nil || f.Started == nil {
		return &Lost{fmt.Errorf("no answer, but the status %d", status)}
	}
	if *f.Started {
		return &Unproven{*f.Error, f.Report}
	}
	return &Refused{*f.Error, status, -1}
}

// answered is the error that an answer is.
func answered(r *http.Response, text []byte) error {
	var f failure
	_ = json.Unmarshal(text, &f) // what is no JSON has no members
	err := f.err(r.StatusCode)
	if e, ok := err.(*Refused); ok && (r.StatusCode == http.StatusTooManyRequests || r.StatusCode == http.StatusServiceUnavailable) {
		e.Again = time.Second
		if seconds, err := strconv.ParseFloat(r.Header.Get("Retry-After"), 64); err == nil && seconds >= 0 {
			e.Again = time.Duration(seconds * float64(time.Second))
		}
	}
	return err
}
