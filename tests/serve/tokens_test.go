package serve

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// tokens writes a token file. Each tenant's token is its name and "-token".
func tokens(t *testing.T, name string, tenants ...string) {
	t.Helper()
	text := "# whose calls are taken\n\n"
	for _, tenant := range tenants {
		text += fmt.Sprintf("%s sha256:%x\n", tenant, sha256.Sum256([]byte(tenant+"-token")))
	}
	check.Must(t, os.WriteFile(name, []byte(text), 0o600))
}

// overTCP starts a server that also listens on TCP, and returns its address.
func overTCP(t *testing.T, config string, tenants ...string) (*server, string) {
	t.Helper()
	dir := harness.Dir(t)
	file := filepath.Join(dir, "tokens")
	tokens(t, file, tenants...)
	s := serveIn(t, dir, "token_file = \""+file+"\"\n"+config, "--listen", "tcp:127.0.0.1:0", "--listen", "unix:"+filepath.Join(dir, "socket"))
	var address string
	harness.Until(t, harness.Bound, "the address", func() bool {
		for _, line := range strings.Split(s.log.String(), "\n") {
			var entry struct{ Msg, Address string }
			if json.Unmarshal([]byte(line), &entry) == nil && entry.Msg == "listening" && strings.HasPrefix(entry.Address, "127.") {
				address = entry.Address
			}
		}
		return address != ""
	})
	return s, address
}

// post posts a call to a URL.
func post(t *testing.T, client *http.Client, url, token string, call api.Call) (int, []byte) {
	t.Helper()
	var headers []string
	if token != "" {
		headers = []string{"Authorization", "Bearer " + token}
	}
	status, answer, _, err := exchange(t.Context(), client, http.MethodPost, url, call, headers...)
	check.Must(t, err)
	return status, answer
}

func TestTokens(t *testing.T) {
	t.Parallel()
	s, address := overTCP(t, "[tenants.small]\nmax_timeout = \"100ms\"\n", "big", "small")
	client := &http.Client{Timeout: harness.Bound}
	defer client.CloseIdleConnections()
	for token, want := range map[string]int{"": 401, "wrong": 401, "big": 401, "big-token": 200, "small-token": 200} {
		status, b := post(t, client, "http://"+address+"/v1/run", token, sh("sleep 0.2"))
		check.That(t, status == want && (status != 401 || strings.Contains(string(b), `"code":"auth"`)), "%q: %d %s", token, status, b)
		check.That(t, status != 200 || strings.Contains(string(b), `"cause":"timeout"`) == (token == "small-token"), "%q: %s", token, b)
	}
	for _, path := range []string{"/v1/languages", "/v1/calls", "/openapi.json", "/metrics", "/mcp"} {
		r, err := client.Get("http://" + address + path)
		check.Must(t, err)
		r.Body.Close()
		check.That(t, r.StatusCode == 401, "%s: %d", path, r.StatusCode)
	}
	// Tenants don't see each other's resources.
	_, b := post(t, client, "http://"+address+"/v1/calls", "big-token", sh("sleep 1000"))
	var c api.CallStatus
	check.Require(t, json.Unmarshal(b, &c) == nil && c.ID != "", "%s", b)
	s.refuses(api.NoSuchCall, http.MethodGet, "/v1/calls/"+c.ID, nil, "Authorization", "Bearer small-token")
	s.answers(200, "", http.MethodDelete, "/v1/calls/"+c.ID, nil, "Authorization", "Bearer big-token")
	// SIGHUP rereads the tokens: a removed one is no longer accepted, and an invalid file changes nothing.
	tokens(t, filepath.Join(s.dir, "tokens"), "small")
	_ = s.cmd.Process.Signal(unix.SIGHUP)
	harness.Until(t, harness.Bound, "the new tokens", func() bool {
		status, _ := post(t, client, "http://"+address+"/v1/run", "big-token", sh("true"))
		return status == 401
	})
	check.Must(t, os.WriteFile(filepath.Join(s.dir, "tokens"), []byte("nonsense"), 0o600))
	_ = s.cmd.Process.Signal(unix.SIGHUP)
	s.logs(`"msg":"reload"`)
	status, b := post(t, client, "http://"+address+"/v1/run", "small-token", sh("true"))
	check.That(t, status == 200, "%d %s", status, b)
}

// roots returns a pool with the authority's certificate.
func roots(t *testing.T, dir string) *x509.CertPool {
	t.Helper()
	text := harness.ReadFile(t, filepath.Join(dir, "ca.pem"))
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return pool
}

// overTLS is overTCP with certificates.
func overTLS(t *testing.T, dir string, tenants ...string) (*server, string) {
	t.Helper()
	return overTCP(t, fmt.Sprintf("tls_cert = %q\ntls_key = %q\n", filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key")), tenants...)
}

func TestTLS(t *testing.T) {
	t.Parallel()
	dir := harness.Certificates(t)
	s, address := overTLS(t, dir, "me")
	trusting := func(dir string) *http.Client {
		client := &http.Client{Timeout: harness.Bound, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots(t, dir)}, ForceAttemptHTTP2: true}}
		t.Cleanup(client.CloseIdleConnections)
		return client
	}
	client := trusting(dir)
	status, b := post(t, client, "https://"+address+"/v1/run", "me-token", sh("echo secure"))
	check.That(t, status == 200 && strings.Contains(string(b), "secure"), "%d %s", status, b)
	r, err := client.Get("https://" + address + "/healthz")
	check.Must(t, err)
	r.Body.Close()
	check.That(t, r.ProtoMajor == 1, "%s, where a reset is easily lost", r.Proto)
	// SIGHUP loads a renewed certificate. An incomplete one changes nothing.
	renewed := harness.Certificates(t)
	replace := func(name string) {
		check.Must(t, os.Rename(filepath.Join(renewed, name), filepath.Join(dir, name)))
		_ = s.cmd.Process.Signal(unix.SIGHUP)
	}
	replace("server.pem")
	s.logs("tls_cert " + filepath.Join(dir, "server.pem"))
	status, b = post(t, trusting(dir), "https://"+address+"/v1/run", "me-token", sh("true"))
	check.That(t, status == 200, "%d %s", status, b)
	// Nor does one together with another invalid setting.
	config := filepath.Join(s.dir, "config.toml")
	right := harness.ReadFile(t, config)
	check.Must(t, os.WriteFile(config, append(bytes.Clone(right), "\n[overlays]\nnew = \"/usr\"\n[tenants.me]\noverlays = [\"new\"]\n"...), 0o600))
	replace("server.key")
	s.logs("no \\\"new\\\" in [overlays]")
	status, b = post(t, trusting(dir), "https://"+address+"/v1/run", "me-token", sh("true"))
	check.That(t, status == 200, "%d %s", status, b)
	check.Must(t, os.WriteFile(config, right, 0o600))
	_ = s.cmd.Process.Signal(unix.SIGHUP)
	s.logs(`"msg":"reloaded"`)
	status, b = post(t, trusting(renewed), "https://"+address+"/v1/run", "me-token", sh("true"))
	check.That(t, status == 200, "%d %s", status, b)
}

// SIGHUP reloads languages, also for agents, and limits. Everything else needs a restart, because
// running calls keep their directories.
func TestReload(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	s := serveIn(t, dir, "")
	file, other := filepath.Join(dir, "config.toml"), filepath.Join(dir, "other")
	was := harness.ReadFile(t, file)
	path := s.session(`{}`)
	var agents []*agent
	for _, version := range []string{legacy, ""} {
		agents = append(agents, s.agent(&mcp.StreamableClientTransport{Endpoint: "http://sbxrun/mcp", HTTPClient: &http.Client{Transport: s.client.Transport}}, version))
	}
	text := strings.Replace(string(was), "state_dir = \""+filepath.Join(dir, "state"), fmt.Sprintf("places = 1\ndata_dir = %q\nstate_dir = \"%s", other, other), 1)
	text += "[languages.extra]\ncommand = [\"sh\", \"{file}\"]\nfile = \"main.sh\"\n[tenant]\nsessions = 1\nvolumes = 1\n"
	check.Must(t, os.WriteFile(file, []byte(text), 0o600))
	_ = s.cmd.Process.Signal(unix.SIGHUP)
	s.logs(`"msg":"reloaded"`, "other changes need a restart")
	s.answers(http.StatusOK, `"name":"extra"`, http.MethodGet, "/v1/languages", nil)
	for _, a := range agents {
		r := a.use("run_code", map[string]any{"language": "extra", "code": "echo $((6*7))"})
		check.That(t, strings.Contains(r.Content[0].(*mcp.TextContent).Text, "42"), "%+v", r)
		check.Must(t, a.Close())
	}
	s.refuses(api.QuotaKept, http.MethodPost, "/v1/sessions", `{}`)
	c := s.status(http.MethodPost, path+"/processes", sh("echo out"), http.StatusAccepted)
	s.status(http.MethodGet, path+"/processes/"+c.ID+"?wait_ms=60000", nil, http.StatusOK)
	_, b := s.ask(http.MethodGet, path+"/processes/"+c.ID+"/output", nil)
	check.That(t, string(b) == "out\n", "%q", b)
	s.ask(http.MethodDelete, path, nil)
	s.session(`{}`)
	s.answers(http.StatusOK, `"places":64`, http.MethodGet, "/v1/status", nil)
	_, err := os.Lstat(other)
	check.That(t, err != nil, "the new directory is used")
}

// With systemd's socket activation, the server gets its socket on descriptor 3, and notifies
// systemd when it is ready and when it stops.
func TestSocketActivation(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	check.Must(t, err)
	defer l.Close()
	file, err := l.(*net.UnixListener).File()
	check.Must(t, err)
	defer file.Close()
	notes, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	check.Must(t, err)
	defer notes.Close()
	note := func() string {
		_ = notes.SetReadDeadline(time.Now().Add(harness.Bound))
		b := make([]byte, 4096)
		n, err := notes.Read(b)
		check.Must(t, err)
		return string(b[:n])
	}
	config := filepath.Join(dir, "config.toml")
	check.Must(t, os.WriteFile(config, []byte(fmt.Sprintf("state_dir = %q\n[rooms]\nmax = 0\nmin = 0\n", filepath.Join(dir, "state"))), 0o600))
	s := &server{t: t, dir: dir, log: &harness.Log{}}
	s.cmd = exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh", harness.Binary(t), "serve", "--config", config)
	s.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+filepath.Join(dir, "notify"))
	s.cmd.ExtraFiles, s.cmd.Stderr = []*os.File{file}, s.log
	s.start()
	check.Equal(t, note(), "READY=1")
	_ = s.cmd.Process.Signal(unix.SIGHUP) // the environment no longer mentions sockets
	harness.Until(t, harness.Bound, "the reload", func() bool { return strings.Contains(s.log.String(), `"msg":"reload`) })
	log := s.log.String()
	check.That(t, strings.Contains(log, `"msg":"reloaded"`) && !strings.Contains(log, "other changes need a restart"), "%v", log)
	check.Equal(t, text(s.run(sh("ls /proc/self/fd | wc -l")).Stdout), "4\n") // 0, 1, 2 and that of ls
	if os.Getuid() == 0 {
		s.group()
	}
	s.end()
	check.Equal(t, note(), "STOPPING=1")
}

// group lets the socket's group call, each user as its own tenant, and no one else.
func (s *server) group() {
	const group = 61234
	check.Must(s.t, os.Chown(s.socket(), 0, group))
	check.Must(s.t, os.Chmod(s.socket(), 0o660))
	curl := func(uid, gid uint32, args ...string) string {
		c := exec.Command("curl", append([]string{"--silent", "--unix-socket", s.socket(), "--header", "Content-Type: application/json"}, args...)...)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: gid}}
		out, err := combined(c)
		return fmt.Sprintf("%s %v", out, err)
	}
	for _, uid := range []uint32{61001, 61002} {
		check.Equal(s.t, curl(uid, group, "http://sbxrun/v1/sessions"), `{"sessions":[]}`+"\n <nil>", "uid %d", uid)
		out := curl(uid, group, "http://sbxrun/v1/sessions", "--data", "{}")
		check.That(s.t, strings.HasPrefix(out, `{"id":`), "uid %d: %s", uid, out)
		curl(uid, group, "http://sbxrun/v1/run", "--data", `{"argv":["true"]}`)
		s.logs(fmt.Sprintf(`"tenant":"uid-%d"`, uid))
	}
	check.Equal(s.t, curl(61003, 61003, "http://sbxrun/readyz"), " exit status 7", "of another group")
}
