package state

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Entry is a sandbox, or a detached exec in one, as others than its supervisor see it, when
// they last looked. It holds no descriptor before Hold, but needs that of its [Dir].
type Entry struct {
	ID     string
	Record Record
	// Alive says that the supervisor lives. Once it does not, nothing of the entry
	// changes any more.
	Alive bool

	dir  *Dir
	last *os.File // after Hold
}

// Lives says that it has a supervisor that has not recorded its end yet.
func (e *Entry) Lives() bool { return e.Alive && e.Record.Phase != Ended }

// Title is what people call it.
func (e *Entry) Title() string {
	title := cmp.Or(e.Record.Name, e.ID)
	if box := e.dir.box; box != nil {
		title = box.Title() + "/" + title
	}
	return title
}

// Handle is what it is found by for as long as there is a record of it.
func (e *Entry) Handle() string {
	if box := e.dir.box; box != nil {
		return box.ID + "/" + e.ID
	}
	return e.ID
}

// IsExec says that it is an exec, and not a sandbox.
func (e *Entry) IsExec() bool { return e.dir.box != nil }

// What is it with its title: the sandbox web, or the exec web/ID.
func (e *Entry) What() string { return "the " + e.dir.kind() + " " + e.Title() }

// kind is what there are records of in the directory.
func (d *Dir) kind() string {
	if d.box != nil {
		return "exec"
	}
	return "sandbox"
}

// load reads one sandbox. The error is [unix.ENOENT] if there is none, or no record of it: not
// yet, or no more, or its supervisor was killed before the first.
func (d *Dir) load(id string) (*Entry, error) {
	f, err := d.root.sub(id)
	if err != nil {
		return nil, err
	}
	defer f.close()
	// First who lives, then the record: the last record is written before the lock
	// is given up, so that of the dead is the final one.
	alive, err := f.alive()
	if err != nil {
		return nil, err
	}
	var r Record
	if err := f.readJSON(recordName, &r); err != nil {
		return nil, err
	}
	if r.ID != id {
		return nil, f.fail("read", recordName, damage("id "+r.ID))
	}
	return &Entry{ID: id, Record: r, Alive: alive, dir: d}, nil
}

// alive asks whether the supervisor holds the lock. An error is neither yes nor no.
func (f folder) alive() (bool, error) {
	held, err := f.locked(lockName)
	if isDamaged(err) {
		return false, nil // nobody can hold what is not there
	}
	return held, err
}

func (d *Dir) alive(id string) (bool, error) {
	f, err := d.root.sub(id)
	if errors.Is(err, unix.ENOENT) || isDamaged(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.close()
	return f.alive()
}

// Status is one word for lists: starting, running, how it ended
// ([result.Status]), or "lost" if the supervisor died before it could tell.
func (e *Entry) Status() string {
	switch {
	case e.Record.Report != nil:
		return string(e.Record.Report.Status)
	case e.Alive:
		return string(e.Record.Phase)
	}
	return "lost"
}

// Hold has Refresh tell how it has ended although its record is gone by then, if it was
// [Claim.Leave] that removed it. It is for processes that are about to end: the descriptor
// is never closed.
func (e *Entry) Hold() error {
	last, err := e.OpenFile(lockName)
	e.last = last
	return err
}

// Refresh looks again. On an error the entry stays as it was.
func (e *Entry) Refresh() error {
	now, err := e.dir.load(e.ID)
	if errors.Is(err, unix.ENOENT) && e.last != nil {
		var r Record
		if data, readErr := readAll(e.last); readErr == nil && parse(data, &r) == nil && r.ID == e.ID {
			now, err = &Entry{ID: e.ID, Record: r, dir: e.dir}, nil
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return e.dir.unknown(e.ID)
	}
	if err != nil {
		return failed(err)
	}
	now.last = e.last
	*e = *now
	return nil
}

// in runs f with the sandbox's directory.
func (e *Entry) in(f func(folder) error) error {
	sub, err := e.dir.root.sub(e.ID)
	if errors.Is(err, unix.ENOENT) {
		return e.dir.unknown(e.ID)
	}
	if err != nil {
		return failed(err)
	}
	defer sub.close()
	return failed(f(sub))
}

// OpenFile opens one of the sandbox's files for reading. The caller closes it.
func (e *Entry) OpenFile(name string) (file *os.File, err error) {
	err = e.in(func(f folder) (err error) {
		file, err = f.openFile(name, os.O_RDONLY)
		return err
	})
	return file, err
}

// Ending says whether the supervisor has begun to end the sandbox, with all that is
// in it. No if that cannot be told.
func (e *Entry) Ending() bool {
	file, err := e.OpenFile(endingName)
	if err == nil {
		_ = file.Close()
	}
	return err == nil
}

// WriteKill leaves a request to the supervisor, in place of an earlier one.
func (e *Entry) WriteKill(k Kill) error {
	return e.in(func(f folder) error { return f.writeJSON(killName, &k) })
}

// lookPatience is for how long the supervisor may hold the activity while it looks
// whether the sandbox is idle; longer than that, and it is to end.
const lookPatience = 500 * time.Millisecond

// HoldActivity marks the sandbox as used, until release is called or the process
// ends. If its idle timeout has passed, the error's code is "ending".
func (e *Entry) HoldActivity() (release func(), err error) {
	fd := -1
	err = e.in(func(f folder) (err error) {
		fd, err = f.lock(activityName, unix.O_RDONLY, unix.F_RDLCK, lookPatience)
		if errors.Is(err, unix.EAGAIN) {
			return &result.Error{Code: "ending", Message: "the sandbox " + e.ID + " is about to end", Hint: "start it again"}
		}
		if err != nil {
			return err
		}
		// One that is killed will not say when it ended. EROFS: by then nobody writes down anything.
		if err = touch(fd, e.dir.clock()); err != nil && err != unix.EROFS {
			_ = unix.Close(fd)
			return f.fail("touch", activityName, err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return func() {
		if fd < 0 {
			return
		}
		_ = touch(fd, e.dir.clock()) // before the lock is free; should it fail, it counts as killed
		_ = unix.Close(fd)
		fd = -1
	}, nil
}

// Remove removes what is left of a sandbox that does not live any more.
func (e *Entry) Remove() error {
	e.awaitExecs()
	return failed(e.dir.alone(func() error {
		f, err := e.dir.root.sub(e.ID)
		if errors.Is(err, unix.ENOENT) {
			return nil // somebody else was quicker
		}
		if err != nil {
			return err
		}
		defer f.close()
		alive, err := f.alive()
		if err != nil {
			return err
		}
		if alive {
			return &result.Error{Code: "still-alive", Message: e.What() + " is alive", Hint: "end it first"}
		}
		return result.All(e.dir.remove(e.ID, f), e.dir.release(e.Record.Name, e.ID))
	}))
}

// remove makes a sandbox's directory vanish, and then removes it. As long as it
// holds what cannot be removed, it stays, with its record.
func (d *Dir) remove(id string, f folder) error {
	if err := f.clear(lockName, recordName); err != nil {
		return err
	}
	hidden := "." + id
	if err := d.root.rename(id, hidden); err != nil {
		return err
	}
	return d.root.rmdir(hidden, f)
}

// List reads all sandboxes, the oldest first. What cannot be read is passed over
// and comes as a warning.
func (d *Dir) List() (entries []*Entry, warnings []error) {
	if d.root.fd < 0 {
		return nil, nil
	}
	ids, err := d.list()
	if err != nil {
		return nil, []error{failed(err)}
	}
	for _, id := range ids {
		if !ValidID(id) {
			continue
		}
		if e, err := d.load(id); err == nil {
			entries = append(entries, e)
		} else if !errors.Is(err, unix.ENOENT) {
			warnings = append(warnings, failed(err))
		}
	}
	slices.SortFunc(entries, func(a, b *Entry) int {
		return cmp.Or(strings.Compare(a.Record.CreatedAt, b.Record.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return entries, warnings
}

// list names all there is in the state directory.
func (d *Dir) list() ([]string, error) {
	f, err := d.root.sub(".") // an offset of its own
	if err != nil {
		return nil, err
	}
	defer f.close()
	return f.names()
}

// Find finds a sandbox by its id; else the living one of that name; else the one
// that had the name last; else by the beginning of the id, of 4 digits or more. If there
// is none, the error's code is "no-such-sandbox"; "ambiguous" if several begin so.
// SANDBOX/EXEC is a detached exec, by its id or the beginning of that; "no-such-exec".
func (d *Dir) Find(word string) (*Entry, error) {
	if box, exec, ok := strings.Cut(word, "/"); ok && d.box == nil {
		e, err := d.Find(box)
		if err != nil {
			return nil, err
		}
		execs, err := e.Execs()
		if err != nil {
			return nil, err
		}
		d.mu.Lock()
		d.execs = append(d.execs, execs) // its entry needs it for as long as it is looked at
		d.mu.Unlock()
		return execs.Find(exec)
	}
	if d.root.fd < 0 || !validName(word) { // and every beginning of an id is a valid name
		return nil, d.unknown(word)
	}
	if ValidID(word) {
		if e, err := d.load(word); !errors.Is(err, unix.ENOENT) {
			return e, failed(err)
		}
	}
	if id := d.named(word); id != "" {
		if e, err := d.load(id); err == nil && e.Alive && e.Record.Name == word {
			return e, nil
		} // else all have to be looked at
	}
	entries, _ := d.List() // what cannot be read cannot be meant
	for _, e := range slices.Backward(entries) {
		if e.Record.Name == word {
			return e, nil
		}
	}
	if len(word) < 4 || !IsHex(word) {
		return nil, d.unknown(word)
	}
	var found []*Entry
	for _, e := range entries {
		if strings.HasPrefix(e.ID, word) {
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return nil, d.unknown(word)
	case 1:
		return found[0], nil
	}
	return nil, &result.Error{Code: "ambiguous", Message: fmt.Sprintf("%d ids begin with %s", len(found), word), Hint: "give more digits of it"}
}

// named is the id that the name's link says; "" if there is none, or that cannot be told.
func (d *Dir) named(name string) (id string) {
	if !validName(name) {
		return ""
	}
	names, err := d.names()
	if err != nil {
		return ""
	}
	defer names.close()
	id, _ = owner(names, name) // "" with an error
	return id
}

func (d *Dir) unknown(word string) error {
	if d.box != nil {
		return &result.Error{Code: "no-such-exec", Message: fmt.Sprintf("there is no detached exec %.80q in the sandbox %s", word, d.box.Title()), Hint: "sbxrun ps --all " + d.box.Title() + " lists those there are", Err: unix.ENOENT}
	}
	return &result.Error{Code: "no-such-sandbox", Message: fmt.Sprintf("there is no sandbox %.80q in %s", word, d.Path()), Hint: "sbxrun ps --all lists those there are", Err: unix.ENOENT}
}

// Access reads how to enter the sandbox of this id, or of the living one of this
// name, without its record, of which the entry has no more than that name. ok is false if there is none, or
// it cannot be read, or has no access yet: [Dir.Find] tells.
func (d *Dir) Access(word string) (e *Entry, a Access, ok bool) {
	id := word
	if !ValidID(id) {
		id = d.named(word)
	}
	e = &Entry{ID: id, dir: d}
	if id != word {
		e.Record.Name = word
	}
	err := e.in(func(f folder) error {
		if alive, err := f.alive(); err != nil || !alive {
			return d.unknown(id) // it may still have an init, which is about to end
		}
		data, err := f.read(accessName)
		if err == nil {
			a, err = parseAccess(string(data))
		}
		return err
	})
	return e, a, err == nil
}

// ValidName checks a name that somebody wants to give to a sandbox.
func ValidName(name string) error {
	if !validName(name) {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("%.80q cannot be the name of a sandbox", name),
			Hint: "a name has 1 to 63 letters, digits, dots, underscores and hyphens, and begins with neither dot nor hyphen"}
	}
	return nil
}

func validName(name string) bool {
	if name == "" || len(name) > 63 || name[0] == '.' || name[0] == '-' {
		return false
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-') {
			return false
		}
	}
	return true
}

const idDigits = 16

// ValidID reports whether this is an id, as [safeopen.RandomName] makes them.
func ValidID(id string) bool { return len(id) == idDigits && IsHex(id) }

// IsHex reports whether all of it are hexadecimal digits, in lower case.
func IsHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// names opens the directory of names; ENOENT where nobody has had one yet.
func (d *Dir) names() (folder, error) { return d.root.sub(namesName) }

// owner is the id that the name's link says, "" if that is no id.
func owner(names folder, name string) (string, error) {
	var buf [idDigits + 1]byte
	n, err := unix.Readlinkat(names.fd, name, buf[:])
	if err != nil && err != unix.EINVAL { // EINVAL: no symbolic link
		return "", names.fail("readlink", name, err)
	}
	if id := string(buf[:max(n, 0)]); ValidID(id) {
		return id, nil
	}
	return "", nil
}
