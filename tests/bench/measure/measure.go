// Package measure is what the benchmarks have in common.
package measure

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Main runs a benchmark, and exits. Its context ends with SIGINT or SIGTERM.
func Main(bench func(context.Context) error) {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	err := bench(ctx)
	if ctx.Err() != nil {
		err = errors.New("interrupted")
	}
	stop()
	Exit(err)
}

// Exit ends the program, and tells of an error.
func Exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// PrintMachine prints what it is measured on.
func PrintMachine() error {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err
	}
	fmt.Printf("Linux %s, %d CPUs, uid %d, load %s\n\n", unix.ByteSliceToString(uts.Release[:]), runtime.NumCPU(), os.Getuid(), Read("/proc/loadavg"))
	return nil
}

// Read is what a file has, to be printed: nothing if it is not there.
func Read(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

// Until waits for something.
func Until(ctx context.Context, what string, by time.Time, is func() bool) error {
	for ; !is(); time.Sleep(5 * time.Millisecond) {
		if ctx.Err() != nil || time.Now().After(by) {
			return errors.New("waited in vain for " + what)
		}
	}
	return nil
}

// CPU is what this process has used, or with RUSAGE_CHILDREN what it has waited for.
func CPU(who int) time.Duration {
	var r unix.Rusage
	if unix.Getrusage(who, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// MS is a time in ms.
func MS(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Sample is a series of measurements of the same thing, or of ratios.
type Sample []float64

// Quantile of an even number at the middle is the mean of the two there.
func (s Sample) Quantile(q float64) float64 {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	at := q * float64(len(sorted)-1)
	low := int(at)
	high := min(low+1, len(sorted)-1)
	return sorted[low] + (at-float64(low))*(sorted[high]-sorted[low])
}

// Over is the ratio of each measurement to the other of the same round.
func (s Sample) Over(other Sample) (ratios Sample) {
	for i := range s {
		ratios = append(ratios, s[i]/other[i])
	}
	return ratios
}

func (s Sample) String() string {
	var words []string
	for _, v := range s {
		words = append(words, fmt.Sprintf("%.3f", v))
	}
	return strings.Join(words, " ")
}
