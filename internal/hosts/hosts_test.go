package hosts

import (
	"testing"

	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A tenant's list holds for what its sessions ask for.
func TestCovers(t *testing.T) {
	for _, test := range []struct {
		most, rule string
		want       bool
	}{
		{"example.org", "example.org", true},
		{"example.org", "example.org:443", true},
		{"example.org", "example.org:8080", false},
		{"example.org:443", "example.org", false},
		{"example.org:443", "example.org:80", false},
		{"example.org", "a.example.org", false},
		{"*.example.org", "a.example.org", true},
		{"*.example.org", "*.a.example.org", true},
		{"*.example.org", "example.org", false},
		{"*.example.org", "aexample.org", false},
		{"10.0.0.0/8", "10.1.0.0/16", true},
		{"10.0.0.0/8", "10.1.2.3", true},
		{"10.1.0.0/16", "10.0.0.0/8", false},
		{"10.0.0.0/16", "10.0.0.0/8", false},
		{"10.0.0.0/8", "10.1.2.3/8", true},
		{"10.0.0.0/8", "11.1.2.3", false},
		{"10.0.0.0/8", "[::ffff:10.0.0.1]:80", true},
	} {
		most, err := network.ParseRule(test.most)
		harness.Must(t, err)
		rule, err := network.ParseRule(test.rule)
		harness.Must(t, err)
		if got := Covers(most, rule); got != test.want {
			t.Errorf("%s covers %s: %v", test.most, test.rule, got)
		}
	}
}
