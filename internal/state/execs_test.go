package state

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// execIn creates the record of the nth detached exec in a sandbox.
func execIn(t *testing.T, box *Entry, n int) (*Dir, *Claim) {
	t.Helper()
	dir, err := box.MakeExecs()
	must(t, err)
	t.Cleanup(func() { must(t, dir.Close()) })
	o, err := dir.Create(testID(n), "")
	must(t, err)
	must(t, o.Write(record(fmt.Sprintf("2026-%04d", n), Running)))
	return dir, o
}

// An exec is found by its sandbox and its ID or a prefix of that. It is not listed among the
// sandboxes, and it is removed with its sandbox.
func TestExecs(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	written(t, d, 2, "other")
	box := found(t, d, "web")
	none, err := box.Execs()
	must(t, err)
	entries, warnings := none.List()
	check.That(t, len(entries)+len(warnings) == 0, "before there is one: %v, %v", entries, warnings)
	_, x := execIn(t, box, 0x3f0)
	_, y := execIn(t, box, 0x3f1)
	id := testID(0x3f0)
	for _, word := range []string{"web/" + id, testID(1) + "/" + id} {
		e := found(t, d, word)
		check.That(t, e.IsExec() && e.ID == id && e.Alive && e.Record.Sandbox == testID(1) && e.Title() == "web/"+id && e.Handle() == testID(1)+"/"+id && e.What() == "the exec web/"+id,
			"%s: %+v", word, e)
	}
	for word, want := range map[string]string{
		"web/": "no-such-exec", "web/" + id[:15]: "ambiguous", "web/" + id[:3]: "no-such-exec", "other/" + id: "no-such-exec", "web/" + testID(1): "no-such-exec",
		"web/../" + testID(1): "no-such-exec", "web/" + id + "/x": "no-such-exec", "nobody/" + id: "no-such-sandbox", "/" + id: "no-such-sandbox", id: "no-such-sandbox",
	} {
		_, err := d.Find(word)
		wantCode(t, word, err, want)
	}
	wantIDs(t, d, 1, 2)

	// It ends as a sandbox does, and its record stays.
	must(t, x.Close())
	e := found(t, d, "web/"+id)
	check.That(t, e.Status() == "lost", "its supervisor has ended: %s", e.Status())
	must(t, y.Remove())
	_, err = d.Find("web/" + testID(0x3f1))
	wantCode(t, "removed", err, "no-such-exec")
	must(t, o.Close())
	must(t, found(t, d, "web").Remove())
	wantFiles(t, d, testID(2), testID(2)+"/activity", testID(2)+"/lock", testID(2)+"/record.json", "lock", "names", "names/other")
}

// An interrupted removal is completed; a foreign directory stays.
func TestRemoveExecs(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	box := found(t, d, testID(1))
	_, x := execIn(t, box, 7)
	must(t, x.Close())
	must(t, o.Close())
	foreign := filepath.Join(d.Path(), testID(1), execsName, testID(7), "foreign")
	must(t, os.Mkdir(foreign, 0o700))
	wantCode(t, "with a directory", box.Remove(), "state")
	must(t, box.Refresh())
	must(t, os.Remove(foreign))
	must(t, os.Rename(filepath.Join(d.Path(), testID(1)), filepath.Join(d.Path(), "."+testID(1))))
	w := d.Sweep()
	check.That(t, w == nil, "%v", w)
	wantFiles(t, d, "lock")
}

// Forget removes the oldest ended execs, and none that is alive.
func TestKeptExecs(t *testing.T) {
	d := opened(t)
	written(t, d, 1, "")
	box := found(t, d, testID(1))
	execIn(t, box, 0)
	var dir *Dir
	for n := 1; n <= keptExecs+2; n++ {
		var o *Claim
		dir, o = execIn(t, box, n)
		must(t, o.Close())
		must(t, dir.Forget())
	}
	entries, _ := dir.List()
	check.That(t, len(entries) == keptExecs+1 && entries[0].ID == testID(0) && entries[1].ID == testID(3),
		"%d are kept, the first is %s, the second %s", len(entries), entries[0].ID, entries[1].ID)
}
