package values

import (
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
)

// unchanged is the value that an error leaves.
const unchanged = 42

func duration(s string) (time.Duration, error) {
	d := Duration(unchanged)
	err := d.UnmarshalText([]byte(s))
	return time.Duration(d), err
}

func size(s string) (int64, error) {
	z := Size(unchanged)
	err := z.UnmarshalText([]byte(s))
	return int64(z), err
}

// refused expects an error that contains says, and an unchanged value, for each text.
func refused[V time.Duration | int64](t *testing.T, parse func(string) (V, error), says string, texts ...string) {
	t.Helper()
	for _, text := range texts {
		got, err := parse(text)
		check.That(t, err != nil && strings.Contains(err.Error(), says) && got == unchanged, "%q: %v, %v; want an error with %s", text, got, err, says)
	}
}

func TestDuration(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"0": 0, "0s": 0, "0.000": 0, "5": 5 * time.Second, "007": 7 * time.Second, "0.5": 500 * time.Millisecond,
		".5": 500 * time.Millisecond, "5.": 5 * time.Second, "1ms": time.Millisecond, "1500ms": 1500 * time.Millisecond,
		"2.5s": 2500 * time.Millisecond, "5m": 5 * time.Minute, "1h30m": 90 * time.Minute, "1d": 24 * time.Hour,
		"0.5d": 12 * time.Hour, "1d12h0.5s": 36*time.Hour + 500*time.Millisecond, "3us": 3 * time.Microsecond,
		"3µs": 3 * time.Microsecond, "3μs": 3 * time.Microsecond,
		// Values that binary floating point cannot represent.
		"0.1": 100_000_000, "1.1": 1_100_000_000, "0.3": 300_000_000, "4.35": 4_350_000_000,
		"123456789.123456789": 123_456_789_123_456_789, "0.123456789d": 10_666_666_569_600,
		// Fractions of a nanosecond are rounded up, not down to 0.
		"0.3333333333333333": 333_333_334, "0.1ns": 1, "0.000000000001": 1, "0." + strings.Repeat("0", 1000) + "1": 1,
		"1." + strings.Repeat("0", 1000): time.Second, "9223372036854775807ns": math.MaxInt64,
		"9223372036.854775807": math.MaxInt64, "2562047h47m16.854775807s": math.MaxInt64,
	} {
		got, err := duration(in)
		check.That(t, err == nil && got == want, "duration(%.40q) = %d, %v; want %d", in, got, err, want)
	}
}

func TestDurationErrors(t *testing.T) {
	refused(t, duration, "want seconds",
		"", " ", ".", "s", ".s", "-1", "-1s", "-0", "+1", "+-1", "1.5x", "5 s", " 5", "5 ", "5\n",
		"1.2.3", "1..2", "1h30", "30 1h", "1h-5m", "1h 5m", "1S", "1D", "1w", "1min", "1sec",
		"1e3", "1e-12", "0x10", "0x1p-2s", "1_000", "1,5", "NaN", "nan", "Inf", "+Inf", "infinity", "١s", "1\x00", "\xff")
	refused(t, duration, "want at most",
		"9460800000", "109500d", "9223372036854775808ns", "9223372036854775807.1ns", "9223372036.854775808",
		"2562047h47m16.854775808s", "9223372036854775807ns1ns", "9223372036854775808", "99999999999999999999999999")
	refused(t, duration, `invalid duration "1.5x": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`, "1.5x")
}

func FuzzDuration(f *testing.F) {
	for _, s := range []string{"0", "5", "0.1", "1e-12", "-1s", "1.5x", "1h30m", "0.5d", "1µs", "9223372036854775807ns", "9460800000"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := duration(s)
		if err != nil {
			return
		}
		check.Require(t, got >= 0, "duration(%q) = %v, which is negative", s, got)
		again, err := duration(Duration(got).String())
		check.Require(t, err == nil && again == got, "duration(%q) = %v, but its String gives %v, %v", s, got, again, err)
		if strings.Trim(s, numeric) == "" {
			want := ceilTimes(t, s, int64(time.Second))
			check.Require(t, want.Cmp(big.NewInt(int64(got))) == 0, "duration(%q) = %d, want %v", s, got, want)
		}
	})
}

func TestSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "0K": 0, "1": 1, "4096": 4096, "4096B": 4096, "1K": 1 << 10, "1k": 1 << 10, "1KB": 1 << 10, "1KiB": 1 << 10,
		"1kib": 1 << 10, "64M": 64 << 20, "64m": 64 << 20, "64mb": 64 << 20, "64MiB": 64 << 20, "2G": 2 << 30, "2g": 2 << 30,
		"2GB": 2 << 30, "2GiB": 2 << 30, "3T": 3 << 40, "3t": 3 << 40, "3TB": 3 << 40, "3TiB": 3 << 40, "1.5G": 3 << 29,
		".5K": 512, "1.K": 1024,
		// Fractions of a byte are rounded up, not down to 0.
		"0.3K": 308, "0.0000000000000001T": 1, "9223372036854775807": math.MaxInt64, "8388607T": 8388607 << 40,
	} {
		got, err := size(in)
		check.That(t, err == nil && got == want, "size(%q) = %d, %v; want %d", in, got, err, want)
	}
}

func TestSizeErrors(t *testing.T) {
	refused(t, size, "want bytes",
		"", " ", ".", "K", ".K", "-1", "-1M", "-0", "+1", "+-1", "5 M", " 5", "5M ", "5M\n", "1.5", "1.", "1.5B",
		"1.2.3K", "1K1", "1K1M", "1iB", "1Ki", "1Kb", "1KK", "1P", "1MM", "1e3", "1e3K", "0x10", "1_000", "1,5G", "NaN", "inf", "١", "1\x00",
		"1\u212a") // the Kelvin sign, a K to strings.ToLower
	refused(t, size, "want less than", "9223372036854775808", "8388608T", "8388607.99999999999999T", "99999999999999999999999G")
	refused(t, size, `invalid size "64 megs": want bytes (4096) or a value with a unit (512K, 64M, 1.5G, 1T)`, "64 megs")
}

func TestSizeString(t *testing.T) {
	for size, want := range map[Size]string{
		0: "0", 1: "1", 1023: "1023", 1024: "1K", 1025: "1025", 1536: "1536", 64 << 20: "64M",
		3 << 29: "1536M", 5 << 30: "5G", 4096 << 40: "4096T", math.MaxInt64: "9223372036854775807",
	} {
		check.Equal(t, size.String(), want, "Size(%d).String()", int64(size))
	}
}

func FuzzSize(f *testing.F) {
	for _, s := range []string{"0", "4096", "1.5G", "64MiB", "1KB", "-1", "1.5", "8388608T", "0.0000000000000001T", "junk"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := size(s)
		if err != nil {
			return
		}
		check.Require(t, got >= 0, "size(%q) = %v, which is negative", s, got)
		again, err := size(Size(got).String())
		check.Require(t, err == nil && again == got, "size(%q) = %v, but its String gives %v, %v", s, got, again, err)
		if number, ok := strings.CutSuffix(s, "G"); ok {
			want := ceilTimes(t, number, 1<<30)
			check.Require(t, want.Cmp(big.NewInt(got)) == 0, "size(%q) = %d, want %v", s, got, want)
		}
	})
}

// ceilTimes computes number × unit, rounded up, with package big.
func ceilTimes(t *testing.T, number string, unit int64) *big.Int {
	t.Helper()
	r, ok := new(big.Rat).SetString(number)
	check.Require(t, ok, "%q is not a number to package big", number)
	r.Mul(r, new(big.Rat).SetInt64(unit))
	n := new(big.Int).Add(r.Num(), r.Denom())
	n.Sub(n, big.NewInt(1))
	return n.Quo(n, r.Denom())
}

func TestMaximum(t *testing.T) {
	for text, want := range map[string]Maximum{"0": math.MaxInt64, "0K": math.MaxInt64, "1": 1, "2M": 2 << 20, "-1": 0, "": 0} {
		var m Maximum
		err := m.UnmarshalText([]byte(text))
		check.That(t, m == want && (err == nil) == (want > 0), "%q: %d, %v; want %d", text, m, err, want)
	}
}
