package tests

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// 50 concurrent runs in one directory, half of which time out, don't disturb each other.
func TestConcurrentRuns(t *testing.T) {
	const runs = 50
	dir := harness.SharedDir(t)
	var wg sync.WaitGroup
	ids := make([]string, runs)
	for i := range runs {
		wg.Go(func() {
			code, cause, last := i+1, "exited", fmt.Sprintf("exit %d", i+1)
			args := []string{"--timeout", "50"}
			if i%2 == 1 {
				code, cause, last = 124, "timeout", "sleep 60"
				args = []string{"--timeout", harness.Deadline(3 * time.Second).String()}
			}
			script := fmt.Sprintf("setsid sleep 60 & echo run %d; echo %d >>file-%d; %s", i, i, i, last)
			p := harness.Start(t, harness.Options{Dir: dir}, append(args, "--bind", dir, "sh", "-c", script)...)
			r := p.Wait()
			r.Expect(t, code, cause)
			want := fmt.Sprintf("run %d\n", i)
			check.That(t, string(r.Stdout) == want, "run %d printed %q", i, r.Stdout)
			got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("file-%d", i)))
			check.That(t, err == nil && string(got) == fmt.Sprintf("%d\n", i), "run %d wrote %q, %v", i, got, err)
			ids[i] = r.Report.ID
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for i, id := range ids {
		check.That(t, id != "" && !seen[id], "run %d has the id %q, which is empty or another's", i, id)
		seen[id] = true
	}
}
