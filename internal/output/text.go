package output

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sbxrun/sbxrun/internal/values"
)

// Printable returns a text as one line without control characters, which a terminal would obey: file names can
// come from a sandboxed command.
func Printable(text string) string { return escape([]byte(text), "") }

// Terminal returns a writer to w that escapes control characters, except line feeds and tabs.
func Terminal(w io.Writer) io.Writer { return terminal{w} }

type terminal struct{ to io.Writer }

func (t terminal) Write(b []byte) (int, error) {
	_, err := io.WriteString(t.to, escape(b, "\n\t"))
	return len(b), err
}

// escape replaces characters that cannot be printed, except those to keep, and bytes that are not UTF-8.
func escape(text []byte, keep string) string {
	var b strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, "\\x%02x", text[0])
		case unicode.IsPrint(r) || strings.ContainsRune(keep, r):
			b.WriteRune(r)
		default:
			fmt.Fprintf(&b, "\\x%02x", r)
		}
		text = text[n:]
	}
	return b.String()
}

// Table prints rows in columns.
type Table struct{ w *tabwriter.Writer }

// NewTable begins a table with a header.
func NewTable(w io.Writer, header ...any) *Table {
	t := &Table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.Row(header...)
	return t
}

// Row adds a row.
func (t *Table) Row(cells ...any) {
	for i, c := range cells {
		if i > 0 {
			fmt.Fprint(t.w, "\t")
		}
		fmt.Fprint(t.w, Printable(fmt.Sprint(c)))
	}
	fmt.Fprintln(t.w)
}

// Flush writes the table.
func (t *Table) Flush() error { return t.w.Flush() }

// Size returns a number of bytes with one decimal: 1.5M. [values.Size] prints exact sizes.
func Size(n int64) string {
	for i, unit := range []string{"G", "M", "K"} {
		if size := int64(1) << (30 - 10*i); n >= size {
			return fmt.Sprintf("%.1f%s", float64(n)/float64(size), unit)
		}
	}
	return values.Size(n).String()
}

// Age returns a duration in one unit.
func Age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Count returns a number with its noun, with the plural's ending unless it is 1.
func Count(n int, noun, ending string) string {
	if n == 1 {
		ending = ""
	}
	return fmt.Sprintf("%d %s%s", n, noun, ending)
}
