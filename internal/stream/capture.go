package stream

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// A Buffer is an [io.Writer] that keeps the beginning and the end of a stream of any length in a bounded amount of
// memory. It is not safe for concurrent use: wait for the writer before reading.
//
// The first output of a program shows its purpose, the last how it ended, and there may be gigabytes between. Half of
// the limit is therefore for the head, which is filled once. The other half is for the tail, a ring that is then
// overwritten. All bytes are counted, so that the omission can be reported.
type Buffer struct {
	headMax, tailMax int
	total            int64

	head []byte
	tail []byte // a ring once it has grown to tailMax
	next int    // index of the oldest byte, which is overwritten next
}

// NewBuffer returns a Buffer that keeps at most limit bytes, or none if limit is not
// positive. Memory is allocated as the stream arrives.
func NewBuffer(limit int64) *Buffer {
	n := int(min(max(limit, 0), math.MaxInt))
	return &Buffer{headMax: n / 2, tailMax: n - n/2}
}

// Write takes all of p and never fails, so that a program is never blocked or
// killed by SIGPIPE because it printed too much.
func (b *Buffer) Write(p []byte) (int, error) {
	n := len(p)
	b.total += int64(n)

	b.head, p = fill(b.head, p, b.headMax)
	// Only the end of one large write can stay.
	p = p[max(0, len(p)-b.tailMax):]
	b.tail, p = fill(b.tail, p, b.tailMax)
	for len(p) > 0 {
		k := copy(b.tail[b.next:], p)
		b.next = (b.next + k) % b.tailMax
		p = p[k:]
	}
	return n, nil
}

// fill appends to dst as much of p as fits below limit, and returns the rest of p.
func fill(dst, p []byte, limit int) (_, rest []byte) {
	k := min(len(p), limit-len(dst))
	return append(dst, p[:k]...), p[k:]
}

// Len returns the length of the whole stream so far, including the omission.
func (b *Buffer) Len() int64 {
	return b.total
}

// Truncated reports whether anything was left out.
func (b *Buffer) Truncated() bool {
	return b.total > int64(b.headMax)+int64(b.tailMax)
}

// Stream returns the kept text in the report's form.
func (b *Buffer) Stream() result.Stream {
	text, valid := b.Text()
	return result.Stream{Text: text, UTF8: valid, Bytes: b.Len(), Truncated: b.Truncated()}
}

// Text returns the kept text and whether it is valid UTF-8. If bytes were left out, a line
// between head and tail gives their number:
//
//	[… 4194304 bytes left out …]
//
// If the gap splits a character, its remaining pieces are left out too, provided that the
// rest is valid. Otherwise the stream is considered binary, and all kept bytes are returned.
func (b *Buffer) Text() (s string, valid bool) {
	b.straighten()
	head, tail := b.head, b.tail
	if !b.Truncated() {
		s = concat(head, "", tail)
		return s, utf8.ValidString(s)
	}

	textHead, textTail := head[:len(head)-Partial(head)], trimStart(tail)
	valid = utf8.Valid(textHead) && utf8.Valid(textTail)
	if valid {
		head, tail = textHead, textTail
	}
	leftOut := b.total - int64(len(head)) - int64(len(tail))
	return concat(head, fmt.Sprintf("\n[… %d bytes left out …]\n", leftOut), tail), valid
}

// straighten rotates the ring in place, without a copy, so that it begins with its oldest byte.
func (b *Buffer) straighten() {
	if b.next > 0 {
		slices.Reverse(b.tail[:b.next])
		slices.Reverse(b.tail[b.next:])
		slices.Reverse(b.tail)
		b.next = 0
	}
}

// concat joins the parts with a single copy.
func concat(head []byte, between string, tail []byte) string {
	var b strings.Builder
	b.Grow(len(head) + len(between) + len(tail))
	b.Write(head)
	b.WriteString(between)
	b.Write(tail)
	return b.String()
}

// Partial returns the length of an incomplete character at the end of p.
func Partial(p []byte) int {
	for i := 1; i < utf8.UTFMax && i <= len(p); i++ {
		if last := p[len(p)-i:]; utf8.RuneStart(last[0]) {
			if utf8.FullRune(last) {
				return 0
			}
			return i
		}
	}
	return 0
}

// trimStart returns p without the continuation bytes at its start that can belong to a single character.
func trimStart(p []byte) []byte {
	i := 0
	for i < min(len(p), utf8.UTFMax-1) && !utf8.RuneStart(p[i]) {
		i++
	}
	return p[i:]
}
