package stream

import (
	"bytes"
	"fmt"
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

// outcome is everything that a Buffer reports about a stream.
type outcome struct {
	Text      string
	Valid     bool
	Len       int64
	Truncated bool
}

// capture writes stream in pieces of the given size.
func capture(limit int64, stream string, piece int) outcome {
	b := NewBuffer(limit)
	for stream != "" {
		n := min(piece, len(stream))
		if got, err := b.Write([]byte(stream[:n])); got != n || err != nil {
			panic(fmt.Sprintf("Write of %d bytes: %d, %v", n, got, err))
		}
		stream = stream[n:]
	}
	text, valid := b.Text()
	return outcome{text, valid, b.Len(), b.Truncated()}
}

// model computes the outcome from the whole stream. It finds partial characters by completing them: the bytes at the
// end of the head are one if some continuation makes them a character.
func model(limit int64, stream string) outcome {
	total := int64(len(stream))
	limit = max(limit, 0)
	if total <= limit {
		return outcome{stream, utf8.ValidString(stream), total, false}
	}
	head, tail := stream[:limit/2], stream[total-(limit-limit/2):]
	text := func(head, tail string) string {
		return fmt.Sprintf("%s\n[… %d bytes left out …]\n%s", head, total-int64(len(head)+len(tail)), tail)
	}
	for i := 0; i <= min(3, len(head)); i++ {
		for j := 0; j <= min(3, len(tail)); j++ {
			h, t := head[:len(head)-i], tail[j:]
			if utf8.ValidString(h) && utf8.ValidString(t) && isStart(head[len(h):]) && isEnd(tail[:j]) {
				return outcome{text(h, t), true, total, true}
			}
		}
	}
	return outcome{text(head, tail), false, total, true}
}

// isStart reports whether s is empty or a proper prefix of some character. The second byte of one may be limited to
// 0x80–0x8f, 0x80–0x9f, 0x90–0xbf or 0xa0–0xbf; so either 0x80 or 0xbf completes it when anything does.
func isStart(s string) bool {
	if s == "" {
		return true
	}
	for _, fill := range []string{"\x80\x80\x80", "\xbf\xbf\xbf"} {
		for k := 1; k <= len(fill); k++ {
			if c := s + fill[:k]; utf8.ValidString(c) && utf8.RuneCountInString(c) == 1 {
				return true
			}
		}
	}
	return false
}

// isEnd reports whether s consists of continuation bytes.
func isEnd(s string) bool {
	for _, c := range []byte(s) {
		if c < 0x80 || c > 0xbf {
			return false
		}
	}
	return true
}

func TestText(t *testing.T) {
	tests := []struct {
		name   string
		limit  int64
		stream string
		want   outcome
	}{
		{"empty", 8, "", outcome{"", true, 0, false}},
		{"short", 8, "abc", outcome{"abc", true, 3, false}},
		{"exact fit", 8, "abcdefgh", outcome{"abcdefgh", true, 8, false}},
		{"exact fit of an odd limit", 7, "abcdefg", outcome{"abcdefg", true, 7, false}},
		{"one too many", 8, "abcdefghi", outcome{"abcd\n[… 1 bytes left out …]\nfghi", true, 9, true}},
		{"odd limit", 7, "abcdefghi", outcome{"abc\n[… 2 bytes left out …]\nfghi", true, 9, true}},
		{"limit 1", 1, "abc", outcome{"\n[… 2 bytes left out …]\nc", true, 3, true}},
		{"limit 0", 0, "abc", outcome{"\n[… 3 bytes left out …]\n", true, 3, true}},
		{"limit 0 of nothing", 0, "", outcome{"", true, 0, false}},
		{"negative limit", -5, "abc", outcome{"\n[… 3 bytes left out …]\n", true, 3, true}},
		{"largest limit", math.MaxInt64, "abc", outcome{"abc", true, 3, false}},
		{"split characters", 8, "abc€..€xyz", outcome{"abc\n[… 8 bytes left out …]\nxyz", true, 14, true}},
		{"character longer than both halves", 4, "😀😀😀", outcome{"\n[… 12 bytes left out …]\n", true, 12, true}},
		{"character across the halves, fits", 5, "a😀", outcome{"a😀", true, 5, false}},
		{"partial character at the end, fits", 5, "abc\xc3", outcome{"abc\xc3", false, 4, false}},
		{"control bytes", 8, "\x01\x02\x03", outcome{"\x01\x02\x03", true, 3, false}},
		{"binary, fits", 8, "\xff\x00\xfe", outcome{"\xff\x00\xfe", false, 3, false}},
		{"binary head", 8, "a\xffb\xc3.....wxyz", outcome{"a\xffb\xc3\n[… 5 bytes left out …]\nwxyz", false, 13, true}},
		{"binary at the end of the head", 8, "abc\xff.....wxyz", outcome{"abc\xff\n[… 5 bytes left out …]\nwxyz", false, 13, true}},
		{"binary tail keeps the head whole", 8, "abc\xc3\xa9....w\xffyz", outcome{"abc\xc3\n[… 5 bytes left out …]\nw\xffyz", false, 13, true}},
		{"too many continuation bytes", 8, "abcd.....\x80\x80\x80\x80", outcome{"abcd\n[… 5 bytes left out …]\n\x80\x80\x80\x80", false, 13, true}},
		{"stream that ends within a character", 8, "abcd.....xyz\xc3", outcome{"abcd\n[… 5 bytes left out …]\nxyz\xc3", false, 13, true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, piece := range []int{1, 3, math.MaxInt} {
				check.NoDiff(t, cmp.Diff(tt.want, capture(tt.limit, tt.stream, piece)), "in pieces of %d (-want +got)", piece)
			}
		})
	}
}

// Text is valid UTF-8 for characters of every width at both edges of the gap.
func TestEveryCut(t *testing.T) {
	for _, char := range []string{"a", "é", "€", "😀"} {
		stream := strings.Repeat(char, 12)
		for shift := range 5 {
			stream := strings.Repeat("x", shift) + stream
			for limit := range int64(len(stream) + 3) {
				for _, piece := range []int{1, 2, 5, len(stream)} {
					got := capture(limit, stream, piece)
					diff := cmp.Diff(model(limit, stream), got)
					check.Require(t, diff == "", "%q, limit %d, pieces of %d (-want +got):\n%s", stream, limit, piece, diff)
					check.Require(t, got.Valid, "%q, limit %d: UTF-8 taken for binary", stream, limit)
				}
			}
		}
	}
}

func TestMemory(t *testing.T) {
	b := NewBuffer(1 << 40)
	b.Write([]byte("0123456789"))
	got := cap(b.head) + cap(b.tail)
	check.That(t, got <= 64, "10 bytes take %d bytes of memory", got)

	const limit = 1 << 10
	b = NewBuffer(limit)
	b.Write(bytes.Repeat([]byte("x"), 1<<20))
	for range 5000 {
		b.Write([]byte("y"))
	}
	got = len(b.head) + len(b.tail)
	check.That(t, got == limit, "keeps %d bytes, want %d", got, limit)
	got = cap(b.head) + cap(b.tail)
	check.That(t, got <= 2*limit, "a limit of %d takes %d bytes of memory", limit, got)
}

func FuzzBuffer(f *testing.F) {
	f.Add(8, 3, "abc€..€xyz")
	f.Add(0, 1, "abc")
	f.Add(5, 100, "\xff\xf0\x9f\x98\x80\xe2\x82")
	f.Add(6, 2, "日本語のテキスト")
	f.Fuzz(func(t *testing.T, limit, piece int, stream string) {
		piece = max(piece, 1)
		diff := cmp.Diff(model(int64(limit), stream), capture(int64(limit), stream, piece))
		check.Require(t, diff == "", "%q, limit %d, pieces of %d (-want +got):\n%s", stream, limit, piece, diff)
	})
}
