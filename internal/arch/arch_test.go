package arch

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

const refusal = "# github.com/sbxrun/sbxrun/internal/arch\n" +
	"internal/arch/unsupported.go:6:9: undefined: sbxrun_builds_only_for_Linux_on_amd64_and_arm64\n"

// tool runs go in the module's directory for another machine, and returns what it prints.
func tool(t *testing.T, machine string, args ...string) (string, error) {
	t.Helper()
	goos, goarch, _ := strings.Cut(machine, "/")
	cmd := exec.Command("go", args...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// The message is the same, and the only one, wherever sbxrun does not run.
func TestRefused(t *testing.T) {
	for _, machine := range []string{"linux/386", "linux/arm", "linux/riscv64", "linux/mips64le", "darwin/arm64"} {
		out, err := tool(t, machine, "build", "./internal/arch")
		check.That(t, err != nil && out == refusal, "%s: %v, and it says:\n%s", machine, err, out)
	}
}

// No package gets to a message of its own: those that would not compile import this one. What else they import is
// compiled in the meantime, for half a minute, and so this is one of the tests that SBXRUN_SOAK asks for.
func TestRefusedAsAWhole(t *testing.T) {
	if os.Getenv("SBXRUN_SOAK") == "" {
		t.Log("not without SBXRUN_SOAK")
		return
	}
	const machine = "linux/386" // where numbers, too, are smaller
	out, err := tool(t, machine, "build", "./...")
	check.That(t, err != nil && out == refusal, "%s: %v, and it says:\n%s", machine, err, out)
}
