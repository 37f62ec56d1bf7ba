package cells

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// message is one line of the driver's.
type message struct {
	Begun  bool       `json:"begun"`
	Result *Result    `json:"result"`
	Error  *Exception `json:"error"`
	End    bool       `json:"end"`
	// Signals is how many SIGINTs have come until the end; nil of a driver that ignores those
	// that come later.
	Signals *int `json:"signals"`
}

// answers finds the lines of one cell in what comes from the driver's socket, to which all of
// the cell can write. What is no line of this cell's is passed over, and counted. Memory is
// bounded by the longest line.
type answers struct {
	prefix  string // of the cell's lines
	max     int    // length of a line
	line    []byte // the beginning of the next one
	long    bool   // it is longer, and passed over
	foreign int64  // bytes that were no lines of this cell's
}

func newAnswers(token string, max int) *answers {
	return &answers{prefix: token + " ", max: max + len(token) + 1}
}

// read takes a piece, and returns the messages that it completes, with the length of each.
// After an end there are none.
func (a *answers) read(piece []byte) (list []message, sizes []int) {
	for len(piece) > 0 {
		line, rest, whole := bytes.Cut(piece, []byte{'\n'})
		piece = rest
		// A line whose beginning is another's is not kept, however long it gets.
		if !a.long && len(a.line)+len(line) <= a.max && a.possible(line) {
			a.line = append(a.line, line...)
		} else {
			a.foreign += int64(len(a.line) + len(line))
			a.line, a.long = nil, true
		}
		if !whole {
			return list, sizes
		}
		if !a.long && len(a.line) > 0 {
			m, ok := a.parse()
			if ok {
				list, sizes = append(list, m), append(sizes, len(a.line))
			} else {
				a.foreign += int64(len(a.line))
			}
			if m.End {
				return list, sizes
			}
		}
		a.line, a.long = nil, false
	}
	return list, sizes
}

// possible reports whether the line, which may be this cell's so far, still may with more added.
func (a *answers) possible(more []byte) bool {
	begin := min(len(a.line), len(a.prefix))
	n := min(len(more), len(a.prefix)-begin)
	return string(more[:n]) == a.prefix[begin:begin+n]
}

// parse reads the line as a message, and reports whether it is one.
func (a *answers) parse() (m message, ok bool) {
	text, ours := strings.CutPrefix(string(a.line), a.prefix)
	if !ours || json.Unmarshal([]byte(text), &m) != nil {
		return message{}, false
	}
	if r := m.Result; r != nil {
		if len(r.Media) > maxMedia {
			r.Media, r.Truncated = r.Media[:maxMedia], true
		}
		for _, medium := range r.Media {
			if !isMediaType(medium.Type) {
				return message{}, false
			}
		}
		if r.Kind != "value" && r.Kind != "display" && r.Kind != "figure" {
			return message{}, false
		}
	}
	return m, true
}

// maxMedia is how many forms of a result are kept: a driver sends a few, and the cell, which can write as
// the driver does, could send a million empty ones.
const maxMedia = 32

// media are the forms of a result. Of what comes, one more than may be kept is read.
type media []Medium

// UnmarshalJSON is [json.Unmarshaler]'s.
func (m *media) UnmarshalJSON(text []byte) error {
	*m = nil
	d := json.NewDecoder(bytes.NewReader(text))
	switch begin, err := d.Token(); {
	case err != nil || begin == nil: // null
		return err
	case begin != json.Delim('['):
		return errors.New("media are a list")
	}
	for d.More() && len(*m) <= maxMedia {
		var one Medium
		if err := d.Decode(&one); err != nil {
			return err
		}
		*m = append(*m, one)
	}
	return nil
}

// isMediaType reports whether s has the form of a media type without parameters (RFC 6838):
// it goes into headers and file names.
func isMediaType(s string) bool {
	kind, name, both := strings.Cut(s, "/")
	return both && len(s) <= 127 && restricted(kind) && restricted(name)
}

func restricted(s string) bool {
	for i := range len(s) {
		c := s[i]
		alnum := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !alnum && (i == 0 || !strings.ContainsRune("!#$&-^_.+", rune(c))) {
			return false
		}
	}
	return s != ""
}
