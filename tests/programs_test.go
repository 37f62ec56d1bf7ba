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

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// programs are shell commands whose output and exit code must not depend on the sandbox. Some are not
// installed everywhere.
var programs = []string{
	"dpkg -s bash", "dpkg -l bash dpkg coreutils", "dpkg -S /bin/sh", "dpkg --print-architecture", "dpkg-query -L base-files", "dpkg-query -W", "dpkg -s no-such-package",
	"update-alternatives --query awk", "awk 'BEGIN { print 6 * 7 }'", "perl -V:version", "perl -MConfig -e 'print $Config{archname}'", "perl -MSocket -e 'print inet_ntoa(inet_aton(\"127.0.0.1\"))'",
	"locale -a", "locale", "date -d @0", "TZ=Europe/Berlin date -d @0", "cat /etc/os-release", "cat /etc/debian_version", "ls /etc/alternatives", "infocmp -1 xterm", "tput -T vt100 cols",
	"lscpu | grep -v 'MHz\\|BIOS'", "nproc --all", "nproc", "getconf _NPROCESSORS_CONF", "getent services https", "getent protocols tcp", "getent rpc", "whatis tar", "id -u root", "bash -c 'echo ${BASH_VERSION}'", "bash -ic 'shopt login_shell' 2>/dev/null",
	"ldd /bin/sh | sed 's/ (.*//'", "sha256sum /bin/sh", "find /usr/share/doc/bash | sort", "od -A n -N 4 /bin/sh", "diff /etc/debian_version /etc/os-release", "openssl version -d", "openssl x509 -noout -subject -in \"$(ls /etc/ssl/certs/*.pem | head -1)\"",
	"wc -c /etc/ssl/certs/ca-certificates.crt", "man -w ls", "man -P cat ls", "python3 -c 'import ssl; print(ssl.get_default_verify_paths())'", "python3 -c 'import platform; print(platform.freedesktop_os_release())'",
	"python3 -c 'import mimetypes; print(mimetypes.guess_type(\"x.svg\"))'", "python3 -c 'import os; print(os.cpu_count(), os.nice(0))'", "git config --system --list", "git version",
	"file /bin/sh", "fc-match", "fc-match monospace", "fc-list | sort | head -20", "gcc -print-search-dirs", "java -version 2>&1", "node -p 'process.version'", "node -p 'require(\"os\").cpus().length'", "sqlite3 -version", "cmake --version",
	"ruby -e 'puts RUBY_VERSION'", "php -m", "Rscript -e 'cat(class(lm(1:3 ~ c(1, 2, 4))))'", "convert -list policy", "gs --version",
}

// Programs of the distribution print the same in a sandbox as on the host, and exit with the same code.
func TestPrograms(t *testing.T) {
	t.Parallel()
	n := comparePrograms(t, programs)
	check.That(t, n >= 30, "only %d programs are installed", n)
}

// comparePrograms runs shell commands on the host and in a sandbox with these flags, and returns how many programs are
// installed.
func comparePrograms(t *testing.T, lines []string, flags ...string) (installed int) {
	t.Helper()
	dir := harness.Dir(t)
	env := []string{"PATH=/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8", "TERM=dumb", "COLUMNS=80"}
	script := filepath.Join(dir, "run.sh")
	// sh -c, so that error messages do not contain the path of a script.
	check.Must(t, os.WriteFile(script, []byte(`n=0
while IFS= read -r line; do
	n=$((n + 1))
	sh -c "$line" >"$1/$n" 2>&1 </dev/null
	echo "exit code $?" >>"$1/$n"
done <"$2"
`), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(dir, "list"), []byte(strings.Join(lines, "\n")+"\n"), 0o644))
	out := filepath.Join(dir, "host")
	check.Must(t, os.Mkdir(out, 0o755))
	cmd := contained("sh", script, out, filepath.Join(dir, "list"))
	cmd.Env, cmd.Dir = append(env, "HOME="+dir), dir
	runHere(t, cmd)
	args := append([]string{"--tmpfs", "/out", "--workdir", dir, "--ro-bind", dir, "--get", "/out/*:" + filepath.Join(dir, "sandbox")}, flags...)
	for _, v := range env {
		args = append(args, "--env", v)
	}
	harness.Run(t, harness.Options{Dir: dir, Bound: 5 * time.Minute}, append(args, "sh", script, "/out", filepath.Join(dir, "list"))...).Expect(t, 0, "exited")
	for i, line := range lines {
		name := strconv.Itoa(i + 1)
		host, err1 := os.ReadFile(filepath.Join(out, name))
		inside, err2 := os.ReadFile(filepath.Join(dir, "sandbox", name))
		check.Must(t, errors.Join(err1, err2))
		if bytes.Contains(host, []byte("exit code 127")) {
			t.Logf("%s: not installed", line)
		} else {
			installed++
		}
		check.That(t, bytes.Equal(host, inside), "%s:\nhost:\n%.2000s\nsandbox:\n%.2000s", line, host, inside)
	}
	return installed
}

// runHere runs a command outside of a sandbox.
func runHere(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	done, err := harness.StartCommand(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	done()
	check.Must(t, err)
}

// hostName is the host's name in a sandbox with a list of allowed hosts.
const hostName = "host.sbxrun.internal"

// authority creates a certificate authority, and a certificate signed by it for hostName.
func authority(t *testing.T) (ca []byte, server tls.Certificate) {
	t.Helper()
	sign := func(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) []byte {
		template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
		check.Must(t, err)
		return der
	}
	root := &x509.Certificate{Subject: pkix.Name{CommonName: "sbxrun test"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	rootKey, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	key, err2 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.Must(t, errors.Join(err1, err2))
	der := sign(root, root, rootKey, rootKey)
	leaf := &x509.Certificate{Subject: pkix.Name{CommonName: hostName}, DNSNames: []string{hostName}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), tls.Certificate{Certificate: [][]byte{sign(leaf, root, key, rootKey)}, PrivateKey: key}
}

// A sandbox with a list of allowed hosts trusts the host's certificate authorities. The test adds one to a copy of the
// host's store, in a mount namespace that sbxrun runs in, and not to the sandbox.
func TestCertificates(t *testing.T) {
	t.Parallel()
	ca, certificate := authority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "trusted\n") }))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	server.StartTLS()
	defer server.Close()
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	check.Must(t, err)
	address := net.JoinHostPort(hostName, port)
	dir := harness.SharedDir(t)
	check.Must(t, os.WriteFile(filepath.Join(dir, "ca.pem"), ca, 0o644))
	const store = `cp -a /etc/ssl/certs "$DIR/certs"
cat "$DIR/ca.pem" >>"$DIR/certs/ca-certificates.crt"
cp "$DIR/ca.pem" "$DIR/certs/$(openssl x509 -noout -hash -in "$DIR/ca.pem").0"`
	cmd := exec.Command("sh", "-e", "-c", store)
	cmd.Env = append(os.Environ(), "DIR="+dir)
	cmd.Stderr = os.Stderr
	runHere(t, cmd)
	const script = `mount --bind "$DIR/certs" /etc/ssl/certs && exec `
	wrap := []string{"unshare", "--mount", "--propagation", "private", "sh", "-c", script + `"$@"`, "sh"}
	if !harness.Root() { // the mount needs a user namespace, whose capabilities sbxrun must not have
		wrap = []string{"unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "--propagation", "private",
			"sh", "-c", script + `setpriv --ambient-caps=-all --inh-caps=-all "$@"`, "sh"}
	}
	o := harness.Options{Env: []string{"DIR=" + dir}, Wrap: wrap}
	r := harness.Run(t, o, "--net", "allow="+address, "--env", "URL=https://"+address+"/", "sh", "-c", `
curl -sS "$URL" || echo "curl failed"
wget -q -O - "$URL" || echo "wget failed"
python3 -c 'import os, urllib.request; print(urllib.request.urlopen(os.environ["URL"]).read().decode(), end="")' || echo "python3 failed"
git ls-remote "$URL/x" 2>&1 | grep -i certificate && echo "git failed"
ls /etc/ssl/openssl.cnf`)
	r.Expect(t, 0, "exited")
	want := "trusted\ntrusted\ntrusted\n/etc/ssl/openssl.cnf\n"
	check.That(t, string(r.Stdout) == want, "got %s%s", r.Stdout, r.Stderr)
}

// Output that Python has printed before the deadline is in the report of a run and of an exec.
func TestPrintedBeforeTheDeadline(t *testing.T) {
	t.Parallel()
	const script = "import time; print('step 1'); time.sleep(600)"
	harness.Longer(t, time.Second, func(timeout time.Duration) bool {
		r := harness.Run(t, harness.Options{Bare: true}, "--quiet", "--json", "--timeout", timeout.String(), "python3", "-c", script).Exits(t, 124)
		got := string(r.Stdout)
		return strings.Contains(got, `"stdout":"step 1\n"`) || strings.Contains(got, `"stdout": "step 1\n"`)
	})
	r := harness.Run(t, harness.Options{Bare: true}, "--json", "--env", "PYTHONUNBUFFERED=", "sh", "-c", "echo $PYTHONUNBUFFERED")
	got := string(r.Stdout)
	check.That(t, strings.Contains(got, `"stdout":"\n"`) || strings.Contains(got, `"stdout": "\n"`), "a variable of the user's: %s", got)
	harness.Run(t, harness.Options{}, "sh", "-c", "echo $PYTHONUNBUFFERED").Expect(t, 0, "exited").Out(t, "\n")
}

// The environment of a command has a UTF-8 locale, the variables for a terminal and, on request, all of the caller's
// variables.
func TestProgramEnvironment(t *testing.T) {
	t.Parallel()
	run := func(o harness.Options, args ...string) string {
		t.Helper()
		r := harness.Run(t, o, args...).Expect(t, 0, "exited")
		return strings.TrimSpace(string(r.Stdout))
	}
	unset := []string{"env", "-u", "LANG", "-u", "LC_ALL", "-u", "LC_CTYPE"}
	check.Equal(t, run(harness.Options{Wrap: unset}, "sh", "-c", "echo $LANG; locale charmap"), "C.UTF-8\nUTF-8", "without LANG")
	check.Equal(t, run(harness.Options{Wrap: append(unset, "LC_ALL=C")}, "sh", "-c", "echo $LANG$LC_ALL"), "C", "with LC_ALL")
	check.Equal(t, run(harness.Options{Env: []string{"COLORTERM=truecolor", "NO_COLOR=1"}}, "sh", "-c", "echo $COLORTERM $NO_COLOR"), "truecolor 1", "colours")
	wrap := []string{"bash", "-c", `f() { echo of the caller; }; export -f f; exec env a.b=dotted "$@"`, "bash"}
	check.Equal(t, run(harness.Options{Wrap: wrap}, "--inherit-env", "bash", "-c", "f; printenv a.b"), "of the caller\ndotted", "--inherit-env")

	dir := harness.SharedDir(t)
	source := filepath.Join(dir, "source")
	check.Must(t, os.WriteFile(source, []byte("sbxrun-test|a terminal,\n\tcols#77, clear=\\E[H,\n"), 0o644))
	runHere(t, exec.Command("tic", "-x", "-o", filepath.Join(dir, "terminfo"), source))
	terminal := harness.Options{Dir: dir, Env: []string{"TERM=sbxrun-test", "TERMINFO=" + filepath.Join(dir, "terminfo")}}
	check.Equal(t, run(terminal, "tput", "cols"), "77", "a terminal whose description is shown")
	check.Equal(t, run(terminal, "--cwd", "none", "tput", "cols"), "77", "a terminal whose description is hidden")
}

// --tools passes on the directories of LD_LIBRARY_PATH that the sandbox shows.
func TestToolsLibraryPath(t *testing.T) {
	t.Parallel()
	dir := harness.SharedDir(t)
	check.Must(t, os.Mkdir(filepath.Join(dir, "lib"), 0o755))
	o := harness.Options{Dir: dir, Env: []string{"LD_LIBRARY_PATH=" + dir + "/lib:/nonexistent:/root"}}
	r := harness.Run(t, o, "--tools", "sh", "-c", "echo $LD_LIBRARY_PATH").Expect(t, 0, "exited")
	check.Equal(t, strings.TrimSpace(string(r.Stdout)), dir+"/lib")
}
