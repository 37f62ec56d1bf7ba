package registry

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	library "github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/sbxrun/sbxrun/internal/images"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) {
	pause, retries.Duration = time.Millisecond, time.Millisecond
	for _, v := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"} {
		os.Unsetenv(v)
	}
	os.Setenv("HOME", "/nonexistent")
	os.Exit(m.Run())
}

// stock is a registry with the image app:1, and a handler in front of it.
type stock struct {
	image   v1.Image
	handler http.Handler
}

func newStock(t *testing.T) *stock {
	s := &stock{handler: library.New(library.Logger(log.New(io.Discard, "", 0)))}
	s.image = imageFor(t, "amd64")
	ref := must(name.ParseReference(host(serve(t, s.handler)) + "/app:1"))
	check.Must(t, remote.Write(ref, s.image))
	return s
}

// imageFor returns an image with three layers of 100 kB, which do not compress.
func imageFor(t *testing.T, architecture string) v1.Image {
	image := must(random.Image(100_000, 3))
	c := must(image.ConfigFile()).DeepCopy()
	c.OS, c.Architecture = "linux", architecture
	return must(mutate.ConfigFile(image, c))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func serve(t *testing.T, h http.Handler) *httptest.Server {
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server
}

func host(s *httptest.Server) string {
	u, _ := url.Parse(s.URL)
	return u.Host
}

// read imports app:1 into a new store.
func read(t *testing.T, host string, o Options) error {
	t.Helper()
	_, err := pull(t, newStore(t), host+"/app:1", o, images.Options{Packed: true})
	return err
}

func newStore(t *testing.T) *snapshots.Store {
	t.Helper()
	s, err := snapshots.Open(filepath.Join(t.TempDir(), "snapshots"))
	check.Must(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func pull(t *testing.T, store *snapshots.Store, ref string, o Options, how images.Options) (*snapshots.Image, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), harness.Deadline(20*time.Second))
	defer cancel()
	src, err := Open(ctx, ref, o)
	if err != nil {
		return nil, err
	}
	how.Digest = src.Digest
	return images.Import(ctx, store, src, how)
}

// wants fails unless the error contains text, and none of the secrets.
func wants(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" {
		check.Must(t, err)
		return
	}
	check.Require(t, err != nil && strings.Contains(err.Error(), text), "error: %v, want %q", err, text)
	for _, s := range []string{secret, token, base64.StdEncoding.EncodeToString([]byte("me:" + secret))} {
		check.That(t, !strings.Contains(err.Error(), s), "the error contains a secret: %v", err)
	}
}

const (
	secret = "swordfish"
	token  = "opaque-token"
)

func authFile(t *testing.T, host, user, password string) string {
	file := filepath.Join(t.TempDir(), "config.json")
	text, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{"auth": base64.StdEncoding.EncodeToString([]byte(user + ":" + password))}}})
	check.Must(t, err)
	check.Must(t, os.WriteFile(file, text, 0o600))
	return file
}

// References have docker's grammar.
func TestParse(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0a", 32)
	for text, want := range map[string]string{
		"python": "index.docker.io/library/python:latest", "python:3.13-slim": "index.docker.io/library/python:3.13-slim", "me/app": "index.docker.io/me/app:latest",
		"docker.io/library/python": "index.docker.io/library/python:latest", "ghcr.io/a/b/c:V1": "ghcr.io/a/b/c:V1", "localhost:5000/x": "localhost:5000/x:latest",
		"[::1]:5000/x": "[::1]:5000/x:latest", "a__b/c--d": "index.docker.io/a__b/c--d:latest", "app" + digest: "index.docker.io/library/app" + digest,
		"h.example/app:1" + digest: "h.example/app" + digest,
	} {
		ref, err := parse(text)
		check.That(t, err == nil && ref.Name() == want, "%s: %v, %v", text, ref, err)
	}
	for _, text := range []string{
		"", "../../etc", "..", "a/../b", "../etc:1", "/etc", "a//b", "a/", "A", "h.example/A", "a:", "a:-x", "a@", "a@sha256:0", "a@md5:" + strings.Repeat("0", 32),
		"-a", ".a", "a b", "a\nb", "a\x00", "https://h.example/a", "user:pass@h.example/a", "h.example:port/a", "a?x=1", "a#b", "a%2fb", "oci:/dir", "ä",
		strings.Repeat("a/", 300) + "a", "h..example/a", "a:" + strings.Repeat("t", 129),
	} {
		ref, err := parse(text)
		check.That(t, err != nil, "%q is accepted as %s", text, ref)
	}
}

// An image can be read without credentials, with basic authentication, with tokens, and over TLS.
func TestAccess(t *testing.T) {
	s := newStock(t)
	basic := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if user, password, _ := r.BasicAuth(); user != "me" || password != secret {
				w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
				http.Error(w, fmt.Sprintf(`{"errors":[{"code":"UNAUTHORIZED","message":"%s"}]}`, password), http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(w, r)
		})
	}
	var realm string
	tokens := func(next http.Handler) http.Handler {
		issue := basic(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			check.Equal(t, r.URL.Query().Get("scope"), "repository:app:pull", "scope")
			fmt.Fprintf(w, `{"token":%q}`, token)
		}))
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case r.URL.Path == "/token":
				issue.ServeHTTP(w, r)
			case r.Header.Get("Authorization") == "Bearer "+token:
				next.ServeHTTP(w, r)
			default:
				w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="x"`, realm))
				w.WriteHeader(http.StatusUnauthorized)
			}
		})
	}
	for _, test := range []struct {
		name     string
		wrap     func(http.Handler) http.Handler
		password string
		want     string
	}{
		{"anonymous", func(h http.Handler) http.Handler { return h }, "", ""},
		{"unneeded", func(h http.Handler) http.Handler { return h }, secret, ""},
		{"basic", basic, secret, ""}, {"basic wrong", basic, "wrong", "denies access to app"}, {"basic anonymous", basic, "", "denies access to app"},
		{"token", tokens, secret, ""}, {"token wrong", tokens, "wrong", "denies access to app"},
	} {
		for _, secure := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s TLS %t", test.name, secure), func(t *testing.T) {
				server := httptest.NewUnstartedServer(test.wrap(s.handler))
				o := Options{}
				if secure {
					server.StartTLS()
					o.Transport = server.Client().Transport
				} else {
					server.Start()
				}
				defer server.Close()
				realm = server.URL
				if test.password != "" {
					o.AuthFile = authFile(t, host(server), "me", test.password)
				}
				wants(t, read(t, host(server), o), test.want)
				if secure {
					o.Transport = nil
					wants(t, read(t, host(server), o), "certificate signed by unknown authority")
				}
			})
		}
	}
}

// Credentials come from the first file that exists, in docker's format.
func TestCredentials(t *testing.T) {
	ref, err := parse("python")
	check.Must(t, err)
	user := func(file string) string {
		a, err := credentials(file, ref.Context())
		check.Must(t, err)
		c, err := a.Authorization()
		check.Must(t, err)
		return c.Username
	}
	dir := t.TempDir()
	check.Must(t, os.Mkdir(filepath.Join(dir, ".docker"), 0o700))
	check.Must(t, os.Rename(authFile(t, "https://index.docker.io/v1/", "home", secret), filepath.Join(dir, ".docker", "config.json")))
	t.Setenv("HOME", dir)
	check.Equal(t, user(""), "home", "in the home directory")
	t.Setenv("DOCKER_CONFIG", filepath.Dir(authFile(t, "https://index.docker.io/v1/", "config", secret)))
	check.Equal(t, user(""), "config", "with DOCKER_CONFIG")
	t.Setenv("REGISTRY_AUTH_FILE", authFile(t, "docker.io/library", "podman", secret))
	check.Equal(t, user(""), "podman", "with REGISTRY_AUTH_FILE")
	check.Equal(t, user(authFile(t, "index.docker.io/library/python", "flag", secret)), "flag", "with --authfile")
	check.Equal(t, user(authFile(t, "other.example", "other", secret)), "", "of another registry")
	for text, want := range map[string]string{
		`{"auths": {"docker.io": {"auth": "` + secret + `"}}}`: "is not a valid config.json",
		`{"auths": `: "is not a valid config.json",
		`{"credsStore": "nosuch", "auths": {"https://index.docker.io/v1/": {}}}`: "the credential helper for index.docker.io failed",
	} {
		file := filepath.Join(dir, "bad.json")
		check.Must(t, os.WriteFile(file, []byte(text), 0o600))
		_, err := credentials(file, ref.Context())
		wants(t, err, want)
	}
	_, err = credentials(filepath.Join(dir, "missing"), ref.Context())
	wants(t, err, "no such file")
}
