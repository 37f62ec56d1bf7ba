package stream

import (
	"bytes"
	"os"
	"regexp"
)

// Tail returns the offset in f at which the last n lines begin: its size if n is
// not positive, 0 if there are no more than n. A last line that has no line break
// yet counts. f is read backwards, a chunk at a time, and its own offset stays.
func Tail(f *os.File, n int) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if n <= 0 {
		return info.Size(), nil
	}
	buf := make([]byte, chunk)
	// Without the last byte: it ends the last line, or is in it, and parts no two.
	for end := info.Size() - 1; end > 0; {
		block := buf[:min(end, chunk)]
		end -= int64(len(block))
		if _, err := f.ReadAt(block, end); err != nil {
			return 0, err
		}
		for i := bytes.LastIndexByte(block, '\n'); i >= 0; i = bytes.LastIndexByte(block[:i], '\n') {
			if n--; n == 0 {
				return end + int64(i) + 1, nil
			}
		}
	}
	return 0, nil
}

// maxLine is the longest piece of a line that is matched as a whole.
const maxLine = 64 << 10

// A Matcher looks for a line that matches a pattern in a stream that comes in
// pieces of any size. The line is matched without its line break, "\n" or
// "\r\n". One longer than 64 KiB is matched in pieces of that size, each as if it
// were a line, so that a program without line breaks costs no more memory.
type Matcher struct {
	re    *regexp.Regexp
	line  []byte // the line that has not ended yet, or what was not matched of it
	found bool
}

// NewMatcher returns a Matcher that has seen nothing.
func NewMatcher(re *regexp.Regexp) *Matcher { return &Matcher{re: re} }

// Feed takes the next piece of the stream and reports whether a line has matched,
// in this piece or earlier. After that it costs nothing.
func (m *Matcher) Feed(p []byte) bool {
	for len(p) > 0 && !m.found {
		line, rest, ends := bytes.Cut(p, []byte("\n"))
		// Only when more follows, or nothing might be left for the line's end,
		// and that would look like an empty line.
		for room := maxLine - len(m.line); len(line) > room; room = maxLine {
			m.line = append(m.line, line[:room]...)
			line = line[room:]
			m.match()
		}
		m.line = append(m.line, line...)
		if ends {
			m.match()
		}
		p = rest
	}
	return m.found
}

func (m *Matcher) match() {
	m.found = m.found || m.matches()
	m.line = m.line[:0]
}

func (m *Matcher) matches() bool { return m.re.Match(bytes.TrimSuffix(m.line, []byte("\r"))) }

// End reports whether a line has matched if the stream ends here: a last line
// without a line break counts, too. The stream may go on nevertheless.
func (m *Matcher) End() bool { return m.found || len(m.line) > 0 && m.matches() }
