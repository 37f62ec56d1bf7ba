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
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// chromium is Debian's browser binary; the one in PATH is a script. The headless build is smaller
// and starts twice as fast.
const chromium = "/usr/lib/chromium/chromium-headless-shell"

// foreign is a name that the browser resolves to this machine, as any attacker's domain could.
const foreign = "rebound.example.org"

// browser starts a browser with an empty profile, in a sandbox that leaves nothing of it.
func browser(t *testing.T) context.Context {
	t.Helper()
	if _, err := os.Stat(chromium); err != nil {
		harness.Skip(t, "Debian's package chromium-headless-shell is not here: "+err.Error())
	}
	// On a busy machine this build sometimes dies of SIGSEGV before it listens.
	for range 10 {
		if address := startBrowser(t); address != "" {
			ctx, cancel := remote.NewAllocator(t.Context(), address, remote.NoModifyURL)
			t.Cleanup(cancel)
			return ctx
		}
	}
	t.Fatal("the browser has ended by a signal ten times")
	return nil
}

// startBrowser returns the browser's address, or "" if a signal has killed it before.
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
		r := p.Wait()
		check.Require(t, r.ExitCode >= 128, "the browser has ended: %d, %q, %q", r.ExitCode, r.Stdout, r.Stderr)
		return ""
	}
	return address.FindString(p.Output())
}

// tab is a page in a browser, with the errors on it.
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
	check.Must(t, err)
	b.do(chromedp.Navigate(url))
	return b
}

// get runs an action that has a value.
func get[T any](b *tab, action chromedp.Action[T]) T {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, harness.Bound)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	check.Must(b, err)
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

// command sends a command of the protocol.
func command[P, R any](b *tab, c cdp.Command[P, R], params P) R {
	b.Helper()
	return get(b, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, c, params) })
}

// focus moves the focus; set sets an input's value.
func (b *tab) focus(selector string) {
	b.Helper()
	is[bool](b, fmt.Sprintf(`(document.querySelector(%q).focus(), true)`, selector))
}

func (b *tab) set(selector, value string) {
	b.Helper()
	is[bool](b, fmt.Sprintf(`(document.querySelector(%q).value = %q, true)`, selector, value))
}

// press presses keys; scheme makes the page light or dark.
func (b *tab) press(keys string, modifiers ...chromedp.Modifier) {
	b.Helper()
	b.do(chromedp.KeyEvent(keys, chromedp.KeyModifiers(modifiers...)))
}

func (b *tab) scheme(value string) {
	b.Helper()
	command(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: value}}})
}

// text returns the text of all elements that a selector selects; the page starts a new element
// each time the output of a program changes between stdout and stderr.
func (b *tab) text(selector string) string {
	b.Helper()
	return is[string](b, fmt.Sprintf(`[...document.querySelectorAll(%q)].map(e => e.textContent).join("")`, selector))
}

// until waits until an expression is true.
func (b *tab) until(expression string) {
	b.Helper()
	harness.Until(b.T, harness.Bound, expression+" on the page", func() bool { return is[bool](b, expression) })
}

// shows waits until an element has a text.
func (b *tab) shows(selector, text string) {
	b.Helper()
	b.until(fmt.Sprintf(`document.querySelector(%q)?.textContent.includes(%q) === true`, selector, text))
}

// program enters and runs a program with the keyboard alone; the focus is in the box.
func (b *tab) program(code string) {
	b.Helper()
	b.until(`document.activeElement.id === "code" && !document.getElementById("go").disabled`)
	b.set("#code", code)
	b.press(kb.Enter, chromedp.ModifierCtrl)
}

// right fails the test if there were errors.
func (b *tab) right() {
	b.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, text := range b.wrong {
		b.Error(text)
	}
}

// hostile is a program whose output is markup, and whose files are an image, an invalid image and a file with a script.
const hostile = `import base64, sys
print("<img src=x onerror=document.title='taken'><script>document.title='taken'</script> \u00e4")
print("to stderr", file=sys.stderr)
open("dot.png", "wb").write(base64.b64decode("` + pixel + `"))
open("none.png", "w").write("<script>document.title='taken'</script>")
open("picture.svg", "w").write("<svg xmlns='http://www.w3.org/2000/svg'><script>document.title='taken'</script></svg>")
open("<b>bold<b>.html", "w").write("x")
sys.exit(3)`

// The page works in a browser over TCP with a token, and with the keyboard alone where that matters.
func TestPage(t *testing.T) {
	t.Parallel()
	_, address := overTCP(t, "metrics_tenants = [\"me\"]\nshow_code = true\n[rooms]\nmin = 1\nmax = 2\n", "me")
	b := newTab(t, browser(t), "http://"+address+"/")

	// Without a token it shows only a form for one.
	b.until(`document.activeElement.id === "token" && document.getElementById("work").hidden`)
	b.press("wrong" + kb.Enter)
	b.shows("#state", "unknown token")
	b.press("me-token" + kb.Enter)
	b.shows("#state", "ready")
	got := b.text("#who")
	check.That(t, strings.HasSuffix(got, ", me"), "the page is %q's", got)

	// A program's output and the names of its files are shown as text.
	b.set("#timeout", "200") // the machine may be busy
	b.set("#collect", "*.png *.svg *.html")
	b.program(hostile)
	b.shows("#verdict", "exited, exit code 3, after ")
	b.shows("#verdict", "Proven: all processes have exited.")
	b.until(`document.querySelectorAll("#files figure").length === 4 && document.querySelectorAll("#files img").length === 2 && [...document.images].every(i => i.complete)`)
	b.shows("#recent details pre", "taken")
	for selector, want := range map[string]string{
		"#output .stdout":           "<img src=x onerror=document.title='taken'><script>document.title='taken'</script> ä\n",
		"#output .stderr":           "to stderr\n",
		"#files figure:first-child": "<b>bold<b>.html, 1 bytes Save",
		"title":                     "sbxrun",
		"#recent details pre":       hostile,
		"#recent td:nth-child(4)":   "proven",
	} {
		check.Equal(t, b.text(selector), want, "%s", selector)
	}
	check.Equal(t, is[string](b, `[...document.images].map(i => i.alt + " " + i.naturalWidth).sort().join()`), "dot.png 1,none.png 0", "images")
	b.shows("#rooms", "Prestarted sandboxes: ")
	b.until(`document.querySelectorAll("#tasks meter").length > 0`)

	// Output appears while the program runs, and Stop ends it with a proof.
	b.focus("#code")
	b.program("import time\nprint('first', flush=True)\ntime.sleep(1000)")
	b.shows("#output", "first")
	check.Equal(t, b.text("#verdict"), "Running …")
	b.focus("#stop")
	b.press(kb.Enter)
	b.shows("#verdict", "canceled, exit code")
	b.shows("#verdict", "Proven: all processes have exited.")

	// An error is shown, and the next program can run.
	b.program("print(1")
	b.shows("#output", "SyntaxError")
	b.set("#timeout", "0.3")
	b.program("while True: pass")
	b.shows("#verdict", "timeout, exit code 124")
	b.set("#timeout", "200")

	// A program in a session.
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

	// After a reload the tab still has the token, until it is forgotten.
	b.do(chromedp.Reload())
	b.shows("#state", "ready")
	b.focus("#forget")
	b.press(kb.Enter)
	b.until(`document.activeElement.id === "token" && sessionStorage.length === 0 && !document.querySelector("#output *, tbody *")`)
	b.right()
}

// The page shows failed requests.
func TestPageFailures(t *testing.T) {
	t.Parallel()
	var revoked atomic.Bool
	var begun, statuses atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		what := r.Method + " " + r.URL.Path
		switch {
		case what == "GET /":
			http.ServeFile(w, r, "../../internal/page/page.html")
		case what == "GET /v1/languages" && begun.Add(1) <= 2: // the browser may have retried once by itself
			panic(http.ErrAbortHandler) // as if the server restarts
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

	// A failed action of the user stays visible after a status update.
	b.focus("#new")
	b.press(kb.Enter)
	b.shows("#state", "too many /v1/sessions")
	n := statuses.Load()
	harness.Until(t, harness.Bound, "the status", func() bool { return statuses.Load() >= n+2 })
	b.shows("#state", "too many /v1/sessions")

	// A file that cannot be shown does not affect the others or the verdict.
	b.focus("#code")
	b.program("x")
	b.shows("#files p", "a.png: there are too many /v1/files/1")
	b.shows("#verdict", "exited, exit code 0")
	check.Equal(t, is[int](b, `document.querySelectorAll("#files figure").length`), 2)

	revoked.Store(true)
	b.shows("#state", "unknown token")
	b.until(`document.activeElement.id === "token"`)
	b.right()
}

// readable checks accessibility: names of all focusable elements and contrast, light and dark, as
// in WCAG 2 (1.4.3, 4.1.2).
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
			check.That(b, role == `"table"` || node.Name != nil && string(node.Name.Value) != `""`, "a %s has no name", role)
		}
	}
	check.That(b, named >= 10, "%d elements, of %d", named, len(nodes))
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

// screenshots takes the screenshots of the documentation, in the directory SBXRUN_SCREENSHOTS.
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
		check.Must(b, os.WriteFile(filepath.Join(dir, "page-"+scheme+".png"), get(b, chromedp.CaptureScreenshot()), 0o644))
	}
}

// plot is a program with an image, using only the standard library.
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

// Pages of other sites cannot use a server that a browser reaches without a token, because ssh -L
// forwards its Unix socket.
func TestPagesOfOtherSites(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	var forwards sync.WaitGroup
	t.Cleanup(forwards.Wait)
	l := harness.Listen(t) // closed before
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

	// The user's own page asks for no token.
	own := newTab(t, b, "http://localhost:"+port+"/")
	own.shows("#state", "ready")
	own.program("print('mine')")
	own.shows("#output", "mine")
	own.right()

	// Another site's page can neither run anything, nor read anything, nor embed our page.
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
		want := []string{"opaque ", "opaque ", "opaque ", "refused", "refused"}[i]
		check.That(t, got == want, "try %d: %q, want %q", i, got, want)
	}
	harness.Until(t, harness.Bound, "the browser's word that our page is in no frame", func() bool {
		other.mu.Lock()
		defer other.mu.Unlock()
		return slices.ContainsFunc(other.wrong, func(text string) bool { return strings.Contains(text, "frame-ancestors") })
	})

	// The same with its own name for this address, which makes it same-origin.
	rebound := newTab(t, b, "http://"+foreign+":"+port+"/")
	got := rebound.text("body")
	check.That(t, strings.Contains(got, `"code":"policy"`), "%q", got)
	got = is[string](rebound, `fetch("/v1/calls", {method: "POST", headers: {"Content-Type": "application/json"}, body: '{"argv":["true"]}'}).then(a => a.text())`)
	check.That(t, strings.Contains(got, `"code":"policy"`), "%q", got)

	for path, want := range map[string]string{"/v1/calls": `{"calls":[]}`, "/v1/sessions": `{"sessions":[]}`} {
		_, b := s.ask(http.MethodGet, path, nil)
		check.That(t, strings.TrimSpace(string(b)) == want, "another site's page has begun %s", b)
	}
}
