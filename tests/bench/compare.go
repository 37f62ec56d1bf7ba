package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// raw gets every measurement; nil if they are printed.
var raw io.Writer

// variant is one way of doing what is compared.
type variant struct {
	letter string // for the ratios
	name   string
	once   func() (time.Duration, error) // does it and returns what it took
}

// rounds is how many to measure, where the program's default is n.
func rounds(n int) int {
	if *pairs > 0 {
		return *pairs
	}
	return n
}

// compare runs the variants in turn, each round beginning with the next one, and
// prints the median of each and, of each two, the median of the ratios round by round.
// warmUp rounds come before, and are not counted. It returns what each has taken.
func compare(program, what string, n, warmUp int, variants []variant) ([]sample, error) {
	took := make([]sample, len(variants))
	for round := -warmUp; round < n; round++ {
		for i := range variants {
			i = (i + round + warmUp) % len(variants)
			t, err := variants[i].once()
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", variants[i].name, err)
			}
			if round < 0 {
				continue
			}
			took[i] = append(took[i], ms(t))
			if raw != nil {
				fmt.Fprintf(raw, "%s\t%d\t%s\t%.3f\n", program, round, variants[i].name, ms(t))
			}
		}
	}
	fmt.Printf("%s: %s; rounds: %d\n", program, what, n)
	for i, v := range variants {
		fmt.Printf("  %s  %-26s median %.3f ms (min %.3f, quartiles %.3f and %.3f)\n", v.letter, v.name,
			took[i].quantile(0.5), took[i].quantile(0), took[i].quantile(0.25), took[i].quantile(0.75))
	}
	for i, a := range variants {
		for j, b := range variants[i+1:] {
			r := took[i].over(took[i+1+j])
			fmt.Printf("  %s/%s %.2f (quartiles %.2f and %.2f)\n", a.letter, b.letter, r.quantile(0.5), r.quantile(0.25), r.quantile(0.75))
		}
	}
	if raw == nil {
		for i, v := range variants {
			fmt.Printf("  raw %s, ms: %v\n", v.letter, took[i])
		}
	}
	fmt.Println()
	return took, nil
}

// sample is a series of measurements of the same thing, in ms; or of ratios.
type sample []float64

// quantile of an even number at the middle is the mean of the two there.
func (s sample) quantile(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

func (s sample) over(other sample) (ratios sample) {
	for i := range s {
		ratios = append(ratios, s[i]/other[i])
	}
	return ratios
}

func (s sample) String() string {
	var words []string
	for _, v := range s {
		words = append(words, fmt.Sprintf("%.3f", v))
	}
	return strings.Join(words, " ")
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
