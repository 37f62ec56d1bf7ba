package limits

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Each command of a lasting group has its own CPU quota, whatever the period was of the one before:
// of v1 that is a file of its own.
func TestRenewedQuota(t *testing.T) {
	g, err := Lasting(id(t))
	if err != nil {
		t.Fatal(err)
	}
	if g == nil {
		t.Log("only systemd could make a cgroup here")
		return
	}
	dirs := g.Dirs()
	t.Cleanup(func() {
		empty(t, dirs)
		if err := g.Remove(time.Now().Add(5 * time.Second)); err != nil {
			t.Error(err)
		}
	})
	for _, cpus := range []float64{0.005, 1, 1, 0.25, 0.002, 0.003, 0.5} {
		err := g.Renew(Request{CPUs: cpus})
		if errors.Is(err, ErrRenew) && !can(here(t), "cpu") {
			t.Logf("nobody here can set one: %v", err)
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := g.Throttle(); err != nil {
			t.Fatal(err)
		}
		if got := quotaOf(t, g); got != cpus {
			t.Errorf("asked for %v CPUs, the kernel gives %v", cpus, got)
		}
		g.Unthrottle(cpus == 1) // as at a command's end
	}
}

// quotaOf is how many CPUs the kernel lets the group use.
func quotaOf(t *testing.T, g *Group) float64 {
	t.Helper()
	dir := g.read["cpu"]
	files := []string{"/cpu.cfs_quota_us", "/cpu.cfs_period_us"}
	if dir == g.v2 {
		files = []string{"/cpu.max"}
	}
	var numbers []float64 // the quota and the period
	for _, file := range files {
		text, err := os.ReadFile(dir + file)
		if err != nil {
			t.Fatal(err)
		}
		for _, word := range strings.Fields(string(text)) {
			n, err := strconv.ParseFloat(word, 64)
			if err != nil {
				t.Fatal(err)
			}
			numbers = append(numbers, n)
		}
	}
	if len(numbers) != 2 {
		t.Fatalf("%s: %v", dir, numbers)
	}
	return numbers[0] / numbers[1]
}
