package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// sbxrun links no packages of the server, because each would slow down every start.
func TestNoServerPackages(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	check.Must(t, err)
	packages := strings.Fields(string(out))
	check.Require(t, slices.Contains(packages, "github.com/sbxrun/sbxrun/internal/supervise"), "not the packages of sbxrun: %s", out)
	for _, p := range packages {
		for _, server := range []string{"net/http", "crypto/", "log/slog", "danielgtaylor", "prometheus", "coreos", "toml", "modelcontextprotocol", "klauspost", "sbxrun/internal/layers", "sbxrun/internal/cells", "nats-io", "sbxrun/internal/cluster", "sbxrun/internal/proxy", "sbxrun/internal/server", "sbxrun/internal/config", "containerregistry", "docker", "sbxrun/internal/registry", "sbxrun/internal/images"} {
			check.That(t, !strings.Contains(p, server), "%s is linked", p)
		}
	}
}
