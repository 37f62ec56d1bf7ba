package network

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// serveWorld is the lab's internet, until its stdin ends.
func serveWorld() int {
	stdin := bufio.NewReader(os.Stdin)
	if _, err := stdin.ReadString('\n'); err != nil { // the veth exists
		return failed(err)
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"}, {"addr", "add", worldAddr + "/24", "dev", "lab1"}, {"addr", "add", otherAddr + "/24", "dev", "lab1"},
		{"addr", "add", privateAddr + "/24", "dev", "lab1"}, {"link", "set", "lab1", "up"},
	} {
		ip, err := exec.LookPath("ip")
		if err != nil {
			ip = "/usr/sbin/ip"
		}
		if out, err := exec.Command(ip, args...).CombinedOutput(); err != nil {
			return failed(fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out))
		}
	}
	certificate, err := makeCA(shared("ca.pem"))
	if err == nil {
		err = makeRepository(shared("repository.git"))
	}
	if err != nil {
		return failed(err)
	}
	quiet := log.New(io.Discard, "", 0) // the tests break connections off
	web := http.Server{Handler: http.HandlerFunc(serveWeb), ReadHeaderTimeout: harness.Bound, ErrorLog: quiet}
	secure := http.Server{Handler: http.HandlerFunc(serveWeb), ReadHeaderTimeout: harness.Bound, ErrorLog: quiet, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}}
	for port, serve := range map[string]func(net.Listener){
		"80":   func(l net.Listener) { _ = web.Serve(l) },
		"443":  func(l net.Listener) { _ = secure.ServeTLS(l, "", "") },
		"2525": func(l net.Listener) { serveLines(l, "220 it speaks first\n") },
		"7":    func(l net.Listener) { serveLines(l, "") },
	} {
		l, err := net.Listen("tcp", "0.0.0.0:"+port)
		if err != nil {
			return failed(err)
		}
		go serve(l)
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, stdin)
	return 0
}

// serveLines sends a first line, and then echoes lines.
func serveLines(l net.Listener, first string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_, _ = io.WriteString(c, first)
			_, _ = io.Copy(c, c)
		}()
	}
}

// makeCA writes a certificate authority's certificate, and returns a certificate for all servers.
func makeCA(name string) (c tls.Certificate, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return c, err
	}
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "lab"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	root, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		return c, err
	}
	leaf := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "servers"}, NotBefore: ca.NotBefore, NotAfter: ca.NotAfter,
		DNSNames: []string{"*.example.org", "example.org"}, IPAddresses: []net.IP{net.ParseIP(worldAddr), net.ParseIP(privateAddr)}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	server, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, key)
	if err != nil {
		return c, err
	}
	err = os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root}), 0o644)
	return tls.Certificate{Certificate: [][]byte{server, root}, PrivateKey: key}, err
}

// makeRepository creates a git repository that can be served as files.
func makeRepository(dir string) error {
	work := dir + ".work"
	for _, args := range [][]string{
		{"init", "-q", work}, {"-C", work, "-c", "user.name=lab", "-c", "user.email=lab@example.org", "commit", "-q", "--allow-empty", "-m", "hello from the lab"},
		{"clone", "-q", "--bare", work, dir}, {"-C", dir, "update-server-info"},
	} {
		cmd := exec.Command("git", args...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "HOME=/nonexistent")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// serveWeb serves all web servers of the lab, by the host in the request.
func serveWeb(w http.ResponseWriter, r *http.Request) {
	host, _, _ := strings.Cut(r.Host, ":")
	switch host {
	case "index.example.org":
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<a href="https://files.example.org/lab-1.0-py3-none-any.whl">lab-1.0-py3-none-any.whl</a>`)
	case "files.example.org":
		_, _ = w.Write(wheel())
	case "registry.example.org":
		serveNPM(w, r)
	case "git.example.org":
		http.StripPrefix("/repository.git/", http.FileServer(http.Dir(shared("repository.git")))).ServeHTTP(w, r)
	case "example.org":
		http.StripPrefix("/x.git/", http.FileServer(http.Dir(shared("repository.git")))).ServeHTTP(w, r)
	case "proxy.example.org":
		serveGo(w, r)
	default:
		serveWWW(w, r)
	}
}

func serveWWW(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/redirect":
		http.Redirect(w, r, "http://other.example.org/", http.StatusFound)
	case r.URL.Path == "/big":
		n, _ := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		piece := make([]byte, 1<<20)
		for ; n > 0; n -= int64(len(piece)) {
			if _, err := w.Write(piece[:min(n, int64(len(piece)))]); err != nil {
				return
			}
		}
	default:
		name := ""
		if r.TLS != nil {
			name = r.TLS.ServerName
		}
		got, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "host %s sni %s path %s body %d\n", r.Host, name, r.URL.Path, got)
	}
}

func zipped(files map[string]string) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, text := range files {
		f, err := z.Create(name)
		if err == nil {
			_, err = io.WriteString(f, text)
		}
		if err != nil {
			panic(err) // writes to memory
		}
	}
	z.Close()
	return b.Bytes()
}

// wheel returns a package for pip.
func wheel() []byte {
	return zipped(map[string]string{
		"lab.py":                     "print('lab')\n",
		"lab-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n",
		"lab-1.0.dist-info/WHEEL":    "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"lab-1.0.dist-info/RECORD":   "lab.py,,\nlab-1.0.dist-info/METADATA,,\nlab-1.0.dist-info/WHEEL,,\nlab-1.0.dist-info/RECORD,,\n",
	})
}

// serveNPM is a registry with one package.
func serveNPM(w http.ResponseWriter, r *http.Request) {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	t := tar.NewWriter(z)
	const text = `{"name":"lab","version":"1.0.0"}`
	_ = t.WriteHeader(&tar.Header{Name: "package/package.json", Mode: 0o644, Size: int64(len(text))}) // writes to memory
	_, _ = io.WriteString(t, text)
	t.Close()
	z.Close()
	if strings.HasSuffix(r.URL.Path, ".tgz") {
		_, _ = w.Write(b.Bytes())
		return
	}
	if r.URL.Path != "/lab" {
		http.NotFound(w, r)
		return
	}
	sum := sha512.Sum512(b.Bytes())
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"name": "lab", "dist-tags": map[string]string{"latest": "1.0.0"}, "versions": map[string]any{
		"1.0.0": map[string]any{"name": "lab", "version": "1.0.0", "dist": map[string]string{
			"tarball": "https://registry.example.org/lab/-/lab-1.0.0.tgz", "integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:])}}}})
}

// serveGo is a module proxy with one module.
func serveGo(w http.ResponseWriter, r *http.Request) {
	switch {
	case strings.HasSuffix(r.URL.Path, "/v1.0.0.info"):
		fmt.Fprint(w, `{"Version":"v1.0.0","Time":"2024-01-01T00:00:00Z"}`)
	case strings.HasSuffix(r.URL.Path, "/v1.0.0.mod"):
		fmt.Fprint(w, "module example.org/lab\n")
	case strings.HasSuffix(r.URL.Path, "/v1.0.0.zip"):
		_, _ = w.Write(zipped(map[string]string{"example.org/lab@v1.0.0/go.mod": "module example.org/lab\n", "example.org/lab@v1.0.0/lab.go": "package lab\n"}))
	default:
		http.NotFound(w, r)
	}
}
