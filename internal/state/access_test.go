package state

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/proc"
)

func FuzzAccess(f *testing.F) {
	f.Add("1\x007\x0042\x00boot\x0099\x00\x00\x00none\x00/\x00A=b\x00\n")
	f.Add("1\x007\x0042\x00boot\x0099\x0065534\x00100\x00host\x00/tmp\x00\n")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := parseAccess(text)
		if err != nil {
			return
		}
		if a.Init.PID <= 1 || a.Init.PID >= 1<<22 {
			t.Errorf("%q: pid %d", text, a.Init.PID)
		}
		for _, pair := range a.Env {
			if strings.ContainsRune(pair, 0) {
				t.Errorf("%q: variable %q", text, pair)
			}
		}
	})
}

// What is written is read, byte for byte; and what was cut anywhere is not taken.
func TestAccess(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "box")
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	if _, _, ok := d.Access("box"); ok {
		t.Error("access before it was given")
	}
	want := Access{
		Init:    proc.Identity{PID: 4711, Start: 1 << 60, BootID: "boot", PIDNS: 4026531836},
		Cred:    &proc.Cred{UID: 65534, GID: 7},
		Net:     "none",
		Workdir: "/a\xff\nb",
		Env:     []string{"A=", "B=x=y\n", "C=\xfe"},
	}
	if err := o.WriteAccess(want); err != nil {
		t.Fatal(err)
	}
	if _, _, ok := d.Access("box"); ok {
		t.Error("access before it was granted")
	}
	if err := o.GrantAccess(); err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"box", o.ID} {
		e, got, ok := d.Access(word)
		if !ok || e.ID != o.ID {
			t.Fatalf("%s: %v, %+v", word, ok, e)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", word, diff)
		}
	}
	text, err := o.folder.read(accessName)
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(text) {
		if _, err := parseAccess(string(text[:n])); err == nil {
			t.Errorf("taken, although cut after %d bytes", n)
		}
	}
	for _, word := range []string{"", "nobody", o.ID[:6], "../" + o.ID, testID(2)} {
		if _, _, ok := d.Access(word); ok {
			t.Errorf("access to %q", word)
		}
	}
	if err := o.DropAccess(); err != nil {
		t.Error(err)
	}
	if _, _, ok := d.Access("box"); ok {
		t.Error("access after it was dropped")
	}
}

// A sandbox that does not live is not to be entered, whatever its init does.
func TestAccessDead(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := o.WriteAccess(Access{Init: proc.Identity{PID: 4711}, Net: "none", Workdir: "/"}); err != nil {
		t.Fatal(err)
	}
	if err := o.GrantAccess(); err != nil {
		t.Fatal(err)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, ok := d.Access(o.ID); ok {
		t.Error("access to a dead sandbox")
	}
}
