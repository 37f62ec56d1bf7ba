// Package values parses values of the command line: durations (5, 1500ms, 1h30m, 1.5d), sizes (4096, 64M, 1.5G), other
// numbers, and environment variables. Most are types with UnmarshalText, which does not change the value on an error.
//
// Most of these values become limits, and a requested limit must not become 0, which means no limit. Therefore numbers
// have no unexpected sign, no exponent, and are not "inf". Durations and sizes are parsed exactly, in integers: 0.1 is a
// tenth, and fractions of a nanosecond or a byte are rounded up.
package values

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// numeric has the characters of a number.
const numeric = "0123456789."

// Errors of a term, which is a number and a unit. Callers replace them with a message that contains the input.
var (
	errSyntax = errors.New("not a quantity")
	errRange  = errors.New("out of range")
)

// cutTerm splits s before and after its first unit: "1.5h30m" becomes "1.5", "h" and "30m". It does not check the
// number. Each part can be empty.
func cutTerm(s string) (number, unit, rest string) {
	unit = strings.TrimLeft(s, numeric)
	number = s[:len(s)-len(unit)]
	if i := strings.IndexAny(unit, numeric); i >= 0 {
		unit, rest = unit[:i], unit[i:]
	}
	return number, unit, rest
}

// scale returns number × unit, rounded up to an integer. The number must consist
// of [numeric] characters only; unit must be positive and at most
// math.MaxInt64/10. The error is errSyntax or errRange.
func scale(number string, unit int64) (int64, error) {
	whole, fraction, _ := strings.Cut(number, ".")
	if whole+fraction == "" || strings.Contains(fraction, ".") {
		return 0, errSyntax
	}

	var n int64
	for i := range len(whole) {
		digit := int64(whole[i] - '0')
		if n > (math.MaxInt64-digit)/10 {
			return 0, errRange
		}
		n = n*10 + digit
	}

	// Horner's rule from the last digit: 0.d₁d₂ × unit = (d₁×unit + (d₂×unit)/10)/10.
	// Rounding up at each step equals rounding up once at the end, because
	// ⌈(a+x)/10⌉ = ⌈(a+⌈x⌉)/10⌉ for an integer a. Part never exceeds unit.
	var part int64
	for i := len(fraction) - 1; i >= 0; i-- {
		digit := int64(fraction[i] - '0')
		part = (digit*unit + part + 9) / 10
	}

	if n > (math.MaxInt64-part)/unit {
		return 0, errRange
	}
	return n*unit + part, nil
}

// Duration is a number of seconds ("5", "0.5") or the sum of numbers with units ("1500ms", "1h30m", "1.5d"). The units
// are those of [time.ParseDuration], and d for days of 24 hours as in timeout(1). It is not negative. The caller defines
// the meaning of 0.
type Duration time.Duration

func (d *Duration) UnmarshalText(text []byte) error {
	s := string(text)
	terms := s
	if strings.Trim(s, numeric) == "" {
		terms += "s"
	}

	var sum int64
	for terms != "" {
		var number, unit string
		number, unit, terms = cutTerm(terms)
		n, err := scaleDuration(number, unit)
		if err == nil && n > math.MaxInt64-sum {
			err = errRange
		}
		if errors.Is(err, errRange) {
			return fmt.Errorf("invalid duration %q: want at most 106751 days (292 years)", s)
		}
		if err != nil {
			return fmt.Errorf("invalid duration %q: want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)", s)
		}
		sum += n
	}
	*d = Duration(sum)
	return nil
}

// String returns d in Go's format, such as "1m30s", which parses to the same value.
func (d Duration) String() string { return time.Duration(d).String() }

// Span is a [Duration] that cannot be 0.
type Span Duration

func (s *Span) UnmarshalText(text []byte) error {
	err := (*Duration)(s).UnmarshalText(text)
	if err == nil && *s == 0 {
		err = errors.New("must be greater than 0")
	}
	return err
}

func (s Span) String() string { return Duration(s).String() }

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

// Size is a number of bytes ("4096"), or a number with one of the units K, M, G and T ("64M", "1.5G"), which are powers
// of 1024. K, k, KB, kb, KiB and kib are the same, like docker run --memory and unlike dd(1). It is not negative. The
// caller defines the meaning of 0.
type Size int64

func (z *Size) UnmarshalText(text []byte) error {
	n, err := scaleSize(cutTerm(string(text)))
	if errors.Is(err, errRange) {
		return fmt.Errorf("invalid size %q: want less than 8388608T", text)
	}
	if err != nil {
		return fmt.Errorf("invalid size %q: want bytes (4096) or a value with a unit (512K, 64M, 1.5G, 1T)", text)
	}
	*z = Size(n)
	return nil
}

// String returns z in the largest unit without a fraction, such as "64M" or "1025", which parses to the same value.
func (z Size) String() string {
	n, unit := int64(z), ""
	for _, larger := range []string{"K", "M", "G", "T"} {
		if n == 0 || n%1024 != 0 {
			break
		}
		n, unit = n/1024, larger
	}
	return strconv.FormatInt(n, 10) + unit
}

// Maximum is a size of which 0 means no limit, [math.MaxInt64].
type Maximum int64

func (m *Maximum) UnmarshalText(text []byte) error {
	var size Size
	err := size.UnmarshalText(text)
	if *m = Maximum(size); err == nil && size == 0 {
		*m = math.MaxInt64
	}
	return err
}

// scaleSize returns a term in bytes. The error is errSyntax or errRange.
func scaleSize(number, unit, rest string) (int64, error) {
	if rest != "" {
		return 0, errSyntax
	}
	switch unit {
	case "", "B", "b":
		// "1.5" lacks a unit.
		if strings.Contains(number, ".") {
			return 0, errSyntax
		}
		return scale(number, 1)
	case "K", "k", "KB", "kb", "KiB", "kib":
		return scale(number, 1<<10)
	case "M", "m", "MB", "mb", "MiB", "mib":
		return scale(number, 1<<20)
	case "G", "g", "GB", "gb", "GiB", "gib":
		return scale(number, 1<<30)
	case "T", "t", "TB", "tb", "TiB", "tib":
		return scale(number, 1<<40)
	}
	return 0, errSyntax
}
