package serve

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// importTree imports an image with the host's sh and cat, in which /opt/version has a text, and returns its digest.
func importTree(t *testing.T, data, image, version string) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	seen := map[string]bool{}
	add := func(name string, text []byte) {
		if !seen[name] {
			check.Must(t, w.WriteHeader(&tar.Header{Name: strings.TrimPrefix(name, "/"), Mode: 0o755, Size: int64(len(text))}))
			_, err := w.Write(text)
			check.Must(t, err)
		}
		seen[name] = true
	}
	for _, program := range []string{"sh", "cat"} {
		path, err := exec.LookPath(program)
		check.Must(t, err)
		ldd, err := combined(exec.Command("ldd", path))
		check.Must(t, err)
		for i, file := range append([]string{path}, strings.Fields(string(ldd))...) {
			if filepath.IsAbs(file) {
				text := harness.ReadFile(t, file)
				if i == 0 {
					file = "/opt/bin/" + program
				}
				add(file, text)
			}
		}
	}
	add("/opt/version", []byte(version+"\n"))
	check.Must(t, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	check.Must(t, err)
	made, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: v1.Config{
		Env: []string{"PATH=/opt/bin", "VERSION=" + version, "HOME=/nowhere"}, WorkingDir: "/opt", Entrypoint: []string{"/opt/bin/none"},
	}})
	check.Must(t, err)
	made, err = mutate.AppendLayers(made, layer)
	check.Must(t, err)
	archive := filepath.Join(harness.Dir(t), "image.tar")
	ref, err := name.NewTag("any:1")
	check.Must(t, err)
	check.Must(t, tarball.WriteToFile(archive, ref, made))
	out, err := combined(exec.Command(harness.Binary(t), "image", "import", "--data-dir", data, "--name", image, "docker-archive:"+archive))
	check.Require(t, err == nil, "import: %v: %s", err, out)
	return strings.TrimSpace(string(out))
}

const imagesConfig = `
[images.tools]
image = "tools:1"
[images.other]
image = "tools:1"
[languages.tool]
command = ["sh", "{file}"]
file = "tool"
image = "tools"
[tenant]
images = ["tools"]
`

// serveImages starts a server with the store data.
func serveImages(t *testing.T, data, config string) *server {
	return serveBy(t, []string{"env", "SBXRUN_DATA_DIR=" + data}, harness.Dir(t), config)
}

// Calls, sessions and languages run in images, by their keys. A reload takes up an image that has moved; sessions keep
// theirs.
func TestServeImages(t *testing.T) {
	t.Parallel()
	data := harness.SharedDir(t)
	one := importTree(t, data, "tools:1", "one")
	s := serveImages(t, data, imagesConfig)

	_, b := s.ask(http.MethodGet, "/v1/images", nil)
	want := fmt.Sprintf(`{"images":[{"name":"tools","digest":%q,"platform":"linux/%s"}]}`, one, runtime.GOARCH)
	check.That(t, strings.TrimSpace(string(b)) == want, "images: %s, want %s", b, want)
	const show = `read v </opt/version; echo $v $VERSION $HOME $PWD; echo new >file; ls / 2>&1 || :`
	call := func(path string, c api.Call) *api.Answer {
		t.Helper()
		a := s.call(path, c)
		check.That(t, a.ExitCode == 0, "%s: exit code %d, %s", path, a.ExitCode, text(a.Stderr))
		return a
	}
	command := api.Call{Argv: []string{"sh", "-c", show}, Collect: []string{"file"}}
	command.Image = "tools"
	a := call("/v1/run", command)
	got := text(a.Stdout)
	check.That(t, strings.HasPrefix(got, "one one /home/sandbox /home/sandbox\n") && strings.Contains(got, "ls: not found"), "printed %q", got)
	check.That(t, len(a.Files) == 1 && a.Files[0].Size == 4, "collected %+v", a.Files)
	shown, err := json.Marshal(a.Report.Image)
	check.That(t, err == nil && string(shown) == fmt.Sprintf(`{"name":"tools","digest":%q,"platform":"linux/%s","writable":false}`, one, runtime.GOARCH),
		"image of the report: %s, %v", shown, err)
	a = s.call("/v1/run", sh("cat /opt/version; exit 0"))
	check.That(t, a.Image == nil && text(a.Stdout) == "", "without an image: %+v, %q", a.Image, text(a.Stdout))
	program := api.Call{Language: "tool", Code: "cat /opt/version"}
	check.Equal(t, text(call("/v1/run", program).Stdout), "one\n", "the language printed")
	path := s.session(`{"image":"tools"}`)
	a = call(path+"/exec", program)
	check.That(t, text(a.Stdout) == "one\n" && a.Image != nil && a.Image.Digest == one, "in a session: %q, %+v", text(a.Stdout), a.Image)
	plain := s.session(`{}`)
	for _, test := range []struct {
		path string
		call api.Call
		code api.Code
	}{
		{path + "/exec", command, api.Usage}, {plain + "/exec", program, api.Usage}, {plain + "/processes", program, api.Usage},
		{"/v1/run", api.Call{Argv: []string{"sh"}, Parts: api.Parts{Image: "other"}}, api.Policy},
		{"/v1/run", api.Call{Argv: []string{"sh"}, Parts: api.Parts{Image: "tools:1"}}, api.Policy},
	} {
		s.refuses(test.code, http.MethodPost, test.path, test.call)
	}

	two := importTree(t, data, "tools:1", "two")
	check.Equal(t, text(call("/v1/run", program).Stdout), "one\n", "before the reload")
	check.Must(t, s.cmd.Process.Signal(unix.SIGHUP))
	s.logs("reloaded")
	a = call("/v1/run", program)
	check.That(t, text(a.Stdout) == "two\n" && a.Image.Digest == two, "after the reload: %q, %+v", text(a.Stdout), a.Image)
	a = call(path+"/exec", program)
	check.That(t, text(a.Stdout) == "one\n" && a.Image.Digest == one, "in the session after the reload: %q, %+v", text(a.Stdout), a.Image)
	// The old image cannot be removed while the session uses it.
	remove := func() (string, error) {
		out, err := combined(exec.Command(harness.Binary(t), "image", "rm", "--data-dir", data, one))
		return string(out), err
	}
	out, err := remove()
	check.That(t, err != nil && strings.Contains(out, "is in use"), "removing the image of a session: %v, %s", err, out)
	s.ask(http.MethodDelete, path, nil)
	harness.Until(t, harness.Bound, "the end of the use of the old image", func() bool {
		_, err := remove()
		return err == nil
	})
}

// Agents name images as clients do, and run command lines in images without bash.
func TestServeImagesForAgents(t *testing.T) {
	t.Parallel()
	data := harness.SharedDir(t)
	importTree(t, data, "tools:1", "one")
	s := serveImages(t, data, imagesConfig)
	a := s.agent(&mcp.StreamableClientTransport{Endpoint: "http://sbxrun/mcp", HTTPClient: &http.Client{Transport: s.client.Transport}}, "")
	t.Cleanup(func() { _ = a.Close() }) // the server's exit is checked
	list, err := a.ListTools(t.Context(), nil)
	check.Must(t, err)
	for _, tool := range list.Tools {
		schema := harness.JSON(t, tool.InputSchema)
		want := slices.Contains([]string{"run_code", "run_command", "create_session"}, tool.Name)
		check.That(t, want == strings.Contains(string(schema), `"enum":["tools"]`), "%s: %s", tool.Name, schema)
	}
	const line = "read v </opt/version; echo version $v"
	for name, arguments := range map[string]map[string]any{"run_command": {"command": line, "image": "tools"}, "run_code": {"code": line, "language": "tool"}} {
		got := said(a.use(name, arguments))
		check.That(t, strings.Contains(got, "version one"), "%s: %s", name, got)
	}
	session := strings.Fields(said(a.use("create_session", map[string]any{"image": "tools"})))[1]
	got := said(a.use("run_command", map[string]any{"command": line, "session": session}))
	check.That(t, strings.Contains(got, "version one"), "in a session: %s", got)
	a.use("end_session", map[string]any{"session": session})
}

// Images have warm rooms, which a reload replaces.
func TestServeImagesWarm(t *testing.T) {
	t.Parallel()
	data := harness.SharedDir(t)
	importTree(t, data, "tools:1", "one")
	s := serveImages(t, data, strings.Replace(imagesConfig, "image = \"tools:1\"\n", "image = \"tools:1\"\nrooms = {min = 1, max = 2, calls = 0}\n", 1))
	program := api.Call{Language: "tool", Code: "cat /opt/version"}
	warm := func(want string) bool {
		a := s.call("/v1/run", program)
		return a.Room == "warm" && text(a.Stdout) == want+"\n" && a.ExitCode == 0 && a.Image != nil
	}
	harness.Until(t, harness.Bound, "a warm room", func() bool { return warm("one") })
	importTree(t, data, "tools:1", "two")
	check.Must(t, s.cmd.Process.Signal(unix.SIGHUP))
	s.logs("reloaded")
	harness.Until(t, harness.Bound, "a warm room of the new image", func() bool { return warm("two") })
	a := s.call("/v1/run", sh("echo host"))
	check.That(t, text(a.Stdout) == "host\n" && a.Room == "cold", "without an image: %q in a room that is %s", text(a.Stdout), a.Room)
}

// Sandboxes of an image have its devices, in warm rooms as well; others do not.
func TestServeImagesDevices(t *testing.T) {
	t.Parallel()
	data, specs := harness.SharedDir(t), harness.Dir(t)
	importTree(t, data, "tools:1", "one")
	check.Must(t, os.WriteFile(filepath.Join(specs, "spec.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "example.com/device", "devices": [{"name": "one", "containerEdits": {"env": ["DEVICE=one"]}}]}`), 0o644))
	config := strings.Replace(imagesConfig, "image = \"tools:1\"\n", "image = \"tools:1\"\ndevices = [\"example.com/device=one\"]\nrooms = {min = 1, max = 2, calls = 0}\n", 1)
	config = strings.Replace(config, `images = ["tools"]`, `images = ["tools", "other"]`, 1)
	by := []string{"env", "SBXRUN_DATA_DIR=" + data, "SBXRUN_CDI_DIRS=" + specs}
	s := serveBy(t, by, harness.Dir(t), config)
	for image, want := range map[string]string{"tools": "one\n", "other": "none\n", "": "none\n"} {
		c := sh("echo ${DEVICE-none}")
		c.Image = image
		a := s.call("/v1/run", c)
		check.That(t, text(a.Stdout) == want && (len(a.Devices) > 0) == (image == "tools"), "with the image %q: %q, devices %q", image, text(a.Stdout), a.Devices)
	}
	file := filepath.Join(harness.Dir(t), "serve.toml")
	check.Must(t, os.WriteFile(file, []byte("listen = [\"unix:/tmp/x.sock\"]\n"+strings.Replace(config, "device=one", "device=two", 1)), 0o600))
	args := append(by[1:], harness.Binary(t), "serve", "--check-config", "--config", file)
	out, err := combined(exec.Command("env", args...))
	check.That(t, err != nil && strings.Contains(string(out), "images.tools.devices: "), "--check-config with a missing device: %v, %s", err, out)
}

// The configuration is refused if an image is missing, and a reload keeps what there was.
func TestServeImagesMissing(t *testing.T) {
	t.Parallel()
	data := harness.SharedDir(t)
	file := filepath.Join(harness.Dir(t), "serve.toml")
	check.Must(t, os.WriteFile(file, []byte("listen = [\"unix:/tmp/x.sock\"]\n"+imagesConfig), 0o600))
	examine := func() (string, error) {
		cmd := exec.Command(harness.Binary(t), "serve", "--check-config", "--config", file)
		cmd.Env = append(os.Environ(), "SBXRUN_DATA_DIR="+data)
		out, err := combined(cmd)
		return string(out), err
	}
	out, err := examine()
	check.That(t, err != nil && strings.Contains(out, `images.other: no image named "tools:1"`), "--check-config: %v, %s", err, out)
	importTree(t, data, "tools:1", "one")
	out, err = examine()
	check.That(t, err == nil && out == "sbxrun: configuration OK\n", "--check-config: %v, %s", err, out)
}
