package server

import (
	"encoding/json"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// The dashboard asks for metrics that there are, and the documentation has each of them.
func TestDashboard(t *testing.T) {
	h := handler(t)
	ask(h, http.MethodPost, "/v1/run", `{"argv":["true"]}`)
	w := ask(h, http.MethodGet, "/metrics", "")
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), `sbxrun_refused_total{code="setup",tenant="uid-1"} 1`) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	source, err := os.ReadFile("metrics.go")
	if err != nil {
		t.Fatal(err)
	}
	name := regexp.MustCompile(`sbxrun_[a-z_]+`)
	all := name.FindAllString(string(source), -1)
	for _, file := range []string{"../../docs/grafana.json", "../../docs/serve.md"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(file, "json") && !json.Valid(text) {
			t.Errorf("%s is no JSON", file)
		}
		used := name.FindAllString(string(text), -1)
		for i := range used {
			used[i] = strings.TrimSuffix(used[i], "_bucket")
			if !slices.Contains(all, used[i]) {
				t.Errorf("%s: there is no metric %s", file, used[i])
			}
		}
		for _, each := range all {
			if !slices.Contains(used, each) {
				t.Errorf("%s lacks %s", file, each)
			}
		}
	}
}
