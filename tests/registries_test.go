package tests

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	stdjson "encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// registries serves one package each to pip (/simple/), npm (/npm/) and Go (/go/) on loopback. It returns the address.
func registries(t *testing.T) string {
	t.Helper()
	const (
		module  = "example.org/lab@v1.0.0/"
		wheel   = "lab-1.0-py3-none-any.whl"
		tarball = "lab-1.0.0.tgz"
	)
	files := map[string][]byte{
		"/simple/lab/":                       []byte(`<a href="` + wheel + `">` + wheel + `</a>`),
		"/simple/lab/" + wheel:               zipped(t, "lab.py", "", "lab-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n", "lab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n", "lab-1.0.dist-info/RECORD", ""),
		"/npm/lab/" + tarball:                npmPackage(t),
		"/go/example.org/lab/@v/v1.0.0.info": []byte(`{"Version": "v1.0.0"}`),
		"/go/example.org/lab/@v/v1.0.0.mod":  []byte("module example.org/lab\n"),
		"/go/example.org/lab/@v/v1.0.0.zip":  zipped(t, module+"go.mod", "module example.org/lab\n", module+"lab.go", "package lab\n"),
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if file, ok := files[r.URL.Path]; ok {
			if strings.HasSuffix(r.URL.Path, "/") {
				w.Header().Set("Content-Type", "text/html")
			}
			_, _ = w.Write(file)
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
		harness.Must(t, err)
		_, err = io.WriteString(f, files[i+1])
		harness.Must(t, err)
	}
	harness.Must(t, z.Close())
	return b.Bytes()
}

func npmPackage(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	const text = `{"name": "lab", "version": "1.0.0"}`
	harness.Must(t, w.WriteHeader(&tar.Header{Name: "package/package.json", Mode: 0o644, Size: int64(len(text))}))
	_, err := fmt.Fprint(w, text)
	harness.Must(t, err)
	harness.Must(t, w.Close())
	harness.Must(t, z.Close())
	return b.Bytes()
}
