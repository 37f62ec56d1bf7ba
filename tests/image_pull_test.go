package tests

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	stdjson "encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// imageRegistry is a registry on this machine.
type imageRegistry struct {
	t       *testing.T
	handler http.Handler
	host    string // without TLS and authentication
}

func newRegistry(t *testing.T) *imageRegistry {
	r := &imageRegistry{t: t, handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	server := httptest.NewServer(r.handler)
	t.Cleanup(server.Close)
	r.host = strings.TrimPrefix(server.URL, "http://")
	return r
}

// push pushes an image whose layers have one file each, and returns its digest.
func (r *imageRegistry) push(tag string, layers ...[]byte) string {
	r.t.Helper()
	image, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH})
	check.Must(r.t, err)
	for i, data := range layers {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		check.Must(r.t, w.WriteHeader(&tar.Header{Name: fmt.Sprint("file", i), Mode: 0o644, Size: int64(len(data))}))
		_, err := w.Write(data)
		check.Must(r.t, err)
		check.Must(r.t, w.Close())
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }, tarball.WithMediaType(types.OCILayer))
		check.Must(r.t, err)
		image, err = mutate.AppendLayers(image, layer)
		check.Must(r.t, err)
	}
	ref, err := name.NewTag(r.host + "/" + tag)
	check.Must(r.t, err)
	check.Must(r.t, remote.Write(ref, image))
	d, err := image.Digest()
	check.Must(r.t, err)
	return d.String()
}

// noise returns n bytes that do not compress, the same ones for each seed.
func noise(seed byte, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

// imageNamed returns the digest of the image with a name, or "".
func imageNamed(t *testing.T, s *harness.State, name string) string {
	t.Helper()
	r := s.Run("image", "ls", "--json")
	var list []struct {
		Names  []string
		Digest string
	}
	err := stdjson.Unmarshal(r.Stdout, &list)
	check.Require(t, err == nil && r.ExitCode == 0, "image ls: exit code %d, %v: %s", r.ExitCode, err, r.Stderr)
	for _, m := range list {
		if slices.Contains(m.Names, name) {
			return m.Digest
		}
	}
	return ""
}

// image pull adds an image under its reference or another name, and moves the name when the tag has moved.
func TestImagePull(t *testing.T) {
	t.Parallel()
	reg, s := newRegistry(t), harness.NewState(t)
	one := reg.push("app:1", noise(1, 1000), noise(2, 1000))
	ref := reg.host + "/app:1"
	pull := func(want string, args ...string) {
		t.Helper()
		s.Run(append([]string{"image", "pull"}, args...)...).Exits(t, 0).Out(t, want+"\n").Err(t, "")
	}
	pull(one, ref)
	pull(one, ref, "--name", "other", "--ttl", "1h")
	pull(one, reg.host+"/app@"+one)
	for _, name := range []string{ref, "other", reg.host + "/app"} {
		check.Equal(t, imageNamed(t, s, name), one, "%s", name)
	}
	two := reg.push("app:1", noise(1, 1000), noise(3, 1000))
	pull(two, ref)
	got := []string{imageNamed(t, s, ref), imageNamed(t, s, "other")}
	check.That(t, slices.Equal(got, []string{two, one}), "after the tag has moved: %q", got)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"../../etc"}, "error: invalid image reference"},
		{[]string{reg.host + "/app:3"}, "error: " + reg.host + " has no such image in app\n"},
		{[]string{ref, "--name", "../x"}, "error: invalid image name"},
		{[]string{ref, "--authfile", "/nosuch"}, "error: read credentials: open /nosuch: no such file or directory\n"},
		{[]string{ref, "--max-size", "1K"}, "error: "},
	} {
		s.Run(append([]string{"image", "pull"}, test.args...)...).Exits(t, 125).ErrHas(t, test.want)
	}
}

// image pull uses the credentials of docker login and the certificates in SSL_CERT_FILE. It does not print passwords.
func TestImagePullCredentials(t *testing.T) {
	t.Parallel()
	const password = "swordfish"
	reg, s := newRegistry(t), harness.NewState(t)
	digest := reg.push("app:1", noise(1, 1000))
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, given, _ := r.BasicAuth(); given != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			http.Error(w, given, http.StatusUnauthorized)
			return
		}
		reg.handler.ServeHTTP(w, r)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "https://")
	dir := harness.SharedDir(t)
	certificate := filepath.Join(dir, "cert.pem")
	check.Must(t, os.WriteFile(certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o644))
	login := func(file, password string) string {
		text := fmt.Sprintf(`{"auths": {%q: {"auth": %q}}}`, host, base64.StdEncoding.EncodeToString([]byte("me:"+password)))
		check.Must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644))
		return filepath.Join(dir, file)
	}
	login("config.json", password)
	wrong := login("wrong.json", "wrong"+password)
	for _, test := range []struct {
		env  []string
		args []string
		want string // error
	}{
		{[]string{"SSL_CERT_FILE=" + certificate, "DOCKER_CONFIG=" + dir}, nil, ""},
		{[]string{"SSL_CERT_FILE=" + certificate}, []string{"--authfile", filepath.Join(dir, "config.json")}, ""},
		{[]string{"SSL_CERT_FILE=" + certificate, "DOCKER_CONFIG=" + dir}, []string{"--authfile", wrong}, "denies access to app"},
		{[]string{"SSL_CERT_FILE=" + certificate}, nil, "denies access to app; check the name, and the credentials"},
		{[]string{"DOCKER_CONFIG=" + dir}, nil, "certificate signed by unknown authority"},
	} {
		r := s.Start(harness.Options{Env: test.env}, append([]string{"image", "pull", host + "/app:1"}, test.args...)...).Wait()
		if test.want == "" {
			check.That(t, r.ExitCode == 0 && string(r.Stdout) == digest+"\n", "%q %q: exit code %d, %s", test.env, test.args, r.ExitCode, r.Stderr)
		} else if r.ExitCode != 125 || !strings.Contains(string(r.Stderr), test.want) || strings.Contains(string(r.Stderr), password) {
			t.Errorf("%q %q: exit code %d, %s", test.env, test.args, r.ExitCode, r.Stderr)
		}
	}
}

// A proxy that does not work is an error without its password.
func TestImagePullProxy(t *testing.T) {
	t.Parallel()
	s := harness.NewState(t)
	r := s.Start(harness.Options{Env: []string{"HTTPS_PROXY=http://me:swordfish@127.0.0.1:1"}}, "image", "pull", "registry.invalid/app").Wait()
	if stderr := string(r.Stderr); r.ExitCode != 125 || !strings.HasSuffix(stderr, "127.0.0.1:1: connect: connection refused\n") || strings.Contains(stderr, "swordfish") {
		t.Errorf("exit code %d, %s", r.ExitCode, stderr)
	}
}

// A pull that is killed leaves the old image or the new one, and the next one completes it.
func TestImagePullKilled(t *testing.T) {
	t.Parallel()
	reg, s := newRegistry(t), harness.NewState(t)
	ref := reg.host + "/app:1"
	digests := map[string]bool{}
	rounds, interrupted, kept := 12*harness.Soak(t), 0, 0
	for i := range rounds {
		old := imageNamed(t, s, ref)
		digest := reg.push("app:1", noise(1, 500_000), noise(byte(i+2), 500_000), noise(byte(i+3), 500_000))
		digests[digest] = true
		p := s.Start(harness.Options{}, "image", "pull", ref)
		sig := []unix.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGINT}[i%3]
		select {
		case <-p.Exited():
		case <-time.After(rand.N(harness.Scaled(60 * time.Millisecond))):
			p.Signal(sig)
		}
		r := p.Wait()
		check.That(t, r.ExitCode == 0 || r.Signal == sig, "exit code %d, signal %v: %s", r.ExitCode, r.Signal, r.Stderr)
		got := imageNamed(t, s, ref)
		check.That(t, got == old || got == digest, "the image is %q, neither the old %q nor the new %q", got, old, digest)
		if r.Signal == sig {
			interrupted++
		}
		if got == old {
			kept++
		}
		if i%4 == 3 {
			s.Run("image", "pull", ref).Exits(t, 0).Out(t, digest+"\n")
		}
	}
	t.Logf("%d of %d pulls were interrupted; %d left the old image", interrupted, rounds, kept)
	s.Run("cleanup")
	left, err := os.ReadDir(s.Dir + "-data/snapshots/tmp")
	check.That(t, err == nil && len(left) == 0, "left over: %q, %v", left, err)
}

// image pull shows its progress only on a terminal.
func TestImagePullProgress(t *testing.T) {
	t.Parallel()
	reg, s := newRegistry(t), harness.NewState(t)
	reg.push("app:1", noise(1, 3_000_000))
	r, shown := harness.Said(t, func(o harness.Options) *harness.Process {
		o.Env = []string{"TERM=xterm"}
		return s.Start(o, "image", "pull", reg.host+"/app:1")
	})
	check.That(t, r.ExitCode == 0 && strings.Contains(shown, "/app:1: layer 1 of 1, ") && strings.HasSuffix(shown, "\r\x1b[K"), "exit code %d, %q", r.ExitCode, shown)
}
