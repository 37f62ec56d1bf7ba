package quantity

import (
	"math"
	"math/big"
	"strings"
	"testing"
	"time"
)

func TestParseDuration(t *testing.T) {
	tests := []struct {
		in   string
		want time.Duration
	}{
		{"0", 0},
		{"0s", 0},
		{"0.000", 0},
		{"5", 5 * time.Second},
		{"007", 7 * time.Second},
		{"0.5", 500 * time.Millisecond},
		{".5", 500 * time.Millisecond},
		{"5.", 5 * time.Second},
		{"1ms", time.Millisecond},
		{"1500ms", 1500 * time.Millisecond},
		{"2.5s", 2500 * time.Millisecond},
		{"5m", 5 * time.Minute},
		{"1h30m", 90 * time.Minute},
		{"1d", 24 * time.Hour},
		{"0.5d", 12 * time.Hour},
		{"1d12h0.5s", 36*time.Hour + 500*time.Millisecond},
		{"3us", 3 * time.Microsecond},
		{"3µs", 3 * time.Microsecond},
		{"3μs", 3 * time.Microsecond},

		// Exact where binary floating point is not.
		{"0.1", 100_000_000},
		{"1.1", 1_100_000_000},
		{"0.3", 300_000_000},
		{"4.35", 4_350_000_000},
		{"123456789.123456789", 123_456_789_123_456_789},
		{"0.123456789d", 10_666_666_569_600},

		// A part of a nanosecond is rounded up, never down to "no limit".
		{"0.3333333333333333", 333_333_334},
		{"0.1ns", 1},
		{"0.000000000001", 1},
		{"0." + strings.Repeat("0", 1000) + "1", 1},
		{"1." + strings.Repeat("0", 1000), time.Second},

		{"9223372036854775807ns", math.MaxInt64},
		{"9223372036.854775807", math.MaxInt64},
		{"2562047h47m16.854775807s", math.MaxInt64},
	}
	for _, tt := range tests {
		got, err := ParseDuration(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("ParseDuration(%.40q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestParseDurationErrors(t *testing.T) {
	syntax := []string{
		"", " ", ".", "s", ".s", "-1", "-1s", "-0", "+1", "+-1", "1.5x", "5 s", " 5", "5 ", "5\n",
		"1.2.3", "1..2", "1h30", "30 1h", "1h-5m", "1h 5m", "1S", "1D", "1w", "1min", "1sec",
		"1e3", "1e-12", "0x10", "0x1p-2s", "1_000", "1,5", "NaN", "nan", "Inf", "+Inf", "infinity", "١s", "1\x00", "\xff",
	}
	for _, in := range syntax {
		got, err := ParseDuration(in)
		if err == nil || !strings.Contains(err.Error(), "want seconds") || got != 0 {
			t.Errorf("ParseDuration(%q) = %v, %v; want a syntax error", in, got, err)
		}
	}

	tooLong := []string{
		"9460800000", // 300 years
		"109500d",
		"9223372036854775808ns",
		"9223372036854775807.1ns",
		"9223372036.854775808",
		"2562047h47m16.854775808s",
		"9223372036854775807ns1ns",
		"9223372036854775808",
		"99999999999999999999999999",
	}
	for _, in := range tooLong {
		got, err := ParseDuration(in)
		if err == nil || !strings.Contains(err.Error(), "want at most") || got != 0 {
			t.Errorf("ParseDuration(%q) = %v, %v; want a range error", in, got, err)
		}
	}

	_, err := ParseDuration("1.5x")
	want := `invalid duration "1.5x": want seconds (5, 0.5) or a value with a unit (1500ms, 5m, 1h, 1d)`
	if err == nil || err.Error() != want {
		t.Errorf("got error %v, want %s", err, want)
	}
}

func TestDurationUnmarshalText(t *testing.T) {
	d := Duration(time.Minute)
	if err := d.UnmarshalText([]byte("nonsense")); err == nil || d != Duration(time.Minute) {
		t.Errorf("after nonsense: %v, %v; want 1m0s and an error", d, err)
	}
	if err := d.UnmarshalText([]byte("90")); err != nil || d.String() != "1m30s" {
		t.Errorf("after 90: %v, %v; want 1m30s", d, err)
	}
}

func FuzzParseDuration(f *testing.F) {
	for _, s := range []string{"0", "5", "0.1", "1e-12", "-1s", "1.5x", "1h30m", "0.5d", "1µs", "9223372036854775807ns", "9460800000"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseDuration(s)
		if err != nil {
			return
		}
		if got < 0 {
			t.Fatalf("ParseDuration(%q) = %v, which is negative", s, got)
		}
		again, err := ParseDuration(Duration(got).String())
		if err != nil || again != got {
			t.Fatalf("ParseDuration(%q) = %v, but its String gives %v, %v", s, got, again, err)
		}
		if strings.Trim(s, numeric) == "" {
			if want := ceilTimes(t, s, int64(time.Second)); want.Cmp(big.NewInt(int64(got))) != 0 {
				t.Fatalf("ParseDuration(%q) = %d, want %v", s, got, want)
			}
		}
	})
}

// ceilTimes computes number × unit, rounded up, with package big.
func ceilTimes(t *testing.T, number string, unit int64) *big.Int {
	t.Helper()
	r, ok := new(big.Rat).SetString(number)
	if !ok {
		t.Fatalf("%q is not a number to package big", number)
	}
	r.Mul(r, new(big.Rat).SetInt64(unit))
	n := new(big.Int).Add(r.Num(), r.Denom())
	n.Sub(n, big.NewInt(1))
	return n.Quo(n, r.Denom())
}
