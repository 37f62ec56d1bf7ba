package state

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

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
		if !validID(id) {
			continue
		}
		switch e, err := d.load(id); err {
		case nil:
			entries = append(entries, e)
		case errUnrecorded:
		default:
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
func (d *Dir) Find(word string) (*Entry, error) {
	if d.root.fd < 0 || !validName(word) { // and every beginning of an id is a valid name
		return nil, unknown(word)
	}
	if validID(word) {
		if e, err := d.load(word); err != errUnrecorded {
			return e, failed(err)
		}
	}
	if e := d.named(word); e != nil {
		return e, nil
	}
	entries, _ := d.List() // what cannot be read cannot be meant
	for _, e := range slices.Backward(entries) {
		if e.Record.Name == word {
			return e, nil
		}
	}
	if len(word) < 4 || !isHex(word) {
		return nil, unknown(word)
	}
	var found []*Entry
	for _, e := range entries {
		if strings.HasPrefix(e.ID, word) {
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return nil, unknown(word)
	case 1:
		return found[0], nil
	}
	return nil, &result.Error{Code: "ambiguous", Message: fmt.Sprintf("%d sandboxes have an id that begins with %s", len(found), word), Hint: "give more digits of it"}
}

// named is the living sandbox that has the name, nil if there is none or that
// cannot be told: then all have to be looked at.
func (d *Dir) named(name string) *Entry {
	names, err := d.names()
	if err != nil {
		return nil
	}
	defer names.close()
	id, err := owner(names, name)
	if err != nil || id == "" {
		return nil
	}
	e, err := d.load(id)
	if err != nil || !e.Alive || e.Record.Name != name {
		return nil
	}
	return e
}

func unknown(word string) error {
	return &result.Error{Code: "no-such-sandbox", Message: fmt.Sprintf("there is no sandbox %.80q", word), Hint: "sbxrun ps --all lists those there are"}
}
