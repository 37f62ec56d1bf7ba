package cells

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
)

const testToken = "TOKEN"

// readAll reads text in pieces of a size.
func readAll(text []byte, piece int) (list []message, sizes []int, alien int64) {
	a := newAnswers(testToken, 100)
	for len(text) > 0 {
		n := min(piece, len(text))
		m, s := a.read(text[:n])
		list, sizes = append(list, m...), append(sizes, s...)
		text = text[n:]
		if len(list) > 0 && list[len(list)-1].End {
			break
		}
	}
	return list, sizes, a.foreign
}

func TestAnswers(t *testing.T) {
	value := message{Result: &Result{Kind: "value", Media: []Medium{{Type: "text/plain", Text: "1"}}}}
	const one = `TOKEN {"result":{"kind":"value","media":[{"type":"text/plain","text":"1"}]}}` + "\n"
	end := message{End: true}
	tests := []struct {
		name, text string
		want       []message
		alien      int64
	}{
		{"nothing", "", nil, 0},
		{"an end", "\nTOKEN {\"end\":true}\n", []message{end}, 0},
		{"a result and an end", "\n" + one + "\nTOKEN {\"end\":true}\n", []message{value, end}, 0},
		{"nothing after the end", "TOKEN {\"end\":true}\n" + one, []message{end}, 0},
		{"an exception", `TOKEN {"end":true,"error":{"name":"E","message":"m","traceback":"t"}}` + "\n", []message{{End: true, Error: &Exception{"E", "m", "t"}}}, 0},
		{"no newline yet", `TOKEN {"end":true}`, nil, 0},
		{"another's", "OTHER {\"end\":true}\n\nTOKEN {\"end\":true}\n", []message{end}, 18},
		{"garbage before", "garbage\nTOKEN {\"end\":true}\n", []message{end}, 7},
		{"garbage in the same line", "garbage TOKEN {\"end\":true}\n", nil, 26},
		{"a prefix", "TOKE\nTOKEN\nTOKEN \n", nil, 4 + 5 + 6},
		{"no UTF-8", "TOKEN {\"end\":true,\"new\":\"\xff\"}\n", nil, 6 + 22},
		{"no JSON", "TOKEN {\nTOKEN end\n", nil, 7 + 9},
		{"other types", "TOKEN {\"end\":\"yes\"}\nTOKEN 5\n", nil, 19 + 7},
		{"nothing known", "TOKEN {\"new\":1}\n", []message{{}}, 0},
		{"an unknown kind", `TOKEN {"result":{"kind":"x"}}` + "\n", nil, 29},
		{"a bad media type", strings.Replace(one, "text/plain", "text/pl\\nain", 1), nil, int64(len(one)) + 1},
		{"too long", "TOKEN " + strings.Repeat(" ", 200) + "{\"end\":true}\nTOKEN {\"end\":true}\n", []message{end}, 218},
	}
	for _, test := range tests {
		for _, piece := range []int{1, 2, 7, 1000} {
			list, _, alien := readAll([]byte(test.text), piece)
			diff := cmp.Diff(test.want, list)
			check.That(t, diff == "" && alien == test.alien, "%s, by %d: alien %d, (-want +got)\n%s", test.name, piece, alien, diff)
		}
	}
}

// The number of forms of a result is limited, even if the cell writes instead of the driver.
func TestManyMedia(t *testing.T) {
	for list, want := range map[string]int{
		`null`: 0, `[]`: 0, `[` + strings.Repeat(`{"type":"a/b"},`, maxMedia-1) + `{"type":"a/b"}]`: maxMedia,
		`[` + strings.Repeat(`{"type":"a/b"},`, 500_000) + `{"type":"a/b"}]`: maxMedia, `{}`: -1, `[{"type":"a"}]`: -1, `[5]`: -1,
	} {
		all, _ := newAnswers(testToken, 8<<20).read([]byte(testToken + ` {"result":{"kind":"value","media":` + list + "}}\n"))
		got := -1
		if len(all) == 1 {
			got = len(all[0].Result.Media)
		}
		check.That(t, got == want && (want < 0 || all[0].Result.Truncated == (len(list) > 10_000)), "%.60s: %d media, want %d: %+v", list, got, want, all)
	}
}

func TestMediaTypes(t *testing.T) {
	for name, want := range map[string]bool{
		"text/plain": true, "image/svg+xml": true, "application/vnd.plotly.v1+json": true,
		"": false, "text": false, "/": false, "text/": false, "/plain": false, "a/b/c": false, "a/b\n": false, "a/ b": false, "a/.b": false, "a/" + strings.Repeat("b", 126): false,
	} {
		check.That(t, isMediaType(name) == want, "%q: want %v", name, want)
	}
}

// The messages do not depend on how the text is split into pieces. They need the token, and the memory is bounded.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte("\nTOKEN {\"end\":true}\n"), 3)
	f.Add([]byte("x\nTOKEN {\"result\":{\"kind\":\"value\",\"media\":[{\"type\":\"a/b\",\"base64\":\"AAAA\"}]}}\nTOKEN {\"end\":true,\"error\":{}}\n"), 10)
	f.Add([]byte("TOKEN \xff\nTOKENTOKEN {}\n"+strings.Repeat("TOKEN ", 50)), 1)
	f.Fuzz(func(t *testing.T, text []byte, piece int) {
		if piece < 1 {
			piece = 1
		}
		list, sizes, alien := readAll(text, len(text)+1)
		again, againSizes, _ := readAll(text, piece)
		diff := cmp.Diff(list, again)
		check.That(t, diff == "" && cmp.Equal(sizes, againSizes), "by %d: %s", piece, diff)
		check.That(t, len(list) <= bytes.Count(text, []byte(testToken)) && len(list) == len(sizes), "%d messages", len(list))
		total := alien
		for _, n := range sizes {
			check.That(t, n <= 100+len(testToken)+1, "a message of %d bytes", n)
			total += int64(n)
		}
		check.That(t, total <= int64(len(text)), "%d of %d bytes", total, len(text))
	})
}

// The texts of an exception are limited, even if the cell writes instead of the driver.
func TestLongException(t *testing.T) {
	long := strings.Repeat("ä", 1<<20)
	all, _ := newAnswers(testToken, 8<<20).read([]byte(testToken + ` {"end":true,"error":{"name":"` + long + `","message":"` + long + `","traceback":"` + long + "\"}}\n"))
	check.Require(t, len(all) == 1 && all[0].Error != nil, "%d messages", len(all))
	want := long[:maxText]
	check.That(t, *all[0].Error == Exception{want, want, want}, "%d, %d and %d bytes", len(all[0].Error.Name), len(all[0].Error.Message), len(all[0].Error.Traceback))
}
