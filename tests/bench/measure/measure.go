// Package measure contains what the benchmarks share.
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

// Exit prints an error, if any, and exits.
func Exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// PrintMachine describes the machine.
func PrintMachine() error {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return err
	}
	fmt.Printf("Linux %s, %d CPUs, uid %d, load %s\n\n", unix.ByteSliceToString(uts.Release[:]), runtime.NumCPU(), os.Getuid(), Read("/proc/loadavg"))
	return nil
}

// Read returns the contents of a file for printing, "" if it does not exist.
func Read(path string) string {
	data, _ := os.ReadFile(path)
	return strings.TrimSpace(string(data))
}

// Until waits for a condition.
func Until(ctx context.Context, what string, by time.Time, is func() bool) error {
	for ; !is(); time.Sleep(5 * time.Millisecond) {
		if ctx.Err() != nil || time.Now().After(by) {
			return errors.New("waited in vain for " + what)
		}
	}
	return nil
}

// CPU returns the CPU time of this process, or with RUSAGE_CHILDREN that of its reaped children.
func CPU(who int) time.Duration {
	var r unix.Rusage
	if unix.Getrusage(who, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// MS converts a duration to milliseconds.
func MS(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Sample is a series of measurements or ratios.
type Sample []float64

// Quantile returns a quantile. The median of an even number is the mean of the middle two.
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

// Over returns the ratios to another sample, round by round.
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
