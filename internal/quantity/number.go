package quantity

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// A Count is a whole number that can be used as the type of an option.
type Count int

// UnmarshalText sets c to what ParseCount reads; on an error it leaves c alone.
func (c *Count) UnmarshalText(text []byte) error {
	n, err := ParseCount(string(text))
	if err != nil {
		return err
	}
	*c = Count(n)
	return nil
}

// ParseCount reads a whole number of digits alone. 0 is valid, and its meaning is
// the caller's.
func ParseCount(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("invalid number %q: want one from 0 to %d", s, math.MaxInt32)
	}
	return int(n), nil
}

// A Percent is a part of something, 100 for all of it, that can be used as the type
// of an option.
type Percent float64

// UnmarshalText sets p as ParsePercent reads text; on an error it leaves p alone.
func (p *Percent) UnmarshalText(text []byte) error {
	v, err := ParsePercent(string(text))
	if err != nil {
		return err
	}
	*p = Percent(v)
	return nil
}

// ParsePercent reads a decimal number from 0 to 100, with or without a percent sign.
func ParsePercent(s string) (float64, error) {
	number := strings.TrimSuffix(s, "%")
	v, err := strconv.ParseFloat(number, 64)
	// ParseFloat also takes signs, exponents, inf and hexadecimal.
	if err != nil || strings.Trim(number, numeric) != "" || v > 100 {
		return 0, fmt.Errorf("invalid percentage %q: want a number from 0 to 100", s)
	}
	return v, nil
}
