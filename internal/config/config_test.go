package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// An error in a file names the key and the expected value.
func TestWrong(t *testing.T) {
	const nats = "[nats]\nurl = \"nats://127.0.0.1\"\n"
	name := filepath.Join(t.TempDir(), "c.toml")
	for _, test := range []struct{ text, says string }{
		{"places = \"64\"", "c.toml:1:10: places: want an integer"},
		{"places = 1.5", "places: want an integer, not a TOML float"},
		{"listen = \"unix:/a\"", "listen: want a list of strings"},
		{"[languages.x]\ncommand = 1", "languages.x.command: want a list of strings"},
		{"drain_timeout = 30", `c.toml:1:17: drain_timeout: want a string: "5", "0.5", "1500ms" or "5m"`},
		{"[call]\ntimeout = 30_000_000", "c.toml:2:11: call.timeout: want a string"},
		{"calls = {keep = 0.5}", "c.toml:1:17: calls: want a string"},
		{"[tenants.a]\nmax_timeout = 5", "tenants.a.max_timeout: want a string"},
		{"tenants.a.max_timeout = 0", "tenants.a.max_timeout: want a string"},
		{"[call]\ntimeout = \"half\"", "c.toml:2:11: invalid duration \"half\""},
		{"[tenants.a]\nsessions = -1", "tenants.a.sessions: want 0 or more"},
		{"[tenant]\nrate = nan", "tenant.rate: want 0 or more"},
		{"[call]\nmemory = -1", "call.memory: want 0 or more"},
		{"[call]\nmemory = '100K'", "call: limit memory: 102400 bytes is too low"},
		{"[tenant]\npids = 2", "tenant: limit pids: 2 is too low"},
		{"[tenants.a]\ncpus = 0.0001", "tenants.a: limit cpus: 0.0001 is out of range"},
		{"places = 0", "places: want more than 0"}, {"[call]\nmax_answer = 0", "call.max_answer: want more than 0"}, {"[files]\nttl = '0'", "files.ttl: want more than 0"},
		{"state_dir = \"x\"", "state_dir \"x\": want an absolute path"},
		{nats + "creds = \"/no/such\"", "nats.creds: open /no/such"},
		{"[nats]\nurl = \"http://127.0.0.1\"", "want a comma-separated list of nats://"},
		{"[nats]\nurl = \"nats://u:secret%zz@h\"", "want a comma-separated list of nats://"},
		{"[images.\"a b\"]\nimage = \"x\"", "images.a b: want a name"},
		{"[images.a]\nrooms = {min = 1}", "images.a.image: want the name of an image"},
		{"[images.a]\nimage = \"x\"\nrooms = {min = 2, max = 1}", "images.a.rooms: want min from 0 to max"},
		{"[images.a]\nimage = \"x\"\nrooms = 2", "images.a.rooms: want"},
		{"[images.a]\nimage = \"x\"\ndevices = [\"../x\"]", "images.a.devices: "},
		{"[tenant]\nimages = [\"a\"]", `tenant.images: no "a" in [images]`},
		{"[languages.x]\ncommand = [\"x\"]\nfile = \"x\"\nimage = \"a\"", `languages.x.image: no "a" in [images]`},
		{"[images.a]\nimage = \"x\"\ndevices = [\"/dev/fuse\"]\n[tenant]\nimages = [\"a\"]", ""},
		{nats, ""}, {"[nats]\nurl = \"a, tls://b:1\"", ""}, {"[tenant]\nrate = 0.5", ""},
	} {
		check.Must(t, os.WriteFile(name, []byte(test.text), 0o600))
		c, err := Load(name)
		if c.NATS.Node = "n"; err == nil {
			err = c.Check()
		}
		check.That(t, (err == nil) == (test.says == "") && (err == nil || strings.Contains(err.Error(), test.says) && !strings.Contains(err.Error(), "secret")), "%s: %v", test.text, err)
	}
}

// A tenant inherits absent ceilings, but not those that it sets to 0.
func TestTenants(t *testing.T) {
	name := filepath.Join(t.TempDir(), "c.toml")
	for _, own := range []string{"[tenants.guest]\nsessions = 0\noverlays = []\nmax_timeout = \"0\"", "[tenants]\nguest = {sessions = 0, overlays = [], max_timeout = \"0\"}", "[tenants]\nguest.sessions = 0\nguest.overlays = []\nguest.max_timeout = \"0\""} {
		text := "[tenant]\nqueue = 7\nmax_timeout = \"5\"\noverlays = [\"app\"]\nnetwork = [\"a.example\"]\n" + own + "\n[tenants.other]\nnetwork = [\"b.example\"]\n"
		for _, text := range []string{text, own + "\n" + text[:strings.Index(text, own)]} {
			check.Must(t, os.WriteFile(name, []byte(text), 0o600))
			c, err := Load(name)
			check.Require(t, err == nil, "%s: %v", text, err)
			want := c.Tenant
			check.That(t, want.Queue == 7 && want.Sessions != 0 && len(want.Network) == 1 && want.Network[0] == "a.example", "%+v", want)
			want.Sessions, want.MaxTimeout, want.Overlays = 0, 0, []string{}
			check.NoDiff(t, cmp.Diff(want, c.Of("guest")), "%s\n(-want +got)", text)
		}
	}
}

// A rule for a whole top-level domain gives one warning for all tenants that inherit it.
func TestTopLevelDomains(t *testing.T) {
	name := filepath.Join(t.TempDir(), "c.toml")
	check.Must(t, os.WriteFile(name, []byte("[tenant]\nnetwork = [\"*.com\", \"*.example.org\"]\n[tenants.a]\npids = 5\n[tenants.b]\nnetwork = [\"*.dev:443\"]\n"), 0o600))
	c, err := Load(name)
	check.Must(t, err)
	got := strings.Join(c.Warnings(), "\n")
	check.That(t, strings.Count(got, "\n") == 1 && strings.Contains(got, `tenant.network: the network rule "*.com"`) && strings.Contains(got, "tenants.b.network"), "warnings: %s", got)
}
