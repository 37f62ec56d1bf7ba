package sbxrun

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"time"
)

// Refused means that the request was refused and nothing has run.
type Refused struct {
	Failure
	Status int           // HTTP status; 0 if the server was not reached
	Again  time.Duration // time until a retry; negative if retrying does not help
}

func (e *Refused) Error() string {
	if e.Hint != "" {
		return e.Message + "; " + e.Hint
	}
	return e.Message
}

// Unproven means that the command has run and processes may still be running. Report may be nil.
type Unproven struct {
	Failure
	Report *Report
}

func (e *Unproven) Error() string { return e.Message }

// Lost means that the answer did not arrive, or was incomplete. The command may have run; the server
// ends a call whose client disconnects.
type Lost struct{ Err error }

func (e *Lost) Error() string {
	return fmt.Sprintf("the answer did not arrive, or was incomplete: %v", e.Err)
}
func (e *Lost) Unwrap() error { return e.Err }

// failure is the server's error document.
type failure struct {
	Error   *Failure `json:"error"`
	Started *bool    `json:"started"`
	Report  *Report  `json:"report"`
}

func (f *failure) err(status int) error {
	if f.Error == nil || f.Error.Code == "" || f.Started == nil {
		return &Lost{fmt.Errorf("no valid answer: status %d", status)}
	}
	if *f.Started {
		return &Unproven{*f.Error, f.Report}
	}
	return &Refused{*f.Error, status, -1}
}

// answered returns the error in a response.
func answered(r *http.Response, text []byte) error {
	var f failure
	_ = json.Unmarshal(text, &f) // without JSON its members stay nil
	err := f.err(r.StatusCode)
	if e, ok := err.(*Refused); ok && (r.StatusCode == http.StatusTooManyRequests || r.StatusCode == http.StatusServiceUnavailable) {
		e.Again = time.Second
		if seconds, err := strconv.ParseFloat(r.Header.Get("Retry-After"), 64); err == nil && seconds >= 0 && seconds < math.MaxInt64/float64(time.Second) {
			e.Again = time.Duration(seconds * float64(time.Second))
		}
	}
	return err
}
