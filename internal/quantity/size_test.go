package quantity

import (
	"math"
	"math/big"
	"strings"
	"testing"
)

func TestParseSize(t *testing.T) {
	tests := []struct {
		in   string
		want int64
	}{
		{"0", 0},
		{"0K", 0},
		{"1", 1},
		{"4096", 4096},
		{"4096B", 4096},
		{"1K", 1 << 10},
		{"1k", 1 << 10},
		{"1KB", 1 << 10},
		{"1KiB", 1 << 10},
		{"1kib", 1 << 10},
		{"64M", 64 << 20},
		{"64m", 64 << 20},
		{"64mb", 64 << 20},
		{"64MiB", 64 << 20},
		{"2G", 2 << 30},
		{"2g", 2 << 30},
		{"2GB", 2 << 30},
		{"2GiB", 2 << 30},
		{"3T", 3 << 40},
		{"3t", 3 << 40},
		{"3TB", 3 << 40},
		{"3TiB", 3 << 40},
		{"1.5G", 3 << 29},
		{".5K", 512},
		{"1.K", 1024},

		// A part of a byte is rounded up, never down to "no limit".
		{"0.3K", 308},
		{"0.0000000000000001T", 1},

		{"9223372036854775807", math.MaxInt64},
		{"8388607T", 8388607 << 40},
	}
	for _, tt := range tests {
		got, err := ParseSize(tt.in)
		if err != nil || got != tt.want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", tt.in, got, err, tt.want)
		}
	}
}

func TestParseSizeErrors(t *testing.T) {
	syntax := []string{
		"", " ", ".", "K", ".K", "-1", "-1M", "-0", "+1", "+-1", "5 M", " 5", "5M ", "5M\n", "1.5", "1.", "1.5B",
		"1.2.3K", "1K1", "1K1M", "1iB", "1Ki", "1Kb", "1KK", "1P", "1MM", "1e3", "1e3K", "0x10", "1_000", "1,5G", "NaN", "inf", "١", "1\x00",
		"1\u212a", // the Kelvin sign, a K to strings.ToLower
	}
	for _, in := range syntax {
		got, err := ParseSize(in)
		if err == nil || !strings.Contains(err.Error(), "want bytes") || got != 0 {
			t.Errorf("ParseSize(%q) = %v, %v; want a syntax error", in, got, err)
		}
	}

	for _, in := range []string{"9223372036854775808", "8388608T", "8388607.99999999999999T", "99999999999999999999999G"} {
		got, err := ParseSize(in)
		if err == nil || !strings.Contains(err.Error(), "want less than") || got != 0 {
			t.Errorf("ParseSize(%q) = %v, %v; want a range error", in, got, err)
		}
	}

	_, err := ParseSize("64 megs")
	want := `invalid size "64 megs": want bytes (4096) or a value with a unit (512K, 64M, 1.5G, 1T)`
	if err == nil || err.Error() != want {
		t.Errorf("got error %v, want %s", err, want)
	}
}

func TestSizeString(t *testing.T) {
	tests := []struct {
		size Size
		want string
	}{
		{0, "0"},
		{1, "1"},
		{1023, "1023"},
		{1024, "1K"},
		{1025, "1025"},
		{1536, "1536"},
		{64 << 20, "64M"},
		{3 << 29, "1536M"},
		{5 << 30, "5G"},
		{4096 << 40, "4096T"},
		{math.MaxInt64, "9223372036854775807"},
	}
	for _, tt := range tests {
		if got := tt.size.String(); got != tt.want {
			t.Errorf("Size(%d).String() = %q, want %q", int64(tt.size), got, tt.want)
		}
	}
}

func TestSizeUnmarshalText(t *testing.T) {
	z := Size(7)
	if err := z.UnmarshalText([]byte("nonsense")); err == nil || z != 7 {
		t.Errorf("after nonsense: %v, %v; want 7 and an error", z, err)
	}
	if err := z.UnmarshalText([]byte("1.5G")); err != nil || z != 3<<29 {
		t.Errorf("after 1.5G: %v, %v; want 1536M", z, err)
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"0", "4096", "1.5G", "64MiB", "1KB", "-1", "1.5", "8388608T", "0.0000000000000001T", "junk"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := ParseSize(s)
		if err != nil {
			return
		}
		if got < 0 {
			t.Fatalf("ParseSize(%q) = %v, which is negative", s, got)
		}
		again, err := ParseSize(Size(got).String())
		if err != nil || again != got {
			t.Fatalf("ParseSize(%q) = %v, but its String gives %v, %v", s, got, again, err)
		}
		if number, ok := strings.CutSuffix(s, "G"); ok {
			if want := ceilTimes(t, number, 1<<30); want.Cmp(big.NewInt(got)) != 0 {
				t.Fatalf("ParseSize(%q) = %d, want %v", s, got, want)
			}
		}
	})
}
