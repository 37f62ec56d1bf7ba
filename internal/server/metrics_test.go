package server

import (
	"encoding/json"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A user of the socket sees only their own activity, except for root, the server's user, and configured tenants.
func TestSeesAll(t *testing.T) {
	h := newServer(t, nowhere{}).Handler(http.NotFoundHandler())
	for peer, sees := range map[string]bool{"uid-0": true, uidTenant(os.Geteuid()): true, "uid-1": true, "uid-4002": false} {
		for path, status := range map[string]int{"/metrics": http.StatusForbidden, "/v1/status": http.StatusOK} {
			w := ask(as(peer, h), http.MethodGet, path, "")
			if sees {
				status = http.StatusOK
			}
			check.That(t, w.Code == status && (path != "/v1/status" || strings.Contains(w.Body.String(), `"machine"`) == sees), "%s of %s: %d %s", path, peer, w.Code, w.Body)
		}
	}
}

// The dashboard uses existing metrics, and the documentation lists all of them.
func TestDashboard(t *testing.T) {
	h := handler(t)
	ask(h, http.MethodPost, "/v1/run", `{"argv":["true"]}`)
	w := ask(h, http.MethodGet, "/metrics", "")
	check.Require(t, w.Code == http.StatusOK && strings.Contains(w.Body.String(), `sbxrun_refused_total{code="setup",tenant="uid-1"} 1`), "%d %s", w.Code, w.Body)
	source := harness.ReadFile(t, "metrics.go")
	name := regexp.MustCompile(`sbxrun_[a-z_]+`)
	all := name.FindAllString(string(source), -1)
	for _, file := range []string{"../../docs/grafana.json", "../../docs/guides/server.md"} {
		text := harness.ReadFile(t, file)
		check.That(t, !strings.HasSuffix(file, "json") || json.Valid(text), "%s is no JSON", file)
		used := name.FindAllString(string(text), -1)
		for i := range used {
			used[i] = strings.TrimSuffix(used[i], "_bucket")
			check.That(t, slices.Contains(all, used[i]), "%s: there is no metric %s", file, used[i])
		}
		for _, each := range all {
			check.That(t, slices.Contains(used, each), "%s lacks %s", file, each)
		}
	}
}
