package main

import (
	"fmt"
	"io"
	"time"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

// raw gets every measurement; nil if they are printed.
var raw io.Writer

// variant is one of the alternatives that are compared.
type variant struct {
	letter string // for the ratios
	name   string
	once   func() time.Duration // measures it once
}

// rounds returns the number of rounds; n is the program's default.
func rounds(n int) int {
	if *pairs > 0 {
		return *pairs
	}
	return n
}

// compare measures the variants in turn, starting each round with the next one, and prints the
// median of each and, for each pair, the median of the ratios per round. It first makes warmUp
// rounds that do not count. It returns the measurements.
func compare(program, what string, n, warmUp int, variants []variant) []measure.Sample {
	took := make([]measure.Sample, len(variants))
	for round := -warmUp; round < n; round++ {
		for i := range variants {
			i = (i + round + warmUp) % len(variants)
			var t time.Duration
			if err := caught(func() { t = variants[i].once() }); err != nil {
				fail("%s: %w", variants[i].name, err)
			}
			must(ctx.Err())
			if round < 0 {
				continue
			}
			took[i] = append(took[i], measure.MS(t))
			if raw != nil {
				fmt.Fprintf(raw, "%s\t%d\t%s\t%.3f\n", program, round, variants[i].name, measure.MS(t))
			}
		}
	}
	fmt.Printf("%s: %s; rounds: %d\n", program, what, n)
	for i, v := range variants {
		fmt.Printf("  %s  %-26s median %.3f ms (min %.3f, quartiles %.3f and %.3f)\n", v.letter, v.name,
			took[i].Quantile(0.5), took[i].Quantile(0), took[i].Quantile(0.25), took[i].Quantile(0.75))
	}
	for i, a := range variants {
		for j, b := range variants[i+1:] {
			r := took[i].Over(took[i+1+j])
			fmt.Printf("  %s/%s %.2f (quartiles %.2f and %.2f)\n", a.letter, b.letter, r.Quantile(0.5), r.Quantile(0.25), r.Quantile(0.75))
		}
	}
	if raw == nil {
		for i, v := range variants {
			fmt.Printf("  raw %s, ms: %v\n", v.letter, took[i])
		}
	}
	fmt.Println()
	return took
}
