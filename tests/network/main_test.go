// Package network tests --net with lists, against its own servers in its own namespaces:
//
//	setup     a network namespace instead of the host's, and an /etc/hosts; for an ordinary user,
//	│         root in its own user namespace
//	├─ world  another network namespace with the servers, behind a veth pair
//	└─ inside the tests; for an ordinary user, again an ordinary one in one more user namespace
//
// All three are this test binary.
package network

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

const (
	roleName = "SBXRUN_NETWORK_LAB" // role of the process
	dirName  = "SBXRUN_NETWORK_DIR" // directory that they share
	uidName  = "SBXRUN_NETWORK_UID" // UID of the ordinary user
)

// Addresses of the lab. They belong to the public internet, which is not reachable from here.
const (
	hostAddr    = "93.184.0.1"
	worldAddr   = "93.184.0.2"
	otherAddr   = "93.184.0.3"
	privateAddr = "10.99.0.2"
)

// hosts is /etc/hosts in the lab.
const hosts = `127.0.0.1 localhost local.example.org
::1 localhost
93.184.0.1 own.example.org
93.184.0.2 example.org www.example.org index.example.org files.example.org registry.example.org git.example.org proxy.example.org
93.184.0.3 other.example.org
10.99.0.2 private.example.org
`

func TestMain(m *testing.M) {
	switch os.Getenv(roleName) {
	case "setup":
		os.Exit(setUp())
	case "world":
		os.Exit(serveWorld())
	case "inside":
		harness.Main(m)
	}
	os.Exit(enterLab())
}

// self returns a command that runs this test binary in a role.
func self(role string, flags uintptr, env ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(append(os.Environ(), roleName+"="+role), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags, Pdeathsig: unix.SIGKILL}
	return cmd
}

// enterLab runs the tests in the lab, and returns the exit code.
func enterLab() int {
	dir, err := os.MkdirTemp("", "sbxrun-network-")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return failed(err)
	}
	flags := uintptr(unix.CLONE_NEWNET | unix.CLONE_NEWNS)
	if !harness.Root() {
		flags |= unix.CLONE_NEWUSER
	}
	cmd := self("setup", flags, dirName+"="+dir, uidName+"="+strconv.Itoa(os.Geteuid()))
	if !harness.Root() {
		mapIDs(cmd, 0, 0, os.Geteuid(), os.Getegid())
	}
	return exitCode(cmd.Run())
}

// mapIDs maps one user and one group.
func mapIDs(cmd *exec.Cmd, uid, gid, outerUID, outerGID int) {
	cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: outerUID, Size: 1}}
	cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: outerGID, Size: 1}}
}

// setUp creates the lab, and runs the tests in it.
func setUp() int {
	dir := os.Getenv(dirName)
	ip, err := exec.LookPath("ip")
	if err != nil {
		ip = "/usr/sbin/ip"
	}
	name := filepath.Join(dir, "hosts")
	if err = os.WriteFile(name, []byte(hosts), 0o644); err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount(name, "/etc/hosts", "", unix.MS_BIND, "")
	}
	if err != nil {
		return failed(err)
	}
	world := self("world", unix.CLONE_NEWNET)
	world.Stdin, world.Stdout = nil, nil
	stdin, err := world.StdinPipe() // when it closes, the world exits
	if err != nil {
		return failed(err)
	}
	said, err := world.StdoutPipe()
	if err == nil {
		err = world.Start()
	}
	if err != nil {
		return failed(err)
	}
	defer func() { stdin.Close(); _ = world.Wait() }()
	pid := strconv.Itoa(world.Process.Pid)
	script := [][]string{
		{"link", "set", "lo", "up"},
		{"link", "add", "lab0", "type", "veth", "peer", "name", "lab1", "netns", pid},
		{"addr", "add", hostAddr + "/24", "dev", "lab0"},
		{"addr", "add", "10.99.0.1/24", "dev", "lab0"},
		{"link", "set", "lab0", "up"},
	}
	for _, args := range script {
		if out, err := exec.Command(ip, args...).CombinedOutput(); err != nil {
			return failed(fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out))
		}
	}
	if _, err := io.WriteString(stdin, "go\n"); err != nil {
		return failed(err)
	}
	if line, err := bufio.NewReader(said).ReadString('\n'); err != nil || line != "ready\n" {
		return failed(fmt.Errorf("the world said %q: %w", line, err))
	}
	inside := self("inside", 0)
	uid, err := strconv.Atoi(os.Getenv(uidName))
	if err != nil {
		return failed(err)
	}
	if uid != 0 {
		inside.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER
		mapIDs(inside, uid, uid, 0, 0)
	}
	return exitCode(inside.Run())
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, "network lab:", err)
	return 1
}

func exitCode(err error) int {
	var exit *exec.ExitError
	if err == nil {
		return 0
	}
	if errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode()
	}
	return failed(err)
}

// shared returns the path of a file of the lab.
func shared(name string) string { return filepath.Join(os.Getenv(dirName), name) }

// Each package manager works when only its hosts are listed. Otherwise it fails, and one line names the refused host.
func TestPackageManagers(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ tool, hosts, refused, script, want string }{
		{"python3", "index.example.org,files.example.org", "index.example.org:443",
			`/usr/bin/python3 -m pip install -q --no-cache-dir --disable-pip-version-check --retries 0 --cert $CA --index-url https://index.example.org/simple --target . lab && /usr/bin/python3 lab.py`, "lab\n"},
		{"npm", "registry.example.org", "registry.example.org:443",
			`npm install --no-audit --no-fund --fetch-retries 0 --cafile $CA --registry https://registry.example.org lab >&2 && cat node_modules/lab/package.json`, `{"name":"lab","version":"1.0.0"}`},
		{"git", "git.example.org", "git.example.org:443",
			`GIT_SSL_CAINFO=$CA git clone -q https://git.example.org/repository.git c && git -C c log --format=%s`, "hello from the lab\n"},
		{"go", "proxy.example.org", "proxy.example.org:443",
			`export SSL_CERT_FILE=$CA GOPROXY=https://proxy.example.org GOSUMDB=off GOFLAGS=-modcacherw GOMODCACHE=$PWD/m GOCACHE=$PWD/b GOPATH=$PWD/p GOTOOLCHAIN=local
			echo 'module x' >go.mod; go mod download example.org/lab@v1.0.0 && cat m/example.org/lab@v1.0.0/lab.go`, "package lab\n"},
	} {
		t.Run(tt.tool, func(t *testing.T) {
			t.Parallel()
			program, err := exec.LookPath(tt.tool)
			if err != nil {
				harness.Skip(t, tt.tool+" is missing")
			}
			ca := shared("ca.pem")
			args := []string{"--cwd", "none", "--tmpfs", "/work", "--workdir", "/work", "--ro-bind", ca, "--env", "CA=" + ca, "--timeout", harness.Deadline(time.Minute).String()}
			if tt.tool == "go" { // the one that runs the tests, wherever it is
				program, err = filepath.EvalSymlinks(program)
				check.Must(t, err)
				dir := filepath.Dir(filepath.Dir(program))
				args = append(args, "--ro-bind-try", dir, "--env", "PATH="+filepath.Join(dir, "bin")+":/usr/bin:/bin")
			}
			r := harness.Run(t, harness.Options{}, append(args, "--net", "allow="+tt.hosts, "sh", "-c", tt.script)...)
			r.Expect(t, 0, "exited")
			check.That(t, strings.HasPrefix(string(r.Stdout), strings.TrimSuffix(tt.want, "\n")), "%q\n%s", r.Stdout, r.Stderr)
			r, text := harness.Said(t, func(o harness.Options) *harness.Process {
				return harness.Start(t, o, append(args, "--env", harness.MarkerName, "--net", "allow=www.example.org", "sh", "-c", tt.script)...)
			})
			want := "hint: the list of --net does not have " + tt.refused + "; --net allow=" + tt.refused + " has"
			lines := harness.Ours(text)
			check.That(t, r.ExitCode != 0 && len(lines) == 1 && lines[0] == want, "without its hosts: exit code %d, %q, want %q\n%s", r.ExitCode, lines, want, text)
		})
	}
}
