package tests

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/harness"
)

// programs are shell commands whose output and exit code must not depend on the sandbox. Some are not
// installed everywhere.
var programs = []string{
	"dpkg -s bash", "dpkg -l bash dpkg coreutils", "dpkg -S /bin/sh", "dpkg --print-architecture", "dpkg-query -L base-files", "dpkg-query -W", "dpkg -s no-such-package",
	"update-alternatives --query awk", "awk 'BEGIN { print 6 * 7 }'", "perl -V:version", "perl -MConfig -e 'print $Config{archname}'", "perl -MSocket -e 'print inet_ntoa(inet_aton(\"127.0.0.1\"))'",
	"locale -a", "locale", "date -d @0", "TZ=Europe/Berlin date -d @0", "cat /etc/os-release", "cat /etc/debian_version", "ls /etc/alternatives", "infocmp -1 xterm", "tput -T vt100 cols",
	"lscpu", "nproc --all", "nproc", "getconf _NPROCESSORS_CONF", "getent services https", "getent protocols tcp", "id -u root", "bash -c 'echo ${BASH_VERSION}'", "bash -ic 'shopt login_shell' 2>/dev/null",
	"ldd /bin/sh | sed 's/ (.*//'", "sha256sum /bin/sh", "find /usr/share/doc/bash | sort", "od -A n -N 4 /bin/sh", "diff /etc/debian_version /etc/os-release", "openssl version -d", "openssl x509 -noout -subject -in \"$(ls /etc/ssl/certs/*.pem | head -1)\"",
	"wc -c /etc/ssl/certs/ca-certificates.crt", "man -w ls", "man -P cat ls", "python3 -c 'import ssl; print(ssl.get_default_verify_paths())'", "python3 -c 'import platform; print(platform.freedesktop_os_release())'",
	"python3 -c 'import mimetypes; print(mimetypes.guess_type(\"x.svg\"))'", "python3 -c 'import os; print(os.cpu_count(), os.nice(0))'", "git config --system --list", "git version",
	"file /bin/sh", "fc-match", "fc-match monospace", "fc-list | sort | head -20", "gcc -print-search-dirs", "java -version 2>&1", "node -p 'process.version'", "node -p 'require(\"os\").cpus().length'", "sqlite3 -version", "cmake --version",
	"ruby -e 'puts RUBY_VERSION'", "php -m", "Rscript -e 'cat(class(lm(1:3 ~ c(1, 2, 4))))'", "convert -list policy", "gs --version",
}

// Programs of the distribution print the same in a sandbox as on the host, and exit with the same code.
func TestPrograms(t *testing.T) {
	t.Parallel()
	dir := harness.Dir(t)
	env := []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8", "TERM=dumb", "COLUMNS=80"}
	script := filepath.Join(dir, "run.sh")
	// sh -c, so that error messages do not contain the path of a script.
	harness.Must(t, os.WriteFile(script, []byte(`n=0
while IFS= read -r line; do
	n=$((n + 1))
	sh -c "$line" >"$1/$n" 2>&1 </dev/null
	echo "exit code $?" >>"$1/$n"
done <"$2"
`), 0o644))
	harness.Must(t, os.WriteFile(filepath.Join(dir, "list"), []byte(strings.Join(programs, "\n")+"\n"), 0o644))
	out := filepath.Join(dir, "host")
	harness.Must(t, os.Mkdir(out, 0o755))
	cmd := exec.Command("sh", script, out, filepath.Join(dir, "list"))
	cmd.Env, cmd.Dir = append(env, "HOME="+dir), dir
	runHere(t, cmd)
	args := []string{"--tmpfs", "/out", "--workdir", dir, "--ro-bind", dir, "--get", "/out/*:" + filepath.Join(dir, "sandbox")}
	for _, v := range env {
		args = append(args, "--env", v)
	}
	r := harness.Run(t, harness.Options{Dir: dir}, append(args, "sh", script, "/out", filepath.Join(dir, "list"))...)
	r.Expect(t, 0, "exited")
	compared := 0
	for i, line := range programs {
		name := strconv.Itoa(i + 1)
		host, err1 := os.ReadFile(filepath.Join(out, name))
		inside, err2 := os.ReadFile(filepath.Join(dir, "sandbox", name))
		harness.Must(t, errors.Join(err1, err2))
		if bytes.Contains(host, []byte("exit code 127")) {
			t.Logf("%s: not installed", line)
		} else {
			compared++
		}
		if !bytes.Equal(host, inside) {
			t.Errorf("%s:\nhost:\n%.2000s\nsandbox:\n%.2000s", line, host, inside)
		}
	}
	if compared < 30 {
		t.Errorf("only %d programs are installed", compared)
	}
}

// runHere runs a command outside of a sandbox.
func runHere(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	done, err := harness.StartCommand(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	done()
	harness.Must(t, err)
}

// authority is a certificate authority of a test, and a certificate of it for 127.0.0.1.
func authority(t *testing.T) (ca []byte, server tls.Certificate) {
	t.Helper()
	sign := func(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) []byte {
		template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
		harness.Must(t, err)
		return der
	}
	root := &x509.Certificate{Subject: pkix.Name{CommonName: "sbxrun test"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	rootKey, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	key, err2 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	harness.Must(t, errors.Join(err1, err2))
	der := sign(root, root, rootKey, rootKey)
	leaf := &x509.Certificate{Subject: pkix.Name{CommonName: "127.0.0.1"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tls.Certificate{Certificate: [][]byte{sign(leaf, root, key, rootKey)}, PrivateKey: key}
}

// A sandbox with a list of allowed hosts trusts the host's certificate authorities. The test adds one to a copy of the
// host's store, in a mount namespace that sbxrun runs in, and not to the sandbox.
func TestCertificates(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		harness.Skip(t, "only root can change the trust store")
	}
	ca, certificate := authority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "trusted\n") }))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	server.StartTLS()
	defer server.Close()
	address := server.Listener.Addr().String()
	dir := harness.SharedDir(t)
	harness.Must(t, os.WriteFile(filepath.Join(dir, "ca.pem"), ca, 0o644))
	const store = `cp -a /etc/ssl/certs "$DIR/certs"
cat "$DIR/ca.pem" >>"$DIR/certs/ca-certificates.crt"
cp "$DIR/ca.pem" "$DIR/certs/$(openssl x509 -noout -hash -in "$DIR/ca.pem").0"`
	cmd := exec.Command("sh", "-e", "-c", store)
	cmd.Env = append(os.Environ(), "DIR="+dir)
	cmd.Stderr = os.Stderr
	runHere(t, cmd)
	const script = `mount --bind "$DIR/certs" /etc/ssl/certs && exec "$@"`
	o := harness.Options{Env: []string{"DIR=" + dir}, Wrap: []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"}}
	r := harness.Run(t, o, "--net", "allow="+address, "--env", "URL=https://"+address+"/", "sh", "-c", `
curl -sS "$URL" || echo "curl failed"
wget -q -O - "$URL" || echo "wget failed"
python3 -c 'import os, urllib.request; print(urllib.request.urlopen(os.environ["URL"]).read().decode(), end="")' || echo "python3 failed"
git ls-remote "$URL/x" 2>&1 | grep -i certificate && echo "git failed"
ls /etc/ssl/openssl.cnf`)
	r.Expect(t, 0, "exited")
	if want := "trusted\ntrusted\ntrusted\n/etc/ssl/openssl.cnf\n"; string(r.Stdout) != want {
		t.Errorf("got %s%s", r.Stdout, r.Stderr)
	}
}

// Private files of /etc and /var/lib are hidden, whatever their modes are.
func TestPrivateConfiguration(t *testing.T) {
	t.Parallel()
	r := harness.Run(t, harness.Options{}, "sh", "-c", `for name in shadow gshadow sudoers ssh/sshd_config ssl/private apt default environment fstab machine-id hostname npmrc pip.conf wgetrc cron.d systemd; do
	if [ -e "/etc/$name" ]; then echo "/etc/$name"; fi
done
ls -A / | grep '^[.]'
touch /etc/x /etc/dpkg/x /var/lib/x /var/lib/dpkg/x /sys/devices/system/x 2>/dev/null && echo writable
ls /var/lib/private /var/lib/systemd /var/lib/docker 2>/dev/null
exit 0`)
	r.Expect(t, 0, "exited")
	if len(r.Stdout) > 0 {
		t.Errorf("visible: %s", r.Stdout)
	}
}
