package values

import (
	"math"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestNumber(t *testing.T) {
	for in, want := range map[string]Number{"0": 0, "1": 1, "007": 7, "9223372036854775807": math.MaxInt64} {
		var n Number
		err := n.UnmarshalText([]byte(in))
		check.That(t, err == nil && n == want, "%q: %d, %v", in, n, err)
	}
	for _, in := range []string{"", " ", "-1", "+1", "1.5", "1e3", "0x10", "1_000", "9223372036854775808", "five", "1 "} {
		n := Number(42)
		err := n.UnmarshalText([]byte(in))
		check.That(t, err != nil && n == 42, "%q: %v, %v", in, n, err)
	}
}

func TestDecimal(t *testing.T) {
	for in, want := range map[string]Decimal{"0": 0, "0.00": 0, "2": 2, "0.5": 0.5, ".5": 0.5, "1.": 1} {
		var d Decimal
		err := d.UnmarshalText([]byte(in))
		check.That(t, err == nil && d == want, "%q: %v, %v", in, d, err)
	}
	for _, in := range []string{"", ".", "-0", "-1", "+1", "1e1", "1e-400", "0." + strings.Repeat("0", 400) + "1", strings.Repeat("9", 400), "inf", "NaN", "0x1p3", "1_0", " 1"} {
		d := Decimal(42)
		err := d.UnmarshalText([]byte(in))
		check.That(t, err != nil && d == 42, "%q: %v, %v", in, d, err)
	}
}

func TestPercent(t *testing.T) {
	for in, want := range map[string]Percent{"0": 0, "60": 60, "80%": 80, "0.001": 0.001, ".5": 0.5, "100": 100} {
		var p Percent
		err := p.UnmarshalText([]byte(in))
		check.That(t, err == nil && p == want, "%q: %v, %v", in, p, err)
	}
	for _, in := range []string{"", "%", ".", "-1", "+1", "100.1", "1e1", "inf", "NaN", "0x1p3", "1_0", "60%%", " 60"} {
		p := Percent(42)
		err := p.UnmarshalText([]byte(in))
		check.That(t, err != nil && p == 42, "%q: %v, %v", in, p, err)
	}
}
