package values

import (
	"math"
	"testing"
)

func TestNumber(t *testing.T) {
	for in, want := range map[string]Number{"0": 0, "1": 1, "007": 7, "9223372036854775807": math.MaxInt64} {
		var n Number
		if err := n.UnmarshalText([]byte(in)); err != nil || n != want {
			t.Errorf("%q: %d, %v", in, n, err)
		}
	}
	for _, in := range []string{"", " ", "-1", "+1", "1.5", "1e3", "0x10", "1_000", "9223372036854775808", "five", "1 "} {
		n := Number(42)
		if err := n.UnmarshalText([]byte(in)); err == nil || n != 42 {
			t.Errorf("%q: %v, %v", in, n, err)
		}
	}
}

func TestPercent(t *testing.T) {
	for in, want := range map[string]Percent{"0": 0, "60": 60, "80%": 80, "0.001": 0.001, ".5": 0.5, "100": 100} {
		var p Percent
		if err := p.UnmarshalText([]byte(in)); err != nil || p != want {
			t.Errorf("%q: %v, %v", in, p, err)
		}
	}
	for _, in := range []string{"", "%", ".", "-1", "+1", "100.1", "1e1", "inf", "NaN", "0x1p3", "1_0", "60%%", " 60"} {
		p := Percent(42)
		if err := p.UnmarshalText([]byte(in)); err == nil || p != 42 {
			t.Errorf("%q: %v, %v", in, p, err)
		}
	}
}
