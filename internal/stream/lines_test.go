package stream

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// tail computes the result of Tail from the whole content.
func tail(content string, n int) int64 {
	lines := strings.SplitAfter(content, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	return int64(len(strings.Join(lines[:max(0, len(lines)-max(n, 0))], "")))
}

func TestTail(t *testing.T) {
	for name, content := range map[string]string{
		"empty":                  "",
		"line break":             "\n",
		"one, unfinished":        "a",
		"one":                    "a\n",
		"two, unfinished":        "a\nb",
		"two":                    "a\nb\n",
		"empty lines":            "\n\n\n\n",
		"empty lines between":    "a\n\nb\n\n",
		"binary":                 binary,
		"chunk without an end":   strings.Repeat("x", chunk),
		"chunk ends":             strings.Repeat("x", chunk-1) + "\n",
		"chunk and line break":   strings.Repeat("x", chunk) + "\n",
		"long lines":             strings.Repeat(strings.Repeat("x", chunk)+"\n", 3),
		"very long, then short":  strings.Repeat("x", 3*chunk) + "\na\nb",
		"short lines, unaligned": strings.Repeat("123456\n", chunk/3),
		"chunk of line breaks":   strings.Repeat("\n", chunk+1),
	} {
		t.Run(name, func(t *testing.T) {
			f := create(t)
			write(t, f, content)
			for _, n := range []int{-1, 0, 1, 2, 3, 4, 5, 100, chunk / 7, chunk - 1, chunk, chunk + 1, chunk + 2} {
				got, err := Tail(f, n)
				check.That(t, got == tail(content, n) && err == nil, "last %d lines: %d, %v; want %d", n, got, err, tail(content, n))
			}
		})
	}
}

func TestMatcher(t *testing.T) {
	long := strings.Repeat("x", maxLine)
	tests := []struct {
		name, pattern, stream string
		fed, end              bool
	}{
		{"nothing came", `^$`, "", false, false},
		{"in a line", `ready`, "a\nis ready now\nb\n", true, true},
		{"first line", `^ready$`, "ready\n", true, true},
		{"after CR LF", `^ready$`, "a\r\nready\r\n", true, true},
		{"CR inside", `^a.b$`, "a\rb\n", true, true},
		{"not over two lines", `a\s*b`, "a\nb\n", false, false},
		{"unfinished", `^ready$`, "a\nready", false, true},
		{"unfinished CR", `^ready$`, "ready\r", false, true},
		{"other unfinished", `^ready$`, "a\nread", false, false},
		{"empty line", `^$`, "a\n\nb\n", true, true},
		{"no empty line", `^$`, "a\nb\n", false, false},
		{"binary", `^\x00\x{fffd}$`, binary, true, true},
		{"bytes", `€`, binary, true, true},
		{"longest line", `^x+$`, long + "\n", true, true},
		{"longest line is no two", `^$`, long + "\n", false, false},
		{"longest line, unfinished", `^x+$`, long, false, true},
		{"line too long", `^x+$`, long + "y\n", true, true},
		{"its rest", `^y$`, long + "y\n", true, true},
		{"its unfinished rest", `^y$`, long + long + "y", false, true},
		{"over the cut", `xy`, long + "y\n", false, false},
		{"after it", `^z$`, long + long + "y\nz\n", true, true},
	}
	for _, test := range tests {
		for _, piece := range []int{1, 2, 3, 1000, maxLine, maxLine + 1, 4 * maxLine} {
			t.Run(fmt.Sprintf("%s by %d", test.name, piece), func(t *testing.T) {
				m := NewMatcher(regexp.MustCompile(test.pattern))
				fed := feed(t, m, test.stream, piece)
				end := m.End()
				check.That(t, fed == test.fed && end == test.end, "fed %t, at the end %t; want %t, %t", fed, end, test.fed, test.end)
				check.That(t, m.Feed(nil) == test.fed, "the result changed without new input")
			})
		}
	}
}

func feed(t *testing.T, m *Matcher, stream string, piece int) (found bool) {
	t.Helper()
	for stream != "" {
		n := min(piece, len(stream))
		found = m.Feed([]byte(stream[:n]))
		stream = stream[n:]
		check.Require(t, len(m.line) <= maxLine, "%d bytes remembered", len(m.line))
	}
	return found
}

// Calling End between pieces changes nothing.
func TestMatcherContinuesAfterEnd(t *testing.T) {
	m := NewMatcher(regexp.MustCompile(`^ab$`))
	check.That(t, !m.Feed([]byte("a")) && !m.End() && !m.Feed([]byte("b")) && m.End(), "want a match after ab, only from End")
	check.That(t, !m.Feed([]byte("c\n")) && !m.End(), "abc is not ab")
}

// Feed gives the same result however the stream is cut: it matches if and only if one of the lines does on its own.
func FuzzMatcher(f *testing.F) {
	f.Add("a\nready\r\n", 3)
	f.Add(binary, 1)
	re := regexp.MustCompile(`^(|.*rea?dy.*|[^a]+)$`)
	f.Fuzz(func(t *testing.T, stream string, piece int) {
		if len(stream) > maxLine {
			return
		}
		m := NewMatcher(re)
		fed := feed(t, m, stream, max(piece, 1))
		lines := strings.Split(stream, "\n")
		last := len(lines) - 1
		want := false
		for _, line := range lines[:last] {
			want = want || re.MatchString(strings.TrimSuffix(line, "\r"))
		}
		check.That(t, fed == want, "fed %t, want %t", fed, want)
		want = want || lines[last] != "" && re.MatchString(strings.TrimSuffix(lines[last], "\r"))
		check.That(t, m.End() == want, "at the end %t, want %t", !want, want)
	})
}
