package quantity

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// A Size is a number of bytes that can be used as the type of an option.
type Size int64

// UnmarshalText sets z as [ParseSize] reads text; on an error it leaves z alone.
func (z *Size) UnmarshalText(text []byte) error {
	v, err := ParseSize(string(text))
	if err != nil {
		return err
	}
	*z = Size(v)
	return nil
}

// String returns z in the largest unit that leaves no fraction, such as "64M"
// or "1025", which [ParseSize] reads back to the same value.
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

// ParseSize reads a whole number of bytes ("4096") or a number with one of the
// units K, M, G and T ("64M", "1.5G"), which are powers of 1024. K, k, KB, kb, KiB
// and kib are the same: like docker run --memory, and unlike dd(1), we know no
// powers of 1000. A part of a byte counts as a whole one. The result is never
// negative; 0 is valid, and its meaning is the caller's.
func ParseSize(s string) (int64, error) {
	n, err := scaleSize(cutTerm(s))
	if errors.Is(err, errRange) {
		return 0, fmt.Errorf("invalid size %q: want less than 8388608T", s)
	}
	if err != nil {
		return 0, fmt.Errorf("invalid size %q: want bytes (4096) or a value with a unit (512K, 64M, 1.5G, 1T)", s)
	}
	return n, nil
}

// scaleSize returns in bytes the one term that a size consists of. The error is
// errSyntax or errRange.
func scaleSize(number, unit, rest string) (int64, error) {
	if rest != "" {
		return 0, errSyntax
	}
	switch unit {
	case "", "B", "b":
		// "1.5" is not a number of bytes but a forgotten unit.
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
