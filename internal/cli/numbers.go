package cli

import (
	"fmt"
	"math"
	"strconv"

	"github.com/sbxrun/sbxrun/internal/quantity"
)

// Number is a count; 0 is that none was given, as is "0".
type Number int64

// UnmarshalText sets n to a whole number, zero or more.
func (n *Number) UnmarshalText(text []byte) error {
	v, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil || v < 0 {
		return fmt.Errorf("invalid number %q: want a whole number", text)
	}
	*n = Number(v)
	return nil
}

// Decimal is a number with a fraction; 0 is that none was given, as is "0".
type Decimal float64

// UnmarshalText sets d to a number, zero or more.
func (d *Decimal) UnmarshalText(text []byte) error {
	v, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(v >= 0) || math.IsInf(v, 0) {
		return fmt.Errorf("invalid number %q: want a number such as 0.5 or 2", text)
	}
	*d = Decimal(v)
	return nil
}

// Adjustment is a number that may be negative, and for which 0 is a value like any
// other.
type Adjustment struct {
	Given bool
	Value int
}

// UnmarshalText sets a to a whole number.
func (a *Adjustment) UnmarshalText(text []byte) error {
	v, err := strconv.Atoi(string(text))
	if err != nil {
		return fmt.Errorf("invalid number %q: want a whole number", text)
	}
	*a = Adjustment{Given: true, Value: v}
	return nil
}

// Swap is a size; 0 is that none was given, -1 that there is no limit.
type Swap int64

// UnmarshalText sets s to a size, or to -1, also called unlimited.
func (s *Swap) UnmarshalText(text []byte) error {
	if word := string(text); word == "-1" || word == "unlimited" {
		*s = -1
		return nil
	}
	v, err := quantity.ParseSize(string(text))
	if err != nil {
		return fmt.Errorf("%w, or unlimited", err)
	}
	*s = Swap(v)
	return nil
}
