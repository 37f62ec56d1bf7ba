package tests

import (
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// When a command leaves many empty files in /tmp, the kernel takes longer to free them than to end
// the processes. The proof does not wait for that, but sbxrun's exit does.
func TestLitter(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "--timeout", "600", "--tmp-size", "512M", "/fixtures/litter", "100000")
	r.Expect(t, 0, "exited")
	proof := *r.Report.TeardownMS
	if rest := float64(r.Elapsed.Milliseconds()) - r.Report.DurationMS; proof > rest {
		t.Errorf("the proof took %v ms, and what comes after it %v ms", proof, rest)
	}
}
