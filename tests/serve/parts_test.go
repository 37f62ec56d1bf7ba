package serve

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// What a session has besides its workspace: overlay, snapshot, volumes, network.

// app returns a directory for overlays, and the configuration of a server whose tenants may use everything.
func app(t *testing.T) (dir, config string) {
	t.Helper()
	top := harness.Dir(t)
	dir = filepath.Join(top, "app")
	check.Must(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(dir, "list"), []byte("one\ntwo\n"), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(dir, "sub/deep"), []byte("deep\n"), 0o644))
	return dir, fmt.Sprintf("data_dir = %q\n[overlays]\napp = %q\nother = %q\n[tenant]\noverlays = [\"app\"]\nvolumes = 2\nsnapshots = \"64M\"\nnetwork = [\"host.sbxrun.internal:%d\", \"*.example.org\", \"10.0.0.0/8:5432\"]\n",
		filepath.Join(top, "data"), dir, top, port(t))
}

func port(t *testing.T) int {
	t.Helper()
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "hello from outside") }))
	t.Cleanup(web.Close)
	return web.Listener.Addr().(*net.TCPAddr).Port
}

func (s *server) diffOf(path string) api.Diff {
	s.t.Helper()
	return decoded[api.Diff](s, 200, http.MethodGet, path+"/diff", nil)
}

// A session writes to an overlay over a directory of the server, which stays unchanged.
func TestOverlay(t *testing.T) {
	t.Parallel()
	dir, config := app(t)
	s := serve(t, config)
	path := s.session(`{"overlay":{"name":"app"}}`)
	s.want(path+"/exec", "cd /work && cat list && sed -i s/two/three/ list && rm -r sub && echo new >added && ln -s list link && cat list", "one\ntwo\none\nthree\n")
	b := harness.ReadFile(t, filepath.Join(dir, "list"))
	_, err := os.Stat(filepath.Join(dir, "sub/deep"))
	check.That(t, string(b) == "one\ntwo\n" && err == nil, "the original was changed: %q %v", b, err)
	d := s.diffOf(path)
	var got []string
	for _, c := range d.Changes {
		got = append(got, fmt.Sprint(c.Kind, " ", c.Type, " ", c.Path))
	}
	want := []string{"added file added", "added link link", "changed file list", "deleted directory sub"}
	check.That(t, slices.Equal(got, want) && d.Path == "/work" && d.Count == 4 && d.Bytes == int64(len("new\n")+len("one\nthree\n")), "%q %+v, want %q", got, d, want)
	status, b := s.ask(http.MethodGet, path+"/diff", nil, "Accept", "application/x-tar")
	files := untar(t, b)
	check.That(t, status == 200 && len(files) == 4 && files["list"] == "one\nthree\n" && files["added"] == "new\n", "%d %q", status, files)
	// Another session starts with the original. Requested properties are reported.
	other := s.session(`{"overlay":{"name":"app","path":"/srv/app"}}`)
	s.want(other+"/exec", "cat /srv/app/list", "one\ntwo\n")
	s.answers(http.StatusOK, `"overlay":{"name":"app","path":"/srv/app"}`, http.MethodGet, other, nil)
	plain := s.session(`{}`)
	s.refuses(api.Usage, http.MethodGet, plain+"/diff", nil)
	s.want("/v1/run", "ls /work 2>/dev/null | wc -l", "0\n")
	call := sh("cat /work/list; echo x >/work/list")
	call.Overlay = &api.Overlay{Name: "app"}
	a := s.run(call)
	check.That(t, text(a.Stdout) == "one\ntwo\n" && a.ExitCode == 0 && a.Room == "cold", "%+v", a)
	for _, path := range []string{path, other, plain} {
		s.answers(200, "", http.MethodDelete, path, nil)
	}
	s.refuses(api.Ended, http.MethodGet, path+"/diff", nil)
	s.idle()
}

// hostileLayer creates what a hostile command can leave in a directory: links that lead out of it, a FIFO, a socket, hard
// links, names with newlines and invalid UTF-8, an unreadable directory, a deep one, and overlayfs attributes and devices.
// Then, until killed, it exchanges directories and files with links that lead out (renameat2(2), RENAME_EXCHANGE).
const hostileLayer = `import ctypes, os, socket, sys
os.chdir(sys.argv[1])
outside = sys.argv[2]
for name, to in ("evil", outside), ("link", outside + "/secret"), ("rel", "../" * 20 + outside), ("self", "self"), ("proc", "/proc/self/root" + outside):
    os.symlink(to, name)
os.mkdir("d"); os.mkfifo("fifo"); socket.socket(socket.AF_UNIX).bind("socket")
for name in "f", "d/secret", b"new\nline", b"\xff\xfe", "a" * 255: open(name, "w").write("mine")
os.link("f", "twin"); os.mkdir("closed"); os.mkdir("opaque")
for f in (lambda: os.mknod("gone", 0o20644, 0)), (lambda: os.mknod("null", 0o20666, os.makedev(1, 3))), (lambda: os.setxattr("opaque", "user.overlay.opaque", b"y")), (lambda: os.setxattr("d", "user.overlay.redirect", b"/../evil")):
    try: f()
    except OSError: pass
top = os.open(".", 0)
os.mkdir("deep"); os.chdir("deep")
for i in range(80): os.mkdir("d"); os.chdir("d")
os.chdir(top); os.chmod("closed", 0)
libc = ctypes.CDLL(None)
print("begun", flush=True)
while True:
    for a, b in (b"d", b"evil"), (b"f", b"link"): libc.renameat2(-100, a, -100, b, 2)
`

// Whatever a session has in its overlay and workspace, also while that changes, no answer contains
// anything from outside, and nothing there changes.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	dir, config := app(t)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	check.Must(t, os.Mkdir(outside, 0o755))
	check.Must(t, os.WriteFile(filepath.Join(outside, "secret"), []byte("host's"), 0o644))
	s := serve(t, config)
	path := s.session(`{"overlay":{"name":"app"}}`)
	for _, at := range []string{"/work", "/home/sandbox"} {
		begun := s.status(http.MethodPost, path+"/processes", api.Call{Argv: []string{"python3", "-c", hostileLayer, at, outside}}, http.StatusAccepted)
		harness.Until(t, harness.Bound, "the racer in "+at, func() bool {
			return s.status(http.MethodGet, path+"/processes/"+begun.ID, nil, 200).StdoutBytes > 0
		})
	}
	ask := func(method, path string, body any, headers ...string) (int, []byte) {
		t.Helper()
		status, b, _, err := s.try(t.Context(), method, path, body, headers...) // an archive may break off
		check.That(t, status < 500 && !bytes.Contains(b, []byte("host's")), "%s %s: %d %.1000s %v", method, path, status, b, err)
		return status, b
	}
	octet := []string{"Content-Type", "application/octet-stream"}
	for n := range 3 {
		ask(http.MethodGet, path+"/diff", nil)
		ask(http.MethodGet, path+"/diff", nil, "Accept", "application/x-tar")
		ask(http.MethodGet, path+"/files", nil)
		ask(http.MethodGet, path+"/archive", nil)
		for _, name := range []string{"d/secret", "evil/secret", "f", "link", "rel/secret", "proc/secret", "fifo", "closed/x"} {
			ask(http.MethodGet, path+"/files/"+name, nil)
			ask(http.MethodPut, path+"/files/"+name, "session's", octet...)
		}
		ask(http.MethodDelete, path+"/files/evil/secret", nil)
		name := fmt.Sprint("s", n)
		if status, _ := ask(http.MethodPost, path+"/snapshot", `{"name":"`+name+`"}`); status != http.StatusCreated {
			continue
		}
		call := sh("grep -rs \"host's\" /work; ls -A /work | wc -l")
		call.Snapshot = name
		a := s.run(call)
		check.That(t, !strings.Contains(text(a.Stdout), "host's") && a.ExitCode == 0, "%+v", a)
	}
	ask(http.MethodDelete, path, nil)
	b, err := os.ReadFile(filepath.Join(outside, "secret"))
	check.That(t, string(b) == "host's" && err == nil, "outside: %q %v", b, err)
	for at, want := range map[string]int{outside: 1, dir: 2, filepath.Join(dir, "sub"): 1} {
		names, err := os.ReadDir(at)
		check.That(t, len(names) == want && err == nil, "%s: %v %v", at, names, err)
	}
	s.idle()
}

// A tenant's request for something that it may not use is rejected before anything starts, in the
// same way whether or not that exists.
func TestPartsRefused(t *testing.T) {
	t.Parallel()
	dir, config := app(t)
	s := serve(t, config)
	none := serve(t, "data_dir = \""+harness.Dir(t)+"\"\n[overlays]\napp = \""+dir+"\"\n")
	session := s.session(`{}`)
	for _, tt := range []struct {
		on     *server
		path   string
		body   string
		status int
		code   api.Code
	}{
		{s, "", `{"overlay":{"name":"other"}}`, 403, api.Policy},
		{s, "", `{"overlay":{"name":"nothing"}}`, 403, api.Policy},
		{s, "", `{"overlay":{"name":"/etc"}}`, 403, api.Policy},
		{s, "", `{"overlay":{"name":"app","path":"work"}}`, 400, api.Usage},
		{s, "", `{"overlay":{"name":"app","path":"/proc"}}`, 400, api.Usage},
		{s, "", `{"overlay":{"name":"app","path":"/home"}}`, 400, api.Usage},
		{s, "", `{"overlay":{"name":"app","path":"/home/sandbox/x"}}`, 400, api.Usage},
		{s, "", `{"overlay":{"name":"app"},"volumes":[{"name":"v","path":"/work/v"}]}`, 400, api.Usage},
		{s, "", `{"volumes":[{"name":"../x","path":"/v"}]}`, 400, api.Usage},
		{s, "", `{"volumes":[{"name":".x","path":"/v"}]}`, 400, api.Usage},
		{s, "", `{"volumes":[{"name":"a","path":"/v"},{"name":"a","path":"/w"}]}`, 400, api.Usage},
		{s, "", `{"volumes":[{"name":"a","path":"/v"},{"name":"b","path":"/w"},{"name":"c","path":"/x"}]}`, 409, api.QuotaKept},
		{s, "", `{"snapshot":"nothing"}`, 404, api.NoSuchSnap},
		{s, "", `{"network":{"allow":["example.com"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["example.org"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["a.example.org:8080"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["host.sbxrun.internal:1"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["10.0.0.0/7:5432"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["[::ffff:10.0.0.1]:80"]}}`, 403, api.Policy},
		{s, "", `{"network":{"allow":["*"]}}`, 400, api.Usage},
		{s, "", `{"network":{"allow":["a.example.org"` + strings.Repeat(`,"a.example.org"`, 1000) + `]}}`, 400, api.Usage},
		{s, "", `{"network":{"allow":["a.example.org,example.com"]}}`, 400, api.Usage},
		{s, session, `{"argv":["true"],"overlay":{"name":"app"}}`, 400, api.Usage},
		{s, session, `{"argv":["true"],"network":{"allow":[]}}`, 400, api.Usage},
		{s, session + "/processes", `{"argv":["true"],"network":{"allow":["a.example.org"]}}`, 400, api.Usage},
		{s, "/v1/run", `{"argv":["true"],"overlay":{"name":"other"}}`, 403, api.Policy},
		{s, "/v1/run", `{"argv":["true"],"network":{"allow":["example.com"]}}`, 403, api.Policy},
		{none, "", `{"overlay":{"name":"app"}}`, 403, api.Policy},
		{none, "", `{"volumes":[{"name":"v","path":"/v"}]}`, 403, api.Policy},
		{none, "", `{"snapshot":"x"}`, 403, api.Policy},
		{none, "", `{"network":{"allow":["example.org"]}}`, 403, api.Policy},
	} {
		path := "/v1/sessions"
		if tt.path != "" {
			path = tt.path
		}
		if tt.path == session {
			path += "/exec"
		}
		status, e := tt.on.refused(http.MethodPost, path, tt.body)
		check.That(t, status == tt.status && e.Failure.Code == tt.code && !e.Started && !strings.Contains(e.Failure.Message+e.Failure.Hint, "--") && !strings.Contains(e.Failure.Message, dir),
			"%s %s: %d %+v, want %d %s", path, tt.body, status, e.Failure, tt.status, tt.code)
	}
	s.ask(http.MethodDelete, session, nil)
	s.idle()
	none.idle()
}

// A volume outlives its session. One session may write to it, or several read it.
func TestVolumes(t *testing.T) {
	t.Parallel()
	_, config := app(t)
	s := serve(t, config)
	const writes, reads = `{"volumes":[{"name":"cache","path":"/cache"}]}`, `{"volumes":[{"name":"cache","path":"/cache","read_only":true}]}`
	path := s.session(writes)
	s.want(path+"/exec", "echo kept >/cache/file; cat /cache/file", "kept\n")
	for _, body := range []string{writes, reads} {
		s.refuses(api.BusyVolume, http.MethodPost, "/v1/sessions", body)
	}
	s.refuses(api.BusyVolume, http.MethodDelete, "/v1/volumes/cache", nil)
	s.answers(200, "", http.MethodDelete, path, nil)
	one, two := s.session(reads), s.session(reads)
	for _, path := range []string{one, two} {
		s.want(path+"/exec", "cat /cache/file; echo x 2>/dev/null >/cache/file || echo no", "kept\nno\n")
	}
	call := sh("cat /cache/file")
	call.Volumes = []api.Volume{{Name: "cache", Path: "/cache", ReadOnly: true}}
	s.prints("/v1/run", call, "kept\n")
	call.Volumes[0].ReadOnly = false
	status, e := s.refused(http.MethodPost, "/v1/run", call)
	check.That(t, status == 409, "%d %+v", status, e)
	s.answers(http.StatusOK, `{"volumes":[{"name":"cache"}]}`, http.MethodGet, "/v1/volumes", nil)
	for _, path := range []string{one, two} {
		s.ask(http.MethodDelete, path, nil)
	}
	s.answers(204, "", http.MethodDelete, "/v1/volumes/cache", nil)
	s.refuses(api.NoSuchVolume, http.MethodDelete, "/v1/volumes/cache", nil)
	s.idle()
}

func (s *server) snapshot(path, body string, headers ...string) api.Snapshot {
	s.t.Helper()
	return decoded[api.Snapshot](s, http.StatusCreated, http.MethodPost, path+"/snapshot", body, headers...)
}

// Sessions can start from a snapshot of another one, also after that has ended, and add a layer.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	dir, config := app(t)
	s := serve(t, config)
	path := s.session(`{"overlay":{"name":"app","path":"/srv"}}`)
	s.want(path+"/exec", "rm /srv/list; echo first >/srv/added; echo", "\n")
	first := s.snapshot(path, `{"name":"first"}`)
	check.That(t, first.Name == "first" && first.Path == "/srv" && first.Layers == 1 && first.Size > 0 && strings.HasSuffix(path, first.Session), "%+v", first)
	s.refuses(api.NameInUse, http.MethodPost, path+"/snapshot", `{"name":"first"}`)
	// A session takes one snapshot at a time: the second request is rejected while the store's lock delays the first.
	lock, err := os.OpenFile(filepath.Join(filepath.Dir(dir), "data", fmt.Sprintf("uid-%d", os.Getuid()), "snapshots/lock"), os.O_RDWR, 0)
	check.Must(t, err)
	check.Must(t, unix.FcntlFlock(lock.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK}))
	told := make(chan string, 2)
	for range cap(told) {
		go func() {
			status, b, _, err := s.try(t.Context(), http.MethodPost, path+"/snapshot", `{"name":"one"}`)
			told <- fmt.Sprint(status, err, string(b))
		}()
	}
	refused := <-told
	check.That(t, strings.HasPrefix(refused, "409") && strings.Contains(refused, string(api.BusySession)), "%v", refused)
	lock.Close()
	kept := <-told
	check.That(t, strings.HasPrefix(kept, "201"), "%v", kept)
	s.answers(http.StatusNoContent, "", http.MethodDelete, "/v1/snapshots/one", nil)
	s.want(path+"/exec", "echo later >/srv/added; echo", "\n")
	s.ask(http.MethodDelete, path, nil)
	again := s.session(`{"snapshot":"first"}`)
	s.want(again+"/exec", "ls /srv; cat /srv/added; echo second >/srv/more", "added\nsub\nfirst\n")
	var got []string
	for _, c := range s.diffOf(again).Changes {
		got = append(got, fmt.Sprint(c.Kind, " ", c.Path))
	}
	want := []string{"added added", "deleted list", "added more"}
	check.That(t, slices.Equal(got, want), "%q, want %q", got, want) // including the changes in the snapshot
	second := s.snapshot(again, `{}`)
	check.That(t, second.Layers == 2, "%+v", second)
	call := sh("cat /srv/added /srv/more")
	call.Snapshot = second.ID
	s.prints("/v1/run", call, "first\nsecond\n")
	list := decoded[api.Snapshots](s, 200, http.MethodGet, "/v1/snapshots", nil)
	check.That(t, len(list.Snapshots) == 2 && list.Snapshots[0].ID == first.ID && !strings.Contains(fmt.Sprint(list), dir), "%+v", list)
	status, e := s.refused(http.MethodPost, "/v1/sessions", `{"snapshot":"first","overlay":{"name":"app"}}`)
	check.That(t, status == 400, "%d %+v", status, e)
	for _, id := range []string{"first", second.ID} {
		s.answers(204, "", http.MethodDelete, "/v1/snapshots/"+id, nil)
	}
	s.want(again+"/exec", "cat /srv/added /srv/more", "first\nsecond\n") // it goes on
	s.refuses(api.NoSuchSnap, http.MethodPost, "/v1/sessions", `{"snapshot":"first"}`)
	// More than the tenant's quota.
	s.want(again+"/exec", "head -c 100M /dev/urandom >/srv/big; stat -c %s /srv/big", "104857600\n")
	status, e = s.refused(http.MethodPost, again+"/snapshot", `{}`)
	check.That(t, status == 507 || status == 413, "%d %+v", status, e)
	s.ask(http.MethodDelete, again, nil)
	s.idle()
}

// The proxy reaches hosts on the session's list that the tenant's list allows.
func TestSessionNetwork(t *testing.T) {
	t.Parallel()
	_, config := app(t)
	s := serve(t, config)
	_, after, _ := strings.Cut(config, "host.sbxrun.internal:")
	port, _, _ := strings.Cut(after, "\"")
	get := `import urllib.request, sys
try:
    print(urllib.request.build_opener(urllib.request.ProxyHandler({"http": "http://127.0.0.1:3128"})).open(sys.argv[1], timeout=10).read().decode())
except Exception as e:
    print(type(e).__name__, getattr(e, "code", ""))
`
	ask := func(path, url string) string {
		t.Helper()
		return text(s.call(path+"/exec", api.Call{Argv: []string{"python3", "-c", get, url}}).Stdout)
	}
	path := s.session(`{"network":{"allow":["host.sbxrun.internal:` + port + `","a.example.org","10.1.2.3:5432"]}}`)
	check.Equal(t, ask(path, "http://host.sbxrun.internal:"+port+"/"), "hello from outside\n")
	check.Equal(t, ask(path, "http://example.com/"), "HTTPError 403\n")
	s.want(path+"/exec", "echo $https_proxy", "http://127.0.0.1:3128\n")
	plain := s.session(`{}`)
	got := ask(plain, "http://host.sbxrun.internal:"+port+"/")
	check.That(t, strings.HasPrefix(got, "URLError"), "%q", got)
	call := api.Call{Argv: []string{"python3", "-c", get, "http://host.sbxrun.internal:" + port + "/"}}
	call.Network = &api.Network{Allow: []string{"host.sbxrun.internal:" + port}}
	a := s.run(call)
	check.That(t, text(a.Stdout) == "hello from outside\n" && a.Network != nil && len(a.Network.Hosts) == 1 && a.Network.Hosts[0].Connections == 1 && a.Room == "cold",
		"%q %+v", text(a.Stdout), a.Network)
	for _, path := range []string{path, plain} {
		s.ask(http.MethodDelete, path, nil)
	}
	s.idle() // so that there is no proxy
}

// Volumes and snapshots belong to their tenant, whatever their names.
func TestTenantsApart(t *testing.T) {
	t.Parallel()
	_, config := app(t)
	s, _ := overTCP(t, config+"[tenants.c]\noverlays = []\nnetwork = []\n", "a", "b", "c")
	as := func(tenant string) []string { return []string{"Authorization", "Bearer " + tenant + "-token"} }
	const body = `{"overlay":{"name":"app"},"volumes":[{"name":"cache","path":"/cache"}]}`
	a := s.session(body, as("a")...)
	s.call(a+"/exec", sh("echo secret | tee /work/file /cache/file"), as("a")...)
	snap := s.snapshot(a, `{"name":"state"}`, as("a")...)
	// Another tenant's volumes of the same names are not busy, and empty.
	b := s.session(body, as("b")...)
	check.Equal(t, text(s.call(b+"/exec", sh("ls /cache; ls /work"), as("b")...).Stdout), "list\nsub\n")
	for _, tt := range []struct{ method, path, body, want string }{
		{http.MethodGet, "/v1/snapshots", "", `{"snapshots":[]}`},
		{http.MethodPost, "/v1/sessions", `{"snapshot":"state"}`, string(api.NoSuchSnap)},
		{http.MethodPost, "/v1/sessions", `{"snapshot":"` + snap.ID + `"}`, string(api.NoSuchSnap)},
		{http.MethodPost, "/v1/sessions", `{"snapshot":"../../a/snapshots/manifests/` + snap.ID + `"}`, string(api.NoSuchSnap)},
		{http.MethodDelete, "/v1/snapshots/state", "", string(api.NoSuchSnap)},
		{http.MethodDelete, "/v1/snapshots/" + snap.ID, "", string(api.NoSuchSnap)},
		{http.MethodGet, a + "/diff", "", string(api.NoSuchSession)},
		{http.MethodPost, a + "/snapshot", "{}", string(api.NoSuchSession)},
	} {
		status, got := s.ask(tt.method, tt.path, tt.body, as("b")...)
		check.That(t, strings.Contains(string(got), tt.want) && !strings.Contains(string(got), "secret"), "%s %s: %d %s, want %s", tt.method, tt.path, status, got, tt.want)
	}
	s.answers(http.StatusOK, `"volumes":[]`, http.MethodGet, "/v1/volumes", nil, as("c")...)
	// An empty list allows nothing.
	for _, body := range []string{`{"overlay":{"name":"app"}}`, `{"network":{"allow":["a.example.org"]}}`} {
		s.answers(http.StatusForbidden, "", http.MethodPost, "/v1/sessions", body, as("c")...)
	}
	// A snapshot of a directory that the tenant may no longer use.
	for tenant, path := range map[string]string{"a": a, "b": b} {
		s.answers(http.StatusOK, "", http.MethodDelete, path, nil, as(tenant)...)
	}
	s.idle()
}

// A killed server leaves no process. The next one has the same volumes and snapshots, unused, and
// removes unfinished ones.
func TestPartsKilled(t *testing.T) {
	t.Parallel()
	_, config := app(t)
	dir := harness.Dir(t)
	_, rest, _ := strings.Cut(config, "data_dir = \"")
	data, _, _ := strings.Cut(rest, "\"")
	mounts := func() (n int) {
		b := harness.ReadFile(t, "/proc/self/mountinfo")
		return strings.Count(string(b), data) + strings.Count(string(b), dir)
	}
	const body = `{"overlay":{"name":"app"},"volumes":[{"name":"cache","path":"/cache"}],"network":{"allow":["a.example.org"]}}`
	s := serveIn(t, dir, config)
	path := s.session(body)
	s.want(path+"/exec", "echo kept >/cache/file; echo kept >/work/file; cat /work/file", "kept\n")
	s.snapshot(path, `{"name":"state"}`)
	for round := range 4 {
		again := s.session(`{"snapshot":"state"}`)
		s.want(again+"/exec", "cat /work/file", "kept\n")
		s.call(again+"/exec", sh("head -c 30M /dev/urandom >/work/big"))
		// During a snapshot, or the start of a session.
		broken := make(chan struct{})
		go func() {
			defer close(broken)
			if round%2 == 0 {
				_, _, _, _ = s.try(t.Context(), http.MethodPost, again+"/snapshot", "{}") // fails when the server dies
			} else {
				_, _, _, _ = s.try(t.Context(), http.MethodPost, "/v1/sessions", `{"snapshot":"state","network":{"allow":["a.example.org"]}}`)
			}
		}()
		s.kill()
		<-broken
		s = serveIn(t, dir, config)
		left, err := filepath.Glob(data + "/*/snapshots/tmp/*")
		check.Must(t, err)
		check.That(t, len(left) == 0, "round %d: %q is left", round, left)
		left, err = filepath.Glob(data + "/*/volumes/.*")
		check.Must(t, err)
		check.That(t, len(left) == 0, "round %d: %q is left", round, left)
		n := mounts()
		check.That(t, n == 0, "round %d: %d mounts are left", round, n)
		path = s.session(body) // its volume is free
		s.want(path+"/exec", "cat /cache/file; ls /work", "kept\nlist\nsub\n")
	}
	s.ask(http.MethodDelete, path, nil)
	s.idle()
}

// Agents get the same with create_session.
func TestMCPParts(t *testing.T) {
	t.Parallel()
	dir, config := app(t)
	agents(t, config, func(t *testing.T, a *agent) {
		x := metaReport[api.Session](t, a.use("create_session", map[string]any{
			"overlay": map[string]any{"name": "app"}, "network": map[string]any{"allow": []string{"a.example.org"}},
		}))
		check.That(t, x.Overlay != nil && x.Overlay.Path == "/work", "%+v", x)
		r := a.use("run_command", map[string]any{"session": x.ID, "command": "echo more >>/work/list; cat /work/list; echo $http_proxy"})
		check.That(t, strings.Contains(said(r), "one\ntwo\nmore\nhttp://127.0.0.1:3128\n"), "%s", said(r))
		a.use("end_session", map[string]any{"session": x.ID})
		b := harness.ReadFile(t, filepath.Join(dir, "list"))
		check.That(t, string(b) == "one\ntwo\n", "the original was changed: %q", b)
		bad, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: "create_session", Arguments: map[string]any{"overlay": map[string]any{"name": "other"}}})
		check.That(t, err != nil || bad.IsError && strings.Contains(said(bad), "may not"), "%+v", bad)
	})
}
