package quantity

import "testing"

func TestParseCount(t *testing.T) {
	for in, want := range map[string]int{"0": 0, "1": 1, "007": 7, "2147483647": 2147483647} {
		if got, err := ParseCount(in); err != nil || got != want {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", " ", "-1", "+1", "1.5", "1e3", "0x10", "1_000", "2147483648", "five", "1 "} {
		c := Count(42)
		if err := c.UnmarshalText([]byte(in)); err == nil || c != 42 {
			t.Errorf("%q: %v, %v", in, c, err)
		}
	}
}

func TestParsePercent(t *testing.T) {
	for in, want := range map[string]float64{"0": 0, "60": 60, "80%": 80, "0.001": 0.001, ".5": 0.5, "100": 100} {
		if got, err := ParsePercent(in); err != nil || got != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "%", ".", "-1", "+1", "100.1", "1e1", "inf", "NaN", "0x1p3", "1_0", "60%%", " 60"} {
		p := Percent(42)
		if err := p.UnmarshalText([]byte(in)); err == nil || p != 42 {
			t.Errorf("%q: %v, %v", in, p, err)
		}
	}
}
