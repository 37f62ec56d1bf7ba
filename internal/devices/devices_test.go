package devices

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/devices/cdiyaml"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// specDirs creates two directories of specifications with these files, for this test's reads.
func specDirs(t *testing.T, files map[string]string) string {
	t.Helper()
	top := harness.Dir(t)
	for _, dir := range []string{"/low", "/high"} {
		check.Must(t, os.Mkdir(top+dir, 0o755))
	}
	for name, text := range files {
		check.Must(t, os.WriteFile(top+"/"+name, []byte(strings.ReplaceAll(text, "TOP", top)), 0o644))
	}
	t.Setenv(Variable, top+"/low:"+top+"/high")
	return top
}

func TestCheck(t *testing.T) {
	for name, ok := range map[string]bool{
		"nvidia.com/gpu=all": true, "vendor/class=name": true, "a.b-c/d_e=0:1.x": true, "/dev/zero": true, "/dev/../dev/zero": true,
		"": false, "/": false, "//": false, "zero": false, "dev/zero": false, "./zero": false, "nvidia.com/gpu": false, "nvidia.com/gpu=": false, "=x": false, "/=x": true, "a/=x": false,
		"a/b=-x": false, "a/b=x y": false, "a/b=x/y": false, "-a/b=x": false, "a/b=x\n": false, "/dev/\x00": false, "gpu=0": false, "a/b/c=x": false,
	} {
		err := Check(name)
		check.That(t, (err == nil) == ok, "%q: %v", name, err)
	}
}

// A specification as nvidia-ctk writes it, in YAML and in JSON.
const nvidia = `
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      hostPath: TOP/nvidia0
      major: 195
    - path: /dev/nvidiactl
      hostPath: TOP/nvidiactl
    hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, create-symlinks, --link, "../card0::/dev/dri/by-path/pci-0000:00:04.0-card"]
    additionalGids: [39]
- name: all
  containerEdits:
    env: [NVIDIA_ALL=1]
    deviceNodes:
    - path: /dev/nvidiactl
      hostPath: TOP/nvidiactl
      type: c
      permissions: rwm
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  deviceNodes:
  - path: /dev/nvidiactl
    hostPath: TOP/nvidiactl
    fileMode: 438
    uid: 0
    gid: 0
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, create-symlinks, --link, libcuda.so.1::/usr/lib/x/libcuda.so, --link=../a::/usr/lib/x/b]
    env: [NVIDIA_CTK_DEBUG=false]
  - hookName: createContainer
    path: /usr/bin/nvidia-ctk
    args: [nvidia-ctk, hook, update-ldcache, --folder, /usr/lib/x, --ldconfig-path, /sbin/ldconfig, --folder=/usr/lib/y/]
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, disable-device-node-modification]
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, enable-cuda-compat, --host-driver-version=615.71.09]
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-application-profile]
  mounts:
  - hostPath: TOP/library
    containerPath: /usr/lib/x/libcuda.so.5
    options: [ro, nosuid, nodev, rbind, rprivate]
  - hostPath: TOP/socket
    containerPath: /run/nvidia-persistenced/socket
`

func TestFind(t *testing.T) {
	top := specDirs(t, map[string]string{"low/nvidia.yaml": nvidia, "low/ignored.yml": "{"})
	socket(t, top+"/socket")
	library, soname := libc(t)
	check.Must(t, os.Symlink(library, top+"/library"))
	got, err := Find([]string{"nvidia.com/gpu=0", "nvidia.com/gpu=all", "/dev/full", "nvidia.com/gpu=0"})
	check.Must(t, err)
	want := &Set{
		Nodes: []Node{
			{Name: "nvidia.com/gpu=0", Source: top + "/nvidiactl", Dest: "/dev/nvidiactl", Common: true},
			{Name: "nvidia.com/gpu=0", Source: top + "/nvidia0", Dest: "/dev/nvidia0", Number: unix.Mkdev(195, 0)},
			{Name: "/dev/full", Source: "/dev/full", Dest: "/dev/full"},
		},
		Mounts:    []Mount{{top + "/library", "/usr/lib/x/libcuda.so.5"}},
		Links:     []Link{{"libcuda.so.1", "/usr/lib/x/libcuda.so"}, {"../a", "/usr/lib/x/b"}, {"../card0", "/dev/dri/by-path/pci-0000:00:04.0-card"}, {"libcuda.so.5", "/usr/lib/x/" + soname}},
		Libraries: []string{"/usr/lib/x", "/usr/lib/y"},
		Groups:    []uint32{39},
	}
	want.Env.Put(values.Var{Name: "NVIDIA_VISIBLE_DEVICES", Value: "void"})
	want.Env.Put(values.Var{Name: "NVIDIA_ALL", Value: "1"})
	check.NoDiff(t, cmp.Diff(want, got, cmp.Transformer("vars", func(e values.Environment) []values.Var { return e.Vars() })), "(-want +got)")
}

func socket(t *testing.T, name string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check.Must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	check.Must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: name}))
}

// libc returns the path and the SONAME of a shared library.
func libc(t *testing.T) (name, soname string) {
	t.Helper()
	sh, err := exec.LookPath("sh")
	check.Must(t, err)
	out, err := exec.Command("ldd", sh).Output()
	check.Must(t, err)
	for word := range strings.FieldsSeq(string(out)) {
		if base := filepath.Base(word); filepath.IsAbs(word) && strings.HasPrefix(base, "libc.") {
			return word, base
		}
	}
	t.Fatalf("sh has no libc: %s", out)
	return "", ""
}

const thing = `{"cdiVersion": "1.0.0", "kind": "v.com/c", "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/%s"}]}}]}`

// A specification in a later directory takes precedence, two in one directory are an error, and a broken one does not
// matter unless the device is not found.
func TestFindPrecedence(t *testing.T) {
	top := specDirs(t, map[string]string{
		"low/a.json": fmt.Sprintf(thing, "low"), "high/a.json": fmt.Sprintf(thing, "high"), "high/broken.json": "{",
		"low/c.json": strings.ReplaceAll(fmt.Sprintf(thing, "x"), "v.com/c", "v.com/twice"), "low/d.json": strings.ReplaceAll(fmt.Sprintf(thing, "x"), "v.com/c", "v.com/twice"),
	})
	got, err := Find([]string{"v.com/c=0"})
	check.Must(t, err)
	check.That(t, got.Nodes[0].Dest == "/dev/high", "found %v", got.Nodes)
	for name, want := range map[string]string{
		"v.com/twice=0": "both " + top + "/low/c.json and " + top + "/low/d.json define it",
		"v.com/c=1":     "no CDI specification defines it; " + top + "/high/broken.json: unexpected EOF",
	} {
		_, err := Find([]string{name})
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%s: %v, want %q", name, err, want)
	}
	names, err := Known()
	want := []string{"v.com/c=0", "v.com/twice=0"}
	check.That(t, slices.Equal(names, want) && err != nil, "known %q, %v", names, err)
}

// A specification that a sandbox cannot follow completely is rejected, with the reason.
func TestFindRejects(t *testing.T) {
	top := specDirs(t, map[string]string{"file": ""})
	for name, tt := range map[string]struct{ edits, want string }{
		"network device":    {`"netDevices": [{"hostInterfaceName": "eth0", "name": "eth0"}]`, "network devices are not supported"},
		"intelRdt":          {`"intelRdt": {"closID": "x"}`, "intelRdt is not supported"},
		"unknown member":    {`"seccomp": []`, `unknown field "seccomp"`},
		"unknown hook":      {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/evil", "args": ["evil", "create-symlinks"]}]`, "sbxrun executes no hooks"},
		"unknown command":   {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["x", "mknod"]}]`, "hook mknod is not supported"},
		"another time":      {`"hooks": [{"hookName": "poststop", "path": "/usr/bin/nvidia-cdi-hook", "args": ["x", "chmod"]}]`, "hook poststop"},
		"hook without args": {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["x", "hook"]}]`, "sbxrun executes no hooks"},
		"relative link":     {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["x", "hook", "create-symlinks", "--link", "a::b"]}]`, "want TARGET::LINK"},
		"link without text": {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["x", "hook", "create-symlinks", "--link"]}]`, "--link has no value"},
		"colon in a folder": {`"hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk", "args": ["x", "hook", "update-ldcache", "--folder", "/a:/b"]}]`, "not a directory for LD_LIBRARY_PATH"},
		"block device":      {`"deviceNodes": [{"path": "/dev/sda", "type": "b"}]`, "only character devices"},
		"read only":         {`"deviceNodes": [{"path": "/dev/zero", "permissions": "r"}]`, "only rw is supported"},
		"relative node":     {`"deviceNodes": [{"path": "/dev/zero", "hostPath": "zero"}]`, "not absolute"},
		"two nodes":         {`"deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/zero"}, {"path": "/dev/x", "hostPath": "/dev/full"}]`, "would be both"},
		"tmpfs":             {`"mounts": [{"hostPath": "tmpfs", "containerPath": "/x", "type": "tmpfs"}]`, "only binds"},
		"missing file":      {`"mounts": [{"hostPath": "/none", "containerPath": "/x"}]`, "no such file"},
		"two mounts":        {`"mounts": [{"hostPath": "/usr", "containerPath": "/x"}, {"hostPath": "TOP/file", "containerPath": "/x"}]`, "two mounts at /x"},
		"variable":          {`"env": ["X"]`, "want NAME=VALUE"},
		"variable's name":   {`"env": ["1X=secret"]`, `variable "1X"`},
		"root's group":      {`"additionalGids": [0]`, "group 0"},
	} {
		t.Run(name, func(t *testing.T) {
			text := `{"cdiVersion": "1.0.0", "kind": "v.com/c", "devices": [{"name": "0", "containerEdits": {` + tt.edits + `}}]}`
			check.Must(t, os.WriteFile(top+"/low/a.json", []byte(strings.ReplaceAll(text, "TOP", top)), 0o644))
			got, err := Find([]string{"v.com/c=0"})
			check.That(t, err != nil && strings.Contains(err.Error(), tt.want) && !strings.Contains(err.Error(), "secret"), "%v, %v, want %q", got, err, tt.want)
		})
	}
}

func init() { YAML = cdiyaml.ToJSON }

func TestParseRejects(t *testing.T) {
	for text, want := range map[string]string{
		"a: [":                         "did not find",
		"a: &x [*x]":                   "aliases are not supported",
		"a: b\n---\nc: d":              "text after",
		"":                             "EOF",
		"? [a]\n: b":                   "map",
		"cdiVersion: 2.0.0\nkind: a/b": `unknown cdiVersion "2.0.0"`,
		"cdiVersion: 1.0.0\nkind: a":   `invalid kind "a"`,
		"cdiVersion: 1.0.0\nother: a":  `unknown field "other"`,
		"cdiVersion: 1.0.0\nkind: a/b\ndevices: [{name: x}, {name: x}]": `device "x" is defined twice`,
		"cdiVersion: 1.0.0\nkind: a/b\ndevices: [{name: 'x y'}]":        `invalid device name "x y"`,
	} {
		_, err := parse([]byte(text), true)
		check.That(t, err != nil && strings.Contains(err.Error(), want) && !strings.Contains(err.Error(), "\n"), "%q: %v, want %q", text, err, want)
	}
	_, err := parse([]byte(`{"cdiVersion": "1.0.0", "kind": "a/b"} {}`), false)
	check.That(t, err != nil, "two documents are accepted")
}

// A specification that others could change, or that is too large, is not used.
func TestReadSpec(t *testing.T) {
	top := specDirs(t, nil)
	name := top + "/low/a.json"
	for want, plant := range map[string]func() error{
		"writable by others": func() error { return os.Chmod(name, 0o666) },
		"larger than 1 MiB":  func() error { return os.WriteFile(name, make([]byte, maxSize+1), 0o644) },
		"permission denied": func() error {
			if err := os.Remove(name); err != nil {
				return err
			}
			return unix.Mkfifo(name, 0o644)
		},
	} {
		_ = os.Remove(name) // the first time there is none
		check.Must(t, os.WriteFile(name, []byte(fmt.Sprintf(thing, "x")), 0o644))
		check.Must(t, plant())
		_, err := Find([]string{"v.com/c=0"})
		check.That(t, err != nil && strings.Contains(err.Error(), want), "%v, want %q", err, want)
	}
}

func TestRefused(t *testing.T) {
	for number, want := range map[uint64]string{
		unix.Mkdev(1, 3): "", unix.Mkdev(1, 5): "", unix.Mkdev(1, 9): "",
		unix.Mkdev(1, 1): "memory", unix.Mkdev(1, 4): "memory", unix.Mkdev(1, 11): "kernel log",
		unix.Mkdev(5, 0): "terminal", unix.Mkdev(5, 2): "terminal", unix.Mkdev(136, 0): "terminal",
		0: "no driver", unix.Mkdev(511, 0): "no driver",
	} {
		got, err := Refused(number)
		check.That(t, err == nil && (want != "" || got == "") && strings.Contains(got, want), "%d:%d: %q, %v", unix.Major(number), unix.Minor(number), got, err)
	}
}

func TestDrivers(t *testing.T) {
	const text = "Character devices:\n  1 mem\n  4 /dev/vc/0\n  4 tty\n195 nvidia\n\nBlock devices:\n  7 loop\n195 disk\n"
	for number, want := range map[uint32][]string{4: {"/dev/vc/0", "tty"}, 195: {"nvidia"}, 7: nil} {
		got := drivers(text, number)
		check.That(t, slices.Equal(got, want), "%d: %q", number, got)
	}
}

// Drivers that this machine may lack are refused, too.
func TestReason(t *testing.T) {
	for name, want := range map[string]string{
		"dax": "memory", "xen/privcmd": "memory", "i2c": "power", "spi": "power", "nvme-fabrics": "disks", "st": "disks", "zfs": "disks", "megaraid_sas_ioctl": "disks", "mpt3ctl": "disks",
		"crash": "memory", "vboxdrv": "memory", "efi_capsule_loader": "firmware", "usbmon": "USB", "vhci": "devices",
		"nvidia": "", "kvm": "", "ttyUSB": "",
	} {
		got := reason([]string{"other", name})
		check.That(t, (want != "" || got == "") && strings.Contains(got, want), "%s: %q", name, got)
	}
}

// Hostile text does not make parse panic, and errors have one line.
func FuzzParse(f *testing.F) {
	f.Add([]byte(nvidia), true)
	f.Add(fmt.Appendf(nil, thing, "x"), false)
	f.Fuzz(func(t *testing.T, text []byte, isYAML bool) {
		_, err := parse(text, isYAML)
		check.That(t, err == nil || !strings.Contains(err.Error(), "\n"), "the error has several lines: %q", err)
	})
}
