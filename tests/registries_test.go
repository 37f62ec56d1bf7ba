package tests

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	stdjson "encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// registries serves one package each to pip (/simple/), npm (/npm/), Go (/go/), cargo (/cargo/) and Maven (/maven/) on
// loopback. It returns the address.
func registries(t *testing.T) string {
	t.Helper()
	const (
		module  = "example.org/lab@v1.0.0/"
		wheel   = "lab-1.0-py3-none-any.whl"
		tarball = "lab-1.0.0.tgz"
	)
	crate := tarred(t, "lab-1.0.0/Cargo.toml", "[package]\nname = \"lab\"\nversion = \"1.0.0\"\nedition = \"2021\"\n", "lab-1.0.0/src/lib.rs", "")
	files := map[string][]byte{
		"/simple/lab/":                       []byte(`<a href="` + wheel + `">` + wheel + `</a>`),
		"/simple/lab/" + wheel:               zipped(t, "lab.py", "", "lab-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n", "lab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n", "lab-1.0.dist-info/RECORD", ""),
		"/npm/lab/" + tarball:                tarred(t, "package/package.json", `{"name": "lab", "version": "1.0.0"}`),
		"/go/example.org/lab/@v/v1.0.0.info": []byte(`{"Version": "v1.0.0"}`),
		"/go/example.org/lab/@v/v1.0.0.mod":  []byte("module example.org/lab\n"),
		"/go/example.org/lab/@v/v1.0.0.zip":  zipped(t, module+"go.mod", "module example.org/lab\n", module+"lab.go", "package lab\n"),
		"/cargo/crates/lab/1.0.0/download":   crate,
		"/cargo/3/l/lab":                     fmt.Appendf(nil, `{"name": "lab", "vers": "1.0.0", "deps": [], "cksum": "%x", "features": {}, "yanked": false}`, sha256.Sum256(crate)),
		"/maven/org/example/lab/1/lab-1.pom": []byte(`<project><modelVersion>4.0.0</modelVersion><groupId>org.example</groupId><artifactId>lab</artifactId><version>1</version><packaging>pom</packaging></project>`),
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if file, ok := files[r.URL.Path]; ok {
			if strings.HasSuffix(r.URL.Path, "/") {
				w.Header().Set("Content-Type", "text/html")
			}
			_, _ = w.Write(file)
			return
		}
		if r.URL.Path == "/cargo/config.json" {
			fmt.Fprintf(w, `{"dl": "http://%s/cargo/crates"}`, r.Host)
			return
		}
		if r.URL.Path != "/npm/lab" {
			http.NotFound(w, r)
			return
		}
		sum := sha512.Sum512(files["/npm/lab/"+tarball])
		w.Header().Set("Content-Type", "application/json")
		dist := map[string]string{"tarball": "http://" + r.Host + "/npm/lab/" + tarball, "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}
		_ = stdjson.NewEncoder(w).Encode(map[string]any{"name": "lab", "dist-tags": map[string]string{"latest": "1.0.0"},
			"versions": map[string]any{"1.0.0": map[string]any{"name": "lab", "version": "1.0.0", "dist": dist}}})
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// zipped returns an archive of files, given as names and texts.
func zipped(t *testing.T, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for i := 0; i+1 < len(files); i += 2 {
		f, err := z.Create(files[i])
		check.Must(t, err)
		_, err = io.WriteString(f, files[i+1])
		check.Must(t, err)
	}
	check.Must(t, z.Close())
	return b.Bytes()
}

// tarred returns a compressed archive of files, given as names and texts.
func tarred(t *testing.T, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for i := 0; i+1 < len(files); i += 2 {
		check.Must(t, w.WriteHeader(&tar.Header{Name: files[i], Mode: 0o644, Size: int64(len(files[i+1]))}))
		_, err := io.WriteString(w, files[i+1])
		check.Must(t, err)
	}
	check.Must(t, w.Close())
	check.Must(t, z.Close())
	return b.Bytes()
}
