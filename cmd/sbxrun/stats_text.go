package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/internal/output"
)

func printStatistics(w io.Writer, s statistics) error {
	_, err := io.WriteString(w, strings.Join(statisticsLines(s), "\n")+"\n")
	return err
}

// statisticsLines returns the bounds, the tightest first, the sandboxes and the totals.
func statisticsLines(s statistics) []string {
	var text strings.Builder
	t := output.NewTable(&text, "LEVEL", "TASKS", "MAX", "USED", "", "BOUND")
	for _, b := range s.Bounds {
		t.Row(b.Level, b.Tasks, b.Max, fmt.Sprintf("%.0f%%", b.Percent), bar(b.Percent), b.Path)
	}
	_ = t.Flush() // a strings.Builder takes everything
	fmt.Fprintln(&text)
	t = output.NewTable(&text, "ID", "NAME", "STATUS", "TASKS", "ZOMBIES", "MEMORY", "UPTIME")
	for _, b := range s.Sandboxes {
		uptime := time.Duration(b.Uptime * float64(time.Millisecond))
		t.Row(b.ID, cmp.Or(b.Name, "-"), b.Status, b.Tasks, b.Zombies, output.Size(b.Memory), output.Age(uptime))
	}
	_ = t.Flush()
	fmt.Fprintf(&text, "\n%s, %s, %s", output.Count(len(s.Sandboxes), "sandbox", "es"), output.Count(s.Zombies, "zombie", "s"), output.Count(s.Orphans, "orphan", "s"))
	if s.Zombies+s.Orphans > 0 {
		fmt.Fprint(&text, "; sbxrun cleanup lists them and ends what it can")
	}
	return strings.Split(text.String(), "\n")
}

func bar(percent float64) string {
	const width = 20
	n := min(width, int(percent*width/100+0.5))
	return "[" + strings.Repeat("#", n) + strings.Repeat(" ", width-n) + "]"
}
