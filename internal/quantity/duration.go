package quantity

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"
)

// A Duration is a [time.Duration] that can be used as the type of an option.
type Duration time.Duration

// UnmarshalText sets d as [ParseDuration] reads text; on an error it leaves d alone.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := ParseDuration(string(text))
	if err != nil {
		return err
	}
	*d = Duration(v)
	return nil
}

// String returns d in Go's form, such as "1m30s", which [ParseDuration] reads
// back to the same value.
func (d Duration) String() string {
	return time.Duration(d).String()
}

// ParseDuration reads a number of seconds ("5", "0.5") or one or more numbers
// with units ("1500ms", "1h30m", "1.5d"), which are added up. The units are
// those of [time.ParseDuration], and d for days of 24 hours as in timeout(1).
// A part of a nanosecond counts as a whole one. The result is never negative;
// 0 is valid, and its meaning is the caller's.
func ParseDuration(s string) (time.Duration, error) {
	terms := s
	if strings.Trim(s, numeric) == "" {
		terms += "s"
	}

	var sum int64
	for terms != "" {
		var number, unit string
		number, unit, terms = cutTerm(terms)
		d, err := scaleDuration(number, unit)
		if err == nil && d > math.MaxInt64-sum {
			err = errRange
		}
		if errors.Is(err, errRange) {
			return 0, fmt.Errorf("invalid duration %q: want at most 106751 days (292 years)", s)
		}
		if err != nil {
			return 0, fmt.Errorf("invalid duration %q: want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)", s)
		}
		sum += d
	}
	return time.Duration(sum), nil
}

// scaleDuration returns one term in nanoseconds. The error is errSyntax or errRange.
func scaleDuration(number, unit string) (int64, error) {
	var d time.Duration
	switch unit {
	case "ns":
		d = time.Nanosecond
	case "us", "µs", "μs": // U+00B5, the micro sign, and U+03BC, the Greek letter
		d = time.Microsecond
	case "ms":
		d = time.Millisecond
	case "s":
		d = time.Second
	case "m":
		d = time.Minute
	case "h":
		d = time.Hour
	case "d":
		d = 24 * time.Hour
	default:
		return 0, errSyntax
	}
	return scale(number, int64(d))
}
