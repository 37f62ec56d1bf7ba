package stream

import (
	"bytes"
	"os"
	"regexp"
)

// Tail returns the offset in f at which the last n lines begin: the size if n is not positive, 0 if there are no more
// than n. An unfinished last line counts. Tail reads f backwards in chunks and does not move its offset.
func Tail(f *os.File, n int) (int64, error) {
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if n <= 0 {
		return info.Size(), nil
	}
	buf := make([]byte, chunk)
	// Skip the last byte: it ends the last line or belongs to it.
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

// maxLine is the length up to which a line is matched as a whole.
const maxLine = 64 << 10

// A Matcher looks for a matching line in a stream that arrives in pieces of any size. Lines
// are matched without their line break, "\n" or "\r\n". A line longer than 64 KiB is matched
// in pieces of that size, as if each were a line, so that memory stays bounded.
type Matcher struct {
	re    *regexp.Regexp
	line  []byte // the unmatched part of the current line
	found bool
}

// NewMatcher returns a Matcher for a new stream.
func NewMatcher(re *regexp.Regexp) *Matcher { return &Matcher{re: re} }

// Feed takes the next piece of the stream and reports whether a line has matched so far.
// After a match it costs nothing.
func (m *Matcher) Feed(p []byte) bool {
	for len(p) > 0 && !m.found {
		line, rest, ends := bytes.Cut(p, []byte("\n"))
		// Only if more follows: otherwise nothing might be left for the line break, which would
		// then look like an empty line.
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

// End reports whether a line has matched if the stream ends here, counting a last line
// without a line break. The stream may continue nevertheless.
func (m *Matcher) End() bool { return m.found || len(m.line) > 0 && m.matches() }
