// Package check has the assertions of the tests.
package check

import (
	"errors"
	"fmt"
)

// T is the part of *testing.T that an assertion needs.
type T interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// That fails the test unless ok.
func That(t T, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Errorf(format, args...)
	}
}

// Require ends the test unless ok.
func Require(t T, ok bool, format string, args ...any) {
	if !ok {
		t.Helper()
		t.Fatalf(format, args...)
	}
}

// Equal fails the test unless got is want. what is a format and its arguments.
func Equal[V comparable](t T, got, want V, what ...any) {
	if got != want {
		t.Helper()
		t.Errorf("%sgot %s, want %s", label(what), quote(got), quote(want))
	}
}

// OK fails the test on an error. what is a format and its arguments.
func OK(t T, err error, what ...any) {
	if err != nil {
		t.Helper()
		t.Errorf("%s%v", label(what), err)
	}
}

// NoDiff fails the test with a difference, for example of [cmp.Diff], unless it is empty. what is a format and its
// arguments.
func NoDiff(t T, diff string, what ...any) {
	if diff != "" {
		t.Helper()
		t.Errorf("%s\n%s", label(what), diff)
	}
}

// Must ends the test on errors.
func Must(t T, errs ...error) {
	if err := errors.Join(errs...); err != nil {
		t.Helper()
		t.Fatalf("%v", err)
	}
}

func label(what []any) string {
	if len(what) == 0 {
		return ""
	}
	return fmt.Sprintf(what[0].(string), what[1:]...) + ": "
}

func quote(v any) string {
	if s, ok := v.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprintf("%+v", v)
}
