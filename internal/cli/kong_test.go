package cli

import (
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// judged is the struct of a command as kong takes it, with what is no flag.
type judged[T any] struct {
	Flags T        `embed:""`
	Words []string `arg:"" optional:""`
}

// judge parses flags with kong, whose tags ours are.
func judge[T any](t *testing.T, args []string) (flags T, err error) {
	t.Helper()
	var j judged[T]
	k, err := kong.New(&j, kong.Name("sbxrun"), kong.NoDefaultHelp(), kong.Exit(func(int) {}), kong.Writers(io.Discard, io.Discard))
	harness.Must(t, err)
	_, err = k.Parse(args)
	return j.Flags, err
}

// TestKong: the tags are those of kong, and flags mean the same to it. (kong takes lists
// apart at commas, and knows no alias and no choices by placeholder.)
func TestKong(t *testing.T) {
	for _, line := range []string{
		"", "--timeout 5", "--timeout=1m30s", "--grace 0.5 --timeout 5", "--env A=b --env=C --env D=", "--tty --quiet", "--json=false", "-tq", "-qt --json",
		"--net=host --memory 64M --memory-swap unlimited", "--nice=-5 --oom-score-adj=1000", "--on-pressure wait --wait-timeout 2m --max-parallel 3",
		"--cpus 0.5 --cpu-time 10 --pids 16 --fsize 1G --nofile 64 --stack 8M", "--warn 50 --alert 90.5", "--bind /a:/b --ro-bind /c --bind /d", "--workdir /w --hostname h --user 1:2",
	} {
		args := strings.Fields(line)
		agree[Run](t, args)
		if !strings.Contains(line, "-t") && !strings.Contains(line, "json") && !strings.Contains(line, "q") {
			agree[Start](t, args)
		}
	}
	for _, line := range []string{"--name web --ready-tcp 80 --ready-timeout 5", "--tag a=b --tag c=d --idle-timeout 1h", "--ready-exec true --wait-ready --json", "--log-max 1M --output-limit kill"} {
		agree[Start](t, strings.Fields(line))
	}
	for _, line := range []string{"--watch --interval 2", "--json", "--prometheus --warn 10"} {
		agree[Stats](t, strings.Fields(line))
	}
}

func agree[T any](t *testing.T, args []string) {
	t.Helper()
	var ours T
	if words, err := Parse(&ours, args); err != nil && !strings.Contains(err.Error(), "command") || len(words) > 0 {
		t.Errorf("%q: %q, %v", args, words, err)
		return
	}
	want, err := judge[T](t, args)
	if err != nil {
		t.Errorf("%q: %v", args, err)
		return
	}
	if diff := cmp.Diff(want, ours, cmp.Exporter(func(reflect.Type) bool { return true })); diff != "" {
		t.Errorf("%q (-kong +ours):\n%s", args, diff)
	}
}
