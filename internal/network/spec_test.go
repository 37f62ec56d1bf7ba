package network

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
)

func TestParseAllow(t *testing.T) {
	for _, tt := range []struct {
		text string
		want []Rule
	}{
		{"github.com", []Rule{{"github.com", 0}}},
		{"GitHub.com.:443,*.Example.org", []Rule{{"github.com", 443}, {"*.example.org", 0}}},
		{"10.0.0.0/8:5432,192.0.2.1", []Rule{{"10.0.0.0/8", 5432}, {"192.0.2.1", 0}}},
		{"[2001:db8::1]:443,2001:db8::2,[2001:db8::]/32:80,[2001:db8::/32]:81", []Rule{{"2001:db8::1", 443}, {"2001:db8::2", 0}, {"2001:db8::/32", 80}, {"2001:db8::/32", 81}}},
		{"host.sbxrun.internal:8000", []Rule{{HostName, 8000}}}, {"localhost:8000", nil}, {"LocalHost.", nil}, {"a.localhost", nil},
		{"", nil}, {"a,", nil}, {"a b", nil}, {"*", nil}, {"*.", nil}, {"a.*.b", nil}, {"*a.b", nil}, {"a..b", nil}, {"https://a.b", nil}, {"a.b:", nil}, {"a.b:0", nil}, {"a.b:65536", nil},
		{"[::1", nil}, {"[::1]x", nil}, {"[a.b]:80", nil}, {"a\x00b", nil}, {"-a", nil}, {"hö.example", nil}, {strings.Repeat("a", 64), nil},
	} {
		got, err := ParseAllow(tt.text)
		diff := cmp.Diff(tt.want, got)
		check.That(t, (diff == "" || tt.want == nil && err != nil) && (err == nil) == (tt.want != nil), "%q: %v, %v", tt.text, got, err)
	}
}

// Every list that Check accepts fits into a message.
func TestLongList(t *testing.T) {
	host := strings.Repeat("a", 60) + "." + strings.Repeat("b", 60) + "." + strings.Repeat("c", 9)
	list := func(n int) Spec {
		return Spec{Proxied: true, Allow: slices.Repeat([]Rule{{host, 65535}}, n)}
	}
	most := maxList / len(host)
	longest := list(most)
	err := longest.Check()
	check.Require(t, err == nil && most <= maxRules, "%v %v", most, err)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	check.Must(t, err)
	theirs, ours := os.NewFile(uintptr(pair[0]), "theirs"), os.NewFile(uintptr(pair[1]), "ours")
	defer theirs.Close()
	defer ours.Close()
	check.Must(t, Send(ours, Message{Rules: longest.Allow}))
	m, _, err := Receive(theirs)
	check.That(t, err == nil && len(m.Rules) == most, "%d of %d, %v", len(m.Rules), most, err)
	long, many := list(most+1), Spec{Proxied: true, Allow: make([]Rule, maxRules+1)}
	for _, s := range []Spec{long, many} {
		err := s.Check()
		check.That(t, err != nil && strings.HasPrefix(err.Error(), "--net allow=: "), "%d hosts: %v", len(s.Allow), err)
	}
}

func TestParsePublish(t *testing.T) {
	for _, tt := range []struct {
		text string
		want Publish
		ok   bool
	}{
		{"8080:80", Publish{"", 8080, 80}, true},
		{"0:80", Publish{"", 0, 80}, true},
		{"0.0.0.0:8080:80", Publish{"0.0.0.0", 8080, 80}, true},
		{"[::1]:8080:80", Publish{"[::1]", 8080, 80}, true},
		{"[::]:0:80", Publish{"[::]", 0, 80}, true},
		{"80", Publish{}, false}, {"8080:0", Publish{}, false}, {"a:80", Publish{}, false}, {"1.2.3:80:80", Publish{}, false}, {"1.2.3.256:80:80", Publish{}, false}, {"::1:80:80", Publish{}, false}, {"", Publish{}, false},
	} {
		got, err := ParsePublish(tt.text)
		check.That(t, (err == nil) == tt.ok && (!tt.ok || got == tt.want), "%q: %v, %v", tt.text, got, err)
	}
}

func TestParseConnect(t *testing.T) {
	for _, tt := range []struct {
		text string
		want Connect
		ok   bool
	}{
		{"unix:/run/x.sock=5432", Connect{"/run/x.sock", 5432}, true},
		{"unix:x=y=80", Connect{"/dir/x=y", 80}, true},
		{"unix:=80", Connect{}, false}, {"/run/x=80", Connect{}, false}, {"unix:/run/x", Connect{}, false}, {"unix:/run/x=0", Connect{}, false}, {"tcp:a=80", Connect{}, false},
	} {
		got, err := ParseConnect(tt.text, "/dir")
		check.That(t, (err == nil) == tt.ok && (!tt.ok || got == tt.want), "%q: %v, %v", tt.text, got, err)
	}
}

// Clean removes control characters, because texts from a sandbox are printed on terminals.
func TestClean(t *testing.T) {
	got := Clean("a\x1b[31m\nb\xff\u2028")
	check.That(t, strings.Trim(got, "ab[31m?") == "", "%q", got)
	long := Clean(strings.Repeat("x", 1000))
	check.That(t, len(long) == 300 && strings.HasSuffix(long, "x...") && Clean(long) == long, "%d bytes: %s", len(long), long)
}
