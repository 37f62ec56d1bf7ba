//go:build check

package serve

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/chromedp/chromedp/remote"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// chromium is where Debian has the browser itself; what is in PATH is a script. This build has no
// windows: it is smaller, and starts in half of the time.
const chromium = "/usr/lib/chromium/chromium-headless-shell"

// foreign is a name that the browser takes for this machine, as anybody's domain could lead here.
const foreign = "rebound.example.org"

// browser starts a browser, in a sandbox by which nothing of it stays, with an empty profile.
func browser(t *testing.T) context.Context {
	t.Helper()
	if _, err := os.Stat(chromium); err != nil {
		harness.Skip(t, "Debian's package chromium-headless-shell is not here: "+err.Error())
	}
	// On a busy machine this build has been seen to end with SIGSEGV before it listened.
	for range 3 {
		if address := startBrowser(t); address != "" {
			ctx, cancel := remote.NewAllocator(t.Context(), address, remote.NoModifyURL)
			t.Cleanup(cancel)
			return ctx
		}
	}
	t.Fatal("the browser has ended by a signal three times")
	return nil
}

// startBrowser returns where the browser listens, or "" if a signal has ended it before that.
func startBrowser(t *testing.T) string {
	t.Helper()
	p := harness.Start(t, harness.Options{Bare: true}, "--net", "host", "--timeout", "10m", "--pids", "0", "--ro-bind-try", "/etc/fonts", "--",
		"sh", "-c", `exec "$0" "$@" 2>&1`, chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--user-data-dir=/tmp/profile",
		"--remote-debugging-port=0", "--host-resolver-rules=MAP "+foreign+" 127.0.0.1", "about:blank")
	t.Cleanup(func() {
		p.Signal(unix.SIGTERM)
		if r := p.Wait(); t.Failed() {
			t.Logf("the browser: %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		}
	})
	address, ended := regexp.MustCompile(`ws://127\S+`), false
	harness.Until(t, harness.Bound, "the browser", func() bool {
		select {
		case <-p.Exited():
			ended = true
		default:
		}
		return ended || address.MatchString(p.Output())
	})
	if ended {
		if r := p.Wait(); r.ExitCode < 128 {
			t.Fatalf("the browser has ended: %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		}
		return ""
	}
	return address.FindString(p.Output())
}

// tab is a page in a browser, and what went wrong on it.
type tab struct {
	*testing.T
	ctx context.Context

	mu    sync.Mutex
	wrong []string
}

func newTab(t *testing.T, browser context.Context, url string) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser)
	t.Cleanup(cancel)
	b := &tab{T: t, ctx: ctx}
	err := chromedp.Listen(ctx, func(event any) {
		text := ""
		switch event := event.(type) {
		case *runtime.EventExceptionThrown:
			text = fmt.Sprintf("%+v", event.ExceptionDetails)
		case *log.EventEntryAdded:
			if event.Entry.Source == log.EntrySourceNetwork { // an answer of 401, 403
				return
			}
			text = event.Entry.Text
		default:
			return
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.wrong = append(b.wrong, text)
	})
	harness.Must(t, err)
	b.do(chromedp.Navigate(url))
	return b
}

// get runs an action that has a value.
func get[T any](b *tab, action chromedp.Action[T]) T {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, harness.Bound)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	harness.Must(b, err)
	return value
}

func (b *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	get(b, chromedp.Steps(actions...))
}

// is evaluates an expression.
func is[T any](b *tab, expression string) T {
	b.Helper()
	return get(b, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
}

// command sends one of the protocol's.
func command[P, R any](b *tab, c cdp.Command[P, R], params P) R {
	b.Helper()
	return get(b, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, c, params) })
}

// focus moves the focus, and set gives an input its value.
func (b *tab) focus(selector string) {
	b.Helper()
	is[bool](b, fmt.Sprintf(`(document.querySelector(%q).focus(), true)`, selector))
}

func (b *tab) set(selector, value string) {
	b.Helper()
	is[bool](b, fmt.Sprintf(`(document.querySelector(%q).value = %q, true)`, selector, value))
}

// press presses keys, and scheme has the page light or dark.
func (b *tab) press(keys string, modifiers ...chromedp.Modifier) {
	b.Helper()
	b.do(chromedp.KeyEvent(keys, chromedp.KeyModifiers(modifiers...)))
}

func (b *tab) scheme(value string) {
	b.Helper()
	command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: value}}})
}

func (b *tab) text(selector string) string {
	b.Helper()
	return is[string](b, fmt.Sprintf(`document.querySelector(%q)?.textContent ?? ""`, selector))
}

// until waits until an expression holds.
func (b *tab) until(expression string) {
	b.Helper()
	harness.Until(b.T, harness.Bound, expression+" on the page", func() bool { return is[bool](b, expression) })
}

// shows waits until an element has a text.
func (b *tab) shows(selector, text string) {
	b.Helper()
	b.until(fmt.Sprintf(`document.querySelector(%q)?.textContent.includes(%q) === true`, selector, text))
}

// program runs one by the keyboard alone: the focus is in the box.
func (b *tab) program(code string) {
	b.Helper()
	b.until(`document.activeElement.id === "code" && !document.getElementById("go").disabled`)
	b.set("#code", code)
	b.press(kb.Enter, chromedp.ModifierCtrl)
}

// right fails for what went wrong.
func (b *tab) right() {
	b.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, text := range b.wrong {
		b.Error(text)
	}
}

// hostile is a program whose output is markup, and whose files are an image, one that is none, and
// one with a script.
const hostile = `import base64, sys
print("<img src=x onerror=document.title='taken'><script>document.title='taken'</script> \u00e4")
print("to stderr", file=sys.stderr)
open("dot.png", "wb").write(base64.b64decode("` + pixel + `"))
open("none.png", "w").write("<script>document.title='taken'</script>")
open("picture.svg", "w").write("<svg xmlns='http://www.w3.org/2000/svg'><script>document.title='taken'</script></svg>")
open("<b>bold<b>.html", "w").write("x")
sys.exit(3)`

// The page in a browser, by TCP with a token, and by the keyboard alone where that matters.
func TestPage(t *testing.T) {
	t.Parallel()
	_, address := overTCP(t, "metrics_tenants = [\"me\"]\nshow_code = true\n[rooms]\nmin = 1\nmax = 2\n", "me")
	b := newTab(t, browser(t), "http://"+address+"/")

	// Without a token there is a form for it, and nothing else.
	b.until(`document.activeElement.id === "token" && document.getElementById("work").hidden`)
	b.press("wrong" + kb.Enter)
	b.shows("#state", "not known")
	b.press("me-token" + kb.Enter)
	b.shows("#state", "ready")
	if got := b.text("#who"); !strings.HasSuffix(got, ", me") {
		t.Errorf("the page is %q's", got)
	}

	// A program: its output is text, and so are the names of its files.
	b.set("#timeout", "200") // the machine may be busy
	b.set("#collect", "*.png *.svg *.html")
	b.program(hostile)
	b.shows("#verdict", "exited, exit code 3, after ")
	b.shows("#verdict", "Proven: nothing of it is left.")
	b.until(`document.querySelectorAll("#files figure").length === 4 && document.querySelectorAll("#files img").length === 2 && [...document.images].every(i => i.complete)`)
	b.shows("#recent details pre", "taken")
	for selector, want := range map[string]string{
		"#output .stdout":         "<img src=x onerror=document.title='taken'><script>document.title='taken'</script> ä\n",
		"#output .stderr":         "to stderr\n",
		"#files figure":           "<b>bold<b>.html, 1 bytes Save",
		"title":                   "sbxrun",
		"#recent details pre":     hostile,
		"#recent td:nth-child(4)": "proven",
	} {
		if got := b.text(selector); got != want {
			t.Errorf("%s: %q", selector, got)
		}
	}
	if widths := is[string](b, `[...document.images].map(i => i.alt + " " + i.naturalWidth).sort().join()`); widths != "dot.png 1,none.png 0" {
		t.Errorf("images: %s", widths)
	}
	b.shows("#rooms", "Warm rooms: ")
	b.until(`document.querySelectorAll("#tasks meter").length > 0`)

	// Output comes while the program runs, and Stop ends it, with proof.
	b.focus("#code")
	b.program("import time\nprint('first', flush=True)\ntime.sleep(1000)")
	b.shows("#output", "first")
	if got := b.text("#verdict"); got != "It runs …" {
		t.Errorf("%q", got)
	}
	b.focus("#stop")
	b.press(kb.Enter)
	b.shows("#verdict", "canceled, exit code")
	b.shows("#verdict", "Proven: nothing of it is left.")

	// What is wrong is told, and the next one can be run.
	b.program("print(1")
	b.shows("#output", "SyntaxError")
	b.set("#timeout", "0.3")
	b.program("while True: pass")
	b.shows("#verdict", "timeout, exit code 124")
	b.set("#timeout", "200")

	// A session, and a program in it.
	b.focus("#new")
	b.press(kb.Enter)
	b.until(`document.querySelector("#where").options.length === 2`)
	is[int](b, `document.querySelector("#where").selectedIndex = 1`)
	b.focus("#code")
	b.program("open('kept', 'w').write('x')")
	b.shows("#verdict", "exited, exit code 0")
	b.program("print(open('kept').read())")
	b.shows("#output", "x\n")
	b.focus("#sessions button")
	b.press(kb.Enter)
	b.until(`document.querySelector("#sessions").rows.length === 0 && document.querySelector("#where").options.length === 1`)

	readable(b)
	screenshots(b)

	// After the page was loaded anew the tab has the token; forgotten, it is gone.
	b.do(chromedp.Reload())
	b.shows("#state", "ready")
	b.focus("#forget")
	b.press(kb.Enter)
	b.until(`document.activeElement.id === "token" && sessionStorage.length === 0 && !document.querySelector("#output *, tbody *")`)
	b.right()
}

// The page when requests fail, with a server in which they do.
func TestPageFailures(t *testing.T) {
	t.Parallel()
	var revoked atomic.Bool
	var begun, statuses atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		what := r.Method + " " + r.URL.Path
		switch {
		case what == "GET /":
			http.ServeFile(w, r, "../../internal/page/page.html")
		case what == "GET /v1/languages" && begun.Add(1) <= 2: // one may be the browser's own second try
			panic(http.ErrAbortHandler) // as of a server that starts again
		case r.Header.Get("Authorization") == "" || revoked.Load():
			w.WriteHeader(http.StatusUnauthorized)
		case what == "GET /v1/languages":
			_, _ = io.WriteString(w, `{"languages":[{"name":"python"}]}`)
		case what == "GET /v1/status":
			statuses.Add(1)
			_, _ = io.WriteString(w, `{"version":"0","tenant":"me","recent":[]}`)
		case what == "GET /v1/sessions":
			_, _ = io.WriteString(w, `{"sessions":[]}`)
		case what == "POST /v1/run":
			_, _ = io.WriteString(w, `{"event":"report","report":{"cause":"exited","exit_code":0,"duration_ms":1,"teardown":{"verdict":"proven"},`+
				`"files":[{"path":"a.png","id":"1","size":1,"media_type":"image/png"},{"path":"b.csv","id":"2","size":1,"media_type":"text/csv"}]}}`+"\n")
		default:
			api.NewError(api.Quota, "there are too many "+r.URL.Path, "").Write(w)
		}
	}))
	t.Cleanup(s.Close)
	b := newTab(t, browser(t), s.URL)
	b.until(`document.activeElement.id === "token"`)
	b.press("secret" + kb.Enter)
	b.shows("#state", "ready")

	// What the user has done in vain is still told after the status has come.
	b.focus("#new")
	b.press(kb.Enter)
	b.shows("#state", "too many /v1/sessions")
	n := statuses.Load()
	harness.Until(t, harness.Bound, "the status", func() bool { return statuses.Load() >= n+2 })
	b.shows("#state", "too many /v1/sessions")

	// A file that cannot be shown takes nothing of the others, nor of the verdict.
	b.focus("#code")
	b.program("x")
	b.shows("#files p", "a.png: there are too many /v1/files/1")
	b.shows("#verdict", "exited, exit code 0")
	if n := is[int](b, `document.querySelectorAll("#files figure").length`); n != 2 {
		t.Errorf("%d files", n)
	}

	revoked.Store(true)
	b.shows("#state", "not known")
	b.until(`document.activeElement.id === "token"`)
	b.right()
}

// readable looks at what a reader depends on: names of all that takes the focus, and contrast, in
// the light and in the dark, as WCAG 2 has them (1.4.3, 4.1.2).
func readable(b *tab) {
	b.Helper()
	nodes := command(b, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{}).Nodes
	named := 0
	for _, node := range nodes {
		if node.Ignored || node.Role == nil {
			continue
		}
		switch role := string(node.Role.Value); role {
		case `"button"`, `"textbox"`, `"combobox"`, `"spinbutton"`, `"meter"`, `"image"`, `"table"`, `"region"`:
			named++
			if role != `"table"` && (node.Name == nil || string(node.Name.Value) == `""`) {
				b.Errorf("a %s has no name", role)
			}
		}
	}
	if named < 10 {
		b.Errorf("%d elements, of %d", named, len(nodes))
	}
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		low := is[[]string](b, `(() => {
			const style = getComputedStyle(document.documentElement);
			const light = name => {
				const hex = style.getPropertyValue("--" + name).trim().slice(1).replace(/^(.)(.)(.)$/, "$1$1$2$2$3$3");
				const [r, g, b] = [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16) / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
				return 0.2126 * r + 0.7152 * g + 0.0722 * b;
			};
			const pairs = [["on", "accent"]];
			for (const back of ["back", "card", "code"]) for (const text of ["text", "dim", "accent", "good", "bad"]) pairs.push([text, back]);
			return pairs.map(([a, b]) => [a + " on " + b, (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05)])
				.filter(([, ratio]) => !(ratio >= 4.5)).map(([name, ratio]) => name + " " + ratio);
		})()`)
		for _, pair := range low {
			b.Errorf("%s: contrast of %s", scheme, pair)
		}
	}
}

// screenshots makes those of docs, in the directory that SBXRUN_SCREENSHOTS names.
func screenshots(b *tab) {
	b.Helper()
	dir := os.Getenv("SBXRUN_SCREENSHOTS")
	if dir == "" {
		return
	}
	b.do(chromedp.EmulateViewport(1200, 860))
	b.focus("#new")
	b.press(kb.Enter)
	b.until(`document.querySelector("#where").options.length === 2`)
	b.focus("#code")
	b.program(plot)
	b.until(`document.images.length === 1 && document.images[0].complete`)
	b.shows("#recent pre", "wave.png")
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		is[bool](b, `(scrollTo(0, 0), true)`)
		harness.Must(b, os.WriteFile(filepath.Join(dir, "page-"+scheme+".png"), get(b, chromedp.CaptureScreenshot()), 0o644))
	}
}

// plot is a program with an image, by the standard library alone.
const plot = `import math, struct, zlib

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

rows = [[255] * 480 for _ in range(90)]
for x in range(480):
    for y in (0, 1, 2):
        rows[int(43 + 38 * math.sin(x / 30)) + y][x] = 40
data = b"".join(b"\0" + bytes(row) for row in rows)
with open("wave.png", "wb") as f:
    f.write(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 480, 90, 8, 0, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b""))
print("one period is", round(60 * math.pi), "pixels")
`

// What other sites' pages try with a server that a browser can reach without a token, because its
// unix socket was forwarded, as ssh -L does.
func TestPagesOfOtherSites(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	var forwards sync.WaitGroup
	t.Cleanup(forwards.Wait)
	t.Cleanup(func() { l.Close() })
	forwards.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			forwards.Go(func() {
				defer from.Close()
				to, err := net.Dial("unix", s.socket())
				if err != nil {
					return
				}
				defer to.Close()
				go func() {
					_, _ = io.Copy(to, from)
					to.(*net.UnixConn).CloseWrite()
				}()
				_, _ = io.Copy(from, to)
			})
		}
	})
	_, port, _ := net.SplitHostPort(l.Addr().String())
	b := browser(t)

	// The user's own page, on which no token is asked for.
	own := newTab(t, b, "http://localhost:"+port+"/")
	own.shows("#state", "ready")
	own.program("print('mine')")
	own.shows("#output", "mine")
	own.right()

	// Another site's page: neither can it have something run, nor read anything, nor show our page.
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!DOCTYPE html><iframe src="http://localhost:%s/"></iframe>`, port)
	}))
	t.Cleanup(site.Close)
	other := newTab(t, b, site.URL)
	tries := fmt.Sprintf(`(async () => {
		const server = "http://localhost:%s", body = JSON.stringify({argv: ["true"]}), out = [];
		for (const [path, options] of [
			["/v1/calls", {method: "POST", mode: "no-cors", body}],
			["/v1/calls", {method: "POST", mode: "no-cors", body: new Blob([body])}],
			["/v1/sessions", {method: "POST", mode: "no-cors", body: new Blob(["{}"])}],
			["/v1/calls", {method: "POST", headers: {"Content-Type": "application/json"}, body}],
			["/v1/status", {}],
		]) {
			const answer = await fetch(server + path, options).catch(() => null);
			out.push(answer ? answer.type + " " + (await answer.text()) : "refused");
		}
		return out;
	})()`, port)
	for i, got := range is[[]string](other, tries) {
		if want := []string{"opaque ", "opaque ", "opaque ", "refused", "refused"}[i]; got != want {
			t.Errorf("try %d: %q, want %q", i, got, want)
		}
	}
	harness.Until(t, harness.Bound, "the browser's word that our page is in no frame", func() bool {
		other.mu.Lock()
		defer other.mu.Unlock()
		return slices.ContainsFunc(other.wrong, func(text string) bool { return strings.Contains(text, "frame-ancestors") })
	})

	// The same with a name of its own for this address: then it is of one origin with the server.
	rebound := newTab(t, b, "http://"+foreign+":"+port+"/")
	if got := rebound.text("body"); !strings.Contains(got, `"code":"policy"`) {
		t.Errorf("%q", got)
	}
	got := is[string](rebound, `fetch("/v1/calls", {method: "POST", headers: {"Content-Type": "application/json"}, body: '{"argv":["true"]}'}).then(a => a.text())`)
	if !strings.Contains(got, `"code":"policy"`) {
		t.Errorf("%q", got)
	}

	for path, want := range map[string]string{"/v1/calls": `{"calls":[]}`, "/v1/sessions": `{"sessions":[]}`} {
		if _, b := s.ask(http.MethodGet, path, nil); strings.TrimSpace(string(b)) != want {
			t.Errorf("another site's page has begun %s", b)
		}
	}
}
