// Package quantity reads the times and sizes that users type: 5, 1500ms, 1h30m,
// 1.5d; 4096, 64M, 1.5G.
//
// Both are built from terms, a decimal number and a unit name. A number is
// digits with at most one point and nothing else: no sign, no exponent, no
// "inf". It is multiplied by its unit in integers, so 0.1 is exactly a tenth,
// and what is left over below a nanosecond or a byte is rounded up. Every value
// here ends up as a limit, and a limit that somebody asked for must not turn
// into 0, which callers read as "none".
package quantity

import (
	"errors"
	"math"
	"strings"
)

// numeric is what a number may be made of.
const numeric = "0123456789."

// The two ways in which a term can be wrong. [ParseDuration] and [ParseSize]
// replace them by a message that names the input.
var (
	errSyntax = errors.New("not a quantity")
	errRange  = errors.New("out of range")
)

// cutTerm splits s before and after its first unit name: "1.5h30m" becomes
// "1.5", "h" and "30m". The number is not checked, and each part may be empty.
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
