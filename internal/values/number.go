package values

import (
	"fmt"
	"strconv"
	"strings"
)

// Number is a count. The caller defines the meaning of 0.
type Number int64

func (n *Number) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 10, 63)
	if err != nil {
		return fmt.Errorf("invalid number %q: want a whole number such as 64", text)
	}
	*n = Number(v)
	return nil
}

// Decimal is a number with a fraction, not negative. 0 means no value.
type Decimal float64

func (d *Decimal) UnmarshalText(text []byte) error {
	v, ok := decimal(string(text))
	if !ok {
		return fmt.Errorf("invalid number %q: want a number such as 0.5 or 2", text)
	}
	*d = Decimal(v)
	return nil
}

// decimal parses digits with or without a point. ok is false for other text, and for a number so small that it becomes 0.
func decimal(s string) (v float64, ok bool) {
	v, err := strconv.ParseFloat(s, 64) // also accepts signs, exponents, inf and hexadecimal
	return v, err == nil && strings.Trim(s, numeric) == "" && (v > 0 || strings.Trim(s, "0.") == "")
}

// Percent is a decimal number from 0 to 100, with or without a percent sign.
type Percent float64

func (p *Percent) UnmarshalText(text []byte) error {
	v, ok := decimal(strings.TrimSuffix(string(text), "%"))
	if !ok || v > 100 {
		return fmt.Errorf("invalid percentage %q: want a number from 0 to 100", text)
	}
	*p = Percent(v)
	return nil
}

// Adjustment is a number that can be negative or 0.
type Adjustment struct {
	Given bool
	Value int
}

func (a *Adjustment) UnmarshalText(text []byte) error {
	v, err := strconv.Atoi(string(text))
	if err != nil {
		return fmt.Errorf("invalid number %q: want a whole number", text)
	}
	*a = Adjustment{Given: true, Value: v}
	return nil
}

// Swap is a size. 0 means no value, and -1 or "unlimited" no limit.
type Swap int64

func (s *Swap) UnmarshalText(text []byte) error {
	if word := string(text); word == "-1" || word == "unlimited" {
		*s = -1
		return nil
	}
	var size Size
	if err := size.UnmarshalText(text); err != nil {
		return fmt.Errorf("%w, or unlimited", err)
	}
	*s = Swap(size)
	return nil
}
