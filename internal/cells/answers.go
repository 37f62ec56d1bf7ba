package cells

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"unicode/utf8"
)

// message is one line from the driver.
type message struct {
	Begun  bool       `json:"begun"`
	Result *Result    `json:"result"`
	Error  *Exception `json:"error"`
	End    bool       `json:"end"`
	// Signals is the number of SIGINTs received so far; nil from a driver that ignores later ones.
	Signals *int `json:"signals"`
}

// answers extracts the lines of one cell from the driver's socket. The whole cell can write to that socket,
// so other lines are skipped and counted. The longest line bounds the memory.
type answers struct {
	prefix  string // starts each line of this cell
	max     int    // maximum length of a line
	line    []byte // incomplete line
	long    bool   // the line is too long and skipped
	foreign int64  // bytes outside the lines of this cell
}

func newAnswers(token string, max int) *answers {
	return &answers{prefix: token + " ", max: max + len(token) + 1}
}

// read parses a piece, and returns the completed messages and their lengths. Nothing follows an end message.
func (a *answers) read(piece []byte) (list []message, sizes []int) {
	for len(piece) > 0 {
		line, rest, whole := bytes.Cut(piece, []byte{'\n'})
		piece = rest
		// A line with another prefix is not kept, however long it is.
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

// possible reports whether the current line followed by more can still be a line of this cell.
func (a *answers) possible(more []byte) bool {
	begin := min(len(a.line), len(a.prefix))
	n := min(len(more), len(a.prefix)-begin)
	return string(more[:n]) == a.prefix[begin:begin+n]
}

// parse parses the line as a message, and reports whether it is valid.
func (a *answers) parse() (m message, ok bool) {
	text, ours := strings.CutPrefix(string(a.line), a.prefix)
	if !ours || !utf8.ValidString(text) || json.Unmarshal([]byte(text), &m) != nil { // otherwise each invalid byte becomes three
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
	if e := m.Error; e != nil {
		for _, text := range []*string{&e.Name, &e.Message, &e.Traceback} {
			// A copy, because a part would keep the whole text in memory.
			*text = strings.Clone(strings.ToValidUTF8((*text)[:min(len(*text), maxText)], ""))
		}
	}
	return m, true
}

// maxText limits the texts of an exception, in bytes. A driver sends 32,768 characters.
const maxText = 128 << 10

// maxMedia limits the forms of a result. A driver sends a few; a cell, which can write to the same socket,
// could send a million.
const maxMedia = 32

// media are the forms of a result. Decoding stops one after the limit.
type media []Medium

// UnmarshalJSON implements [json.Unmarshaler].
func (m *media) UnmarshalJSON(text []byte) error {
	*m = nil
	d := json.NewDecoder(bytes.NewReader(text))
	switch begin, err := d.Token(); {
	case err != nil || begin == nil: // null
		return err
	case begin != json.Delim('['):
		return errors.New("media is not a list")
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

// isMediaType reports whether s is a media type without parameters (RFC 6838), because it is used in headers
// and file names.
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
