package state

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/tests/check"
)

func TestValidName(t *testing.T) {
	for _, name := range []string{"a", "Z", "0", "_", "a.b-c_D9", "_-.", "web-1", strings.Repeat("x", 63)} {
		check.OK(t, ValidName(name), "%q", name)
	}
	for _, name := range []string{"", ".", "..", ".a", "-", "-a", "a/b", "a b", "a\n", "a\x00", "é", "\xff", "a:b", "a*", "~", strings.Repeat("x", 64)} {
		wantCode(t, name, ValidName(name), "usage")
	}
}

func TestCreateRefused(t *testing.T) {
	d := opened(t)
	for _, id := range []string{"", "x", ".", "..", "../x", strings.Repeat("g", 16), strings.Repeat("0", 15), strings.Repeat("0", 17), "0123456789ABCDEF", "names", "lock"} {
		_, err := d.Create(id, "")
		wantCode(t, id, err, "state")
	}
	_, err := d.Create(testID(1), "../x")
	wantCode(t, "name", err, "usage")
	wantFiles(t, d)
}

// Exactly one of fifty concurrent claims gets a name, whether it is free, was left by a killed
// process, or is blocked by a file that is not a valid link.
func TestClaim(t *testing.T) {
	d := opened(t)
	link := filepath.Join(d.Path(), "names", "web")
	for round, left := range []func(){
		func() {},
		func() { must(t, os.Symlink(testID(0), link)) },     // a sandbox that never existed
		func() { must(t, os.Symlink("/etc/passwd", link)) }, // not an ID
		func() { must(t, os.Symlink("../"+testID(99)+"/lock", link)) },
		func() { must(t, os.WriteFile(link, []byte(testID(99)), 0o600)) },
		func() { // a dead sandbox
			dead := written(t, d, 98, "web")
			must(t, os.Rename(link, link+"-kept"))
			must(t, dead.Close())
			must(t, os.Rename(link+"-kept", link))
			_ = found(t, d, testID(98))
		},
	} {
		if round == 0 {
			written(t, d, 99, "other") // alive throughout
		}
		left()
		var wg sync.WaitGroup
		won := make(chan *Claim, 50)
		for i := range 50 {
			wg.Go(func() {
				// Each with its own descriptor, as in separate processes.
				own, err := Open(Caller{StateDir: d.Path(), UID: os.Geteuid()})
				if err != nil {
					t.Error(err)
					return
				}
				defer own.Close()
				o, err := own.Create(testID(100+round*100+i), "web")
				if err == nil {
					o.dir = d
					won <- o
					return
				}
				check.Equal(t, result.CodeOf(err), "name-in-use", "%v", err)
			})
		}
		wg.Wait()
		close(won)
		check.Require(t, len(won) == 1, "round %d: %d have the name", round, len(won))
		o := <-won
		must(t, o.Write(record("2027", Running)))
		check.Equal(t, found(t, d, "web").ID, o.ID, "round %d: it belongs to", round)
		must(t, o.Remove())
	}
	dead := found(t, d, testID(98))
	must(t, dead.Remove())
	got := found(t, d, "other")
	check.That(t, got.Alive, "the other sandbox is gone")
	wantFiles(t, d, testID(99), testID(99)+"/activity", testID(99)+"/lock", testID(99)+"/record.json", "lock", "names", "names/other")
}

// Create does not remove a directory that has the place of a name.
func TestClaimDirectory(t *testing.T) {
	d := opened(t)
	must(t, os.MkdirAll(filepath.Join(d.Path(), "names", "web", "x"), 0o700))
	_, err := d.Create(testID(1), "web")
	wantCode(t, "a directory", err, "state")
	wantFiles(t, d, "lock", "names", "names/web", "names/web/x")
}

// A claim frees its name only if it still owns it.
func TestRelease(t *testing.T) {
	d := opened(t)
	first := written(t, d, 1, "web")
	must(t, os.Remove(filepath.Join(d.Path(), "names", "web"))) // removed by someone else
	second := written(t, d, 2, "web")
	must(t, first.Close())
	check.Equal(t, found(t, d, "web").ID, second.ID, "it belongs to")
	must(t, second.Close())
	// Among ended sandboxes, the youngest.
	e := found(t, d, "web")
	check.That(t, e.ID == second.ID && !e.Alive, "it was %s's, alive: %v", e.ID, e.Alive)
	third := written(t, d, 0, "web") // older by its clock, but alive
	e = found(t, d, "web")
	check.That(t, e.ID == third.ID && e.Alive, "it belongs to %s, alive: %v", e.ID, e.Alive)
}

func TestFind(t *testing.T) {
	d := opened(t)
	id := testID(1)[:12] + "ffff"
	o, err := d.Create(id, "ffff")
	must(t, err)
	defer o.giveUp()
	must(t, o.Write(record("1", Running)))
	written(t, d, 1, testID(1)[:6]) // its name is a prefix of its ID, and of others
	written(t, d, 2, "b")
	written(t, d, 3, "")
	tests := []struct{ word, want string }{
		{testID(2), testID(2)},
		{testID(2)[:15] + "2", testID(2)},
		{id, id},
		{id[:13], id},
		{"ffff", id},
		{testID(1)[:6], testID(1)}, // names precede prefixes
		{"b", testID(2)},
		{testID(1)[:5], "ambiguous"},
		{testID(1)[:15], "ambiguous"},
		{testID(1)[:3], "no-such-sandbox"},
		{"", "no-such-sandbox"},
		{"c", "no-such-sandbox"},
		{testID(4), "no-such-sandbox"},
		{testID(2) + "0", "no-such-sandbox"},
		{strings.ToUpper(testID(2)), "no-such-sandbox"},
		{"names", "no-such-sandbox"},
		{"lock", "no-such-sandbox"},
		{"../" + testID(2), "no-such-sandbox"},
		{"./" + testID(2), "no-such-sandbox"},
		{strings.Repeat("f", 5000), "no-such-sandbox"},
		{"\x00\n", "no-such-sandbox"},
	}
	for _, tt := range tests {
		e, err := d.Find(tt.word)
		if len(tt.want) != 16 || !IsHex(tt.want) {
			wantCode(t, tt.word, err, tt.want)
		} else if err != nil || e.ID != tt.want {
			t.Errorf("%q: %+v, %v", tt.word, e, err)
		}
	}
}
