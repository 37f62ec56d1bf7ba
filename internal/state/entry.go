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
	"github.com/sbxrun/sbxrun/internal/safeopen"
)

// Entry is a sandbox, or a detached exec in one, as processes other than its supervisor see it: a snapshot. It holds
// no descriptor before Hold, but needs its [Dir]'s.
type Entry struct {
	ID     string
	Record Record
	// Alive reports whether the supervisor is alive. Once it is dead, the entry no longer changes.
	Alive bool

	dir  *Dir
	last *os.File // after Hold
}

// Lives reports whether it has a supervisor that has not recorded its end yet.
func (e *Entry) Lives() bool { return e.Alive && e.Record.Phase != Ended }

// Title returns the name or ID for messages.
func (e *Entry) Title() string {
	title := cmp.Or(e.Record.Name, e.ID)
	if sandbox := e.dir.sandbox; sandbox != nil {
		title = sandbox.Title() + "/" + title
	}
	return title
}

// Handle returns a word by which Find finds it as long as its record exists.
func (e *Entry) Handle() string {
	if sandbox := e.dir.sandbox; sandbox != nil {
		return sandbox.ID + "/" + e.ID
	}
	return e.ID
}

// IsExec reports whether it is an exec rather than a sandbox.
func (e *Entry) IsExec() bool { return e.dir.sandbox != nil }

// What returns its kind and title, such as "the sandbox web" or "the exec web/ID".
func (e *Entry) What() string { return "the " + e.dir.kind() + " " + e.Title() }

// kind returns the kind of the directory's records.
func (d *Dir) kind() string {
	if d.sandbox != nil {
		return "exec"
	}
	return "sandbox"
}

// load reads one record. The error is [unix.ENOENT] if it is missing: because it was not yet
// written, is already removed, or its supervisor was killed before writing it.
func (d *Dir) load(id string) (*Entry, error) {
	f, err := d.root.Sub(id)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// Check for life before reading the record: the last record is written before the lock is
	// released, so that the record of a dead sandbox is final.
	alive, err := alive(f)
	if err != nil {
		return nil, err
	}
	var r Record
	if err := readJSON(f, recordName, &r); err != nil {
		return nil, err
	}
	if r.ID != id {
		return nil, f.Fail("read", recordName, safeopen.Damage("id "+r.ID))
	}
	return &Entry{ID: id, Record: r, Alive: alive, dir: d}, nil
}

// alive reports whether the supervisor holds the lock.
func alive(f safeopen.Folder) (bool, error) {
	held, err := f.Locked(lockName)
	if safeopen.IsDamaged(err) {
		return false, nil // not a lock file, so no supervisor holds it
	}
	return held, err
}

func (d *Dir) alive(id string) (bool, error) {
	f, err := d.root.Sub(id)
	if errors.Is(err, unix.ENOENT) || safeopen.IsDamaged(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer f.Close()
	return alive(f)
}

// Status returns one word for lists: starting, running, how it ended ([result.Status]), or
// "lost" if the supervisor died before it recorded the end.
func (e *Entry) Status() string {
	switch {
	case e.Record.Report != nil:
		return string(e.Record.Report.Status)
	case e.Alive:
		return string(e.Record.Phase)
	}
	return "lost"
}

// Hold makes Refresh find the final state of an entry that [Claim.Leave] removes. It is for
// processes that are about to end, because its descriptor is never closed.
func (e *Entry) Hold() error {
	last, err := e.OpenFile(lockName)
	e.last = last
	return err
}

// Refresh reads the entry again. On an error the entry stays unchanged.
func (e *Entry) Refresh() error {
	now, err := e.dir.load(e.ID)
	if errors.Is(err, unix.ENOENT) && e.last != nil {
		var r Record
		if data, readErr := safeopen.ReadAll(e.last); readErr == nil && parse(data, &r) == nil && r.ID == e.ID {
			now, err = &Entry{ID: e.ID, Record: r, dir: e.dir}, nil
		}
	}
	if errors.Is(err, unix.ENOENT) {
		return e.dir.unknown(e.ID)
	}
	if err != nil {
		return Failed(err)
	}
	now.last = e.last
	*e = *now
	return nil
}

// in calls f with the sandbox's directory.
func (e *Entry) in(f func(safeopen.Folder) error) error {
	sub, err := e.dir.root.Sub(e.ID)
	if errors.Is(err, unix.ENOENT) {
		return e.dir.unknown(e.ID)
	}
	if err != nil {
		return Failed(err)
	}
	defer sub.Close()
	return Failed(f(sub))
}

// OpenFile opens one of the sandbox's files for reading. The caller closes it.
func (e *Entry) OpenFile(name string) (file *os.File, err error) {
	err = e.in(func(f safeopen.Folder) (err error) {
		file, err = f.OpenFile(name, os.O_RDONLY)
		return err
	})
	return file, err
}

// Ending reports whether the supervisor has begun to end the sandbox; false if that is unknown.
func (e *Entry) Ending() bool {
	file, err := e.OpenFile(endingName)
	if err == nil {
		_ = file.Close()
	}
	return err == nil
}

// WriteKill leaves a request to the supervisor and replaces an earlier one.
func (e *Entry) WriteKill(k Kill) error {
	return e.in(func(f safeopen.Folder) error { return writeJSON(f, killName, &k) })
}

// lookPatience is how long HoldActivity waits for the supervisor's check for idleness. If the
// lock is held longer, the sandbox is ending.
const lookPatience = 500 * time.Millisecond

// HoldActivity marks the sandbox as in use until release is called or the process ends. If
// the sandbox has been idle for too long, the error's code is "ending".
func (e *Entry) HoldActivity() (release func(), err error) {
	fd := -1
	err = e.in(func(f safeopen.Folder) (err error) {
		fd, err = f.Lock(activityName, unix.O_RDONLY, unix.F_RDLCK, lookPatience)
		if errors.Is(err, unix.EAGAIN) {
			return &result.Error{Code: "ending", Message: "sandbox " + e.ID + " is ending", Hint: "start it again"}
		}
		if err != nil {
			return err
		}
		// A killed user cannot record the end of its use. On EROFS nothing can be recorded anyway.
		if err = touch(fd, e.dir.clock()); err != nil && err != unix.EROFS {
			_ = unix.Close(fd)
			return f.Fail("touch", activityName, err)
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
		_ = touch(fd, e.dir.clock()) // before the lock is free; if it fails, the use counts as killed
		_ = unix.Close(fd)
		fd = -1
	}, nil
}

// Remove removes the files of a dead sandbox.
func (e *Entry) Remove() error {
	e.awaitExecs()
	return e.dir.Alone(func() error {
		f, err := e.dir.root.Sub(e.ID)
		if errors.Is(err, unix.ENOENT) {
			return nil // already removed
		}
		if err != nil {
			return err
		}
		defer f.Close()
		alive, err := alive(f)
		if err != nil {
			return err
		}
		if alive {
			return &result.Error{Code: "still-alive", Message: e.What() + " is alive", Hint: "end it first"}
		}
		return result.All(e.dir.remove(e.ID, f), e.dir.release(e.Record.Name, e.ID))
	})
}

// remove hides a sandbox's directory and then removes it. If the directory contains
// anything that cannot be removed, the directory and its record remain.
func (d *Dir) remove(id string, f safeopen.Folder) error {
	if err := empty(f, false, lockName, recordName); err != nil {
		return err
	}
	hidden := "." + id
	if err := d.root.Rename(id, hidden); err != nil {
		return err
	}
	return rmdir(d.root, hidden, f)
}

// List reads all entries, the oldest first. It skips unreadable entries and returns warnings for them.
func (d *Dir) List() (entries []*Entry, warnings []error) {
	ids, err := d.Names()
	if err != nil {
		return nil, []error{err}
	}
	for _, id := range ids {
		if !ValidID(id) {
			continue
		}
		if e, err := d.load(id); err == nil {
			entries = append(entries, e)
		} else if !errors.Is(err, unix.ENOENT) {
			warnings = append(warnings, Failed(err))
		}
	}
	slices.SortFunc(entries, func(a, b *Entry) int {
		return cmp.Or(strings.Compare(a.Record.CreatedAt, b.Record.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return entries, warnings
}

// Names returns all names in the directory, including those of other packages' files.
func (d *Dir) Names() ([]string, error) {
	if d.root.FD < 0 {
		return nil, nil
	}
	f, err := d.root.Sub(".") // with its own offset
	if err != nil {
		return nil, Failed(err)
	}
	defer f.Close()
	names, err := f.Names()
	return names, Failed(err)
}

// Find finds a sandbox by its ID, by name (the living one, or else the last one that had the name) or by a prefix of
// its ID of at least 4 digits. The error's code is "no-such-sandbox" if none matches, and "ambiguous" if several IDs
// have the prefix. SANDBOX/EXEC finds a detached exec by its ID or a prefix; its code is "no-such-exec".
func (d *Dir) Find(word string) (*Entry, error) {
	if sandbox, exec, ok := strings.Cut(word, "/"); ok && d.sandbox == nil {
		e, err := d.Find(sandbox)
		if err != nil {
			return nil, err
		}
		execs, err := e.Execs()
		if err != nil {
			return nil, err
		}
		d.mu.Lock()
		d.execs = append(d.execs, execs) // the exec's entry needs it
		d.mu.Unlock()
		return execs.Find(exec)
	}
	if d.root.FD < 0 || !validName(word) { // prefixes of IDs are valid names, too
		return nil, d.unknown(word)
	}
	if ValidID(word) {
		if e, err := d.load(word); !errors.Is(err, unix.ENOENT) {
			return e, Failed(err)
		}
	}
	if id := d.named(word); id != "" {
		if e, err := d.load(id); err == nil && e.Alive && e.Record.Name == word {
			return e, nil
		} // otherwise search all
	}
	entries, _ := d.List() // an unreadable entry cannot match
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
	return nil, &result.Error{Code: "ambiguous", Message: fmt.Sprintf("%d IDs begin with %s", len(found), word), Hint: "give more digits"}
}

// named returns the ID that the name's link contains, or "".
func (d *Dir) named(name string) (id string) {
	if !validName(name) {
		return ""
	}
	_ = d.inNames(func(names safeopen.Folder) (err error) {
		id, err = owner(names, name) // "" with an error
		return err
	})
	return id
}

func (d *Dir) unknown(word string) error {
	if d.sandbox != nil {
		return &result.Error{Code: "no-such-exec", Message: fmt.Sprintf("no detached exec %.80q in sandbox %s", word, d.sandbox.Title()), Hint: "list them: sbxrun ps --all " + d.sandbox.Title(), Err: unix.ENOENT}
	}
	return &result.Error{Code: "no-such-sandbox", Message: fmt.Sprintf("no sandbox named %.80q in %s", word, d.Path()), Hint: "list them: sbxrun ps --all", Err: unix.ENOENT}
}

// Access reads how to enter the living sandbox with this ID or name, without reading its record: the entry has no
// more than the name. ok is false if there is no access, or none yet; [Dir.Find] returns the reason.
func (d *Dir) Access(word string) (e *Entry, a Access, ok bool) {
	id := word
	if !ValidID(id) {
		id = d.named(word)
	}
	e = &Entry{ID: id, dir: d}
	if id != word {
		e.Record.Name = word
	}
	err := e.in(func(f safeopen.Folder) error {
		if alive, err := alive(f); err != nil || !alive {
			return d.unknown(id) // its init may still exist, but is about to end
		}
		return readJSON(f, accessName, &a)
	})
	return e, a, err == nil
}

// ValidName checks a name for a new sandbox.
func ValidName(name string) error {
	if !validName(name) {
		return &result.Error{Code: "usage", Message: fmt.Sprintf("invalid sandbox name %.80q", name),
			Hint: "use 1 to 63 letters, digits, dots, underscores and hyphens, not beginning with a dot or hyphen"}
	}
	return nil
}

func validName(name string) bool {
	const chars = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
	return name != "" && len(name) <= 63 && name[0] != '.' && name[0] != '-' && strings.Trim(name, chars) == ""
}

const idDigits = 16

// ValidID reports whether id has the form of an ID, as made by [safeopen.RandomName].
func ValidID(id string) bool { return len(id) == idDigits && IsHex(id) }

// IsHex reports whether s consists of lower-case hexadecimal digits.
func IsHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// inNames calls f with the directory of names, unless no sandbox has had a name yet.
func (d *Dir) inNames(f func(names safeopen.Folder) error) error {
	names, err := d.root.Sub(namesName)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer names.Close()
	return f(names)
}

// owner returns the ID in the name's link, or "" if there is no link or it contains no valid ID.
func owner(names safeopen.Folder, name string) (string, error) {
	var buf [idDigits + 1]byte
	n, err := unix.Readlinkat(names.FD, name, buf[:])
	if err != nil && err != unix.EINVAL && err != unix.ENOENT { // EINVAL: not a symbolic link
		return "", names.Fail("readlink", name, err)
	}
	if id := string(buf[:max(n, 0)]); ValidID(id) {
		return id, nil
	}
	return "", nil
}
