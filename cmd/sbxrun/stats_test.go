package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/tests/check"
)

// some returns statistics with characters that must be escaped.
func some() statistics {
	bound := boundUse{Path: "/a \"b\"\\c\nd/pids.max", Tasks: 65, Max: 100, Percent: 65, Level: admission.Warn}
	return statistics{At: "2026-01-01T00:00:00.000Z", Level: admission.Warn, Tightest: bound,
		Bounds: []boundUse{bound, {Path: "/proc/sys/kernel/pid_max", Tasks: 200, Max: 32768, Percent: 0.61, Level: admission.OK}},
		Sandboxes: []sandboxUse{
			{ID: "00000000000000aa", Name: "web", Status: "running", Tasks: 4, Zombies: 1, Memory: 64 << 20, MemorySource: "cgroup", Uptime: 90500},
			{ID: "00000000000000bb", Status: "starting", MemorySource: "rss"},
		},
		Zombies: 2, Orphans: 3}
}

// exposed parses the metrics with Prometheus's parser.
func exposed(t *testing.T, s statistics) map[string]*dto.MetricFamily {
	t.Helper()
	var text strings.Builder
	check.Must(t, printPrometheus(&text, s))
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text.String()))
	check.Require(t, err == nil, "%v in\n%s", err, text.String())
	// The parser drops metrics without samples.
	for _, m := range regexp.MustCompile(`(?m)^# HELP (\S+) \S.*\n# TYPE (\S+) gauge$`).FindAllStringSubmatch(text.String(), -1) {
		check.That(t, m[1] == m[2] && strings.HasPrefix(m[1], "sbxrun_"), "help of %s, type of %s", m[1], m[2])
		if families[m[1]] == nil {
			families[m[1]] = &dto.MetricFamily{}
		}
	}
	return families
}

func TestPrometheus(t *testing.T) {
	s := some()
	got := map[string]float64{}
	for name, family := range exposed(t, s) {
		check.That(t, family.GetType() == dto.MetricType_GAUGE && family.GetHelp() != "", "%s: type %v, help %q", name, family.GetType(), family.GetHelp())
		for _, m := range family.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			got[name+"{"+strings.Join(labels, ",")+"}"] = m.GetGauge().GetValue()
		}
	}
	want := map[string]float64{
		"sbxrun_tasks{bound=" + s.Bounds[0].Path + "}":                65,
		"sbxrun_tasks{bound=/proc/sys/kernel/pid_max}":                200,
		"sbxrun_tasks_max{bound=" + s.Bounds[0].Path + "}":            100,
		"sbxrun_tasks_max{bound=/proc/sys/kernel/pid_max}":            32768,
		"sbxrun_pressure_ratio{}":                                     0.65,
		"sbxrun_pressure_level{}":                                     1,
		"sbxrun_sandboxes{}":                                          2,
		"sbxrun_sandbox_tasks{id=00000000000000aa,name=web}":          4,
		"sbxrun_sandbox_tasks{id=00000000000000bb,name=}":             0,
		"sbxrun_sandbox_zombies{id=00000000000000aa,name=web}":        1,
		"sbxrun_sandbox_zombies{id=00000000000000bb,name=}":           0,
		"sbxrun_sandbox_memory_bytes{id=00000000000000aa,name=web}":   64 << 20,
		"sbxrun_sandbox_memory_bytes{id=00000000000000bb,name=}":      0,
		"sbxrun_sandbox_uptime_seconds{id=00000000000000aa,name=web}": 90.5,
		"sbxrun_sandbox_uptime_seconds{id=00000000000000bb,name=}":    0,
		"sbxrun_zombies{}":                                            2,
		"sbxrun_orphans{}":                                            3,
	}
	check.NoDiff(t, cmp.Diff(want, got), "samples (-want +got)")
}

// A frame fits the terminal, and clears the rest of each line and of the screen.
func TestFrame(t *testing.T) {
	sequence := regexp.MustCompile("\x1b\\[[0-9;?]*[A-Za-z]")
	for _, size := range [][2]int{{200, 50}, {40, 6}, {1, 1}, {10, 2}} {
		text := frame(some(), size[0], size[1])
		lines := strings.Split(text, "\r\n")
		check.That(t, len(lines) <= size[1], "%v: %d lines", size, len(lines))
		for _, line := range lines {
			n := len([]rune(sequence.ReplaceAllString(line, "")))
			check.That(t, n <= size[0], "%v: a line of %d columns: %q", size, n, line)
			check.That(t, strings.Contains(line, clearLine), "%v: the rest of a line stays: %q", size, line)
		}
		check.That(t, strings.HasPrefix(text, toTop) && strings.HasSuffix(text, clearRest) && !strings.Contains(text, "\x1b[2J"), "%v: %q", size, text)
	}
	text := frame(some(), 40, 6)
	check.That(t, strings.Contains(text, "more"), "it does not say that something is left out: %q", text)
}
