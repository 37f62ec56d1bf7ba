package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// printStatistics prints for people.
func printStatistics(w io.Writer, s statistics) error {
	_, err := io.WriteString(w, strings.Join(statisticsLines(s), "\n")+"\n")
	return err
}

// statisticsLines are the lines of it: bounds, the tightest first; sandboxes; the rest.
func statisticsLines(s statistics) []string {
	var text strings.Builder
	t := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "LEVEL\tTASKS\tMAX\tUSED\t\tBOUND")
	for _, b := range s.Bounds {
		fmt.Fprintf(t, "%s\t%d\t%d\t%.0f%%\t%s\t%s\n", b.Level, b.Tasks, b.Max, b.Percent, bar(b.Percent), printable(b.Path))
	}
	_ = t.Flush() // a strings.Builder takes everything
	fmt.Fprintln(&text)
	t = tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "ID\tNAME\tSTATUS\tTASKS\tZOMBIES\tMEMORY\tUPTIME")
	for _, b := range s.Sandboxes {
		uptime := time.Duration(b.Uptime * float64(time.Millisecond))
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%d\t%s\t%s\n", b.ID, cmp.Or(b.Name, "-"), b.Status, b.Tasks, b.Zombies, mebibytes(b.Memory), inOneUnit(uptime))
	}
	_ = t.Flush()
	fmt.Fprintf(&text, "\n%s, %s, %s", count(len(s.Sandboxes), "sandbox", "es"), count(s.Zombies, "zombie", "s"), count(s.Orphans, "orphan", "s"))
	if s.Zombies+s.Orphans > 0 {
		fmt.Fprint(&text, "; sbxrun cleanup tells which, and ends what it can")
	}
	return strings.Split(text.String(), "\n")
}

// bar is a percentage to be seen from afar.
func bar(percent float64) string {
	const width = 20
	n := min(width, int(percent*width/100+0.5))
	return "[" + strings.Repeat("#", n) + strings.Repeat(" ", width-n) + "]"
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1fM", float64(n)/(1<<20)) }

func count(n int, what, plural string) string {
	if n == 1 {
		plural = ""
	}
	return fmt.Sprintf("%d %s%s", n, what, plural)
}
