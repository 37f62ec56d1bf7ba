package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// images compares the CPU time of a start in an image with that on the host's root, and that of an import with that of
// umoci unpack, if umoci is in PATH.
func images(builds []*build) {
	dir := got(os.MkdirTemp("/var/tmp", "sbxrun-bench-"))
	defer os.RemoveAll(dir)
	ref, data, bundle := "oci:"+filepath.Join(dir, "oci"), filepath.Join(dir, "data"), filepath.Join(dir, "bundle")
	writeImage(filepath.Join(dir, "oci"))
	used := func(data string, args ...string) time.Duration {
		cmd := builds[0].command(args...)
		cmd.Env = append(cmd.Environ(), "SBXRUN_DATA_DIR="+data)
		return cpu(cmd)
	}
	used(data, "image", "import", ref, "--name", "bench")
	once := func(args ...string) func() time.Duration {
		return func() time.Duration { return used(data, append(args, "true")...) }
	}
	compare("image", "CPU time of `true`", rounds(200), 5, []variant{
		{"A", "sbxrun --image", once("--image", "bench", "--cwd", "none")}, {"B", "sbxrun", once("--cwd", "none")},
	})
	variants := []variant{{"A", "sbxrun image import", func() time.Duration {
		return used(filepath.Join(dir, "new"), "image", "import", ref)
	}}}
	if _, err := exec.LookPath("umoci"); err == nil {
		variants = append(variants, variant{"D", "umoci unpack", func() time.Duration {
			return cpu(exec.CommandContext(ctx, "umoci", "unpack", "--rootless", "--image", filepath.Join(dir, "oci")+":v1", bundle))
		}})
	}
	for i := range variants {
		measured := variants[i].once
		variants[i].once = func() time.Duration {
			must(errors.Join(os.RemoveAll(filepath.Join(dir, "new")), os.RemoveAll(bundle)))
			return measured()
		}
	}
	compare("image", "CPU time of an import of 100 MiB", rounds(7), 1, variants)
}

// cpu returns the CPU time of a command with the descendants that it has waited for.
func cpu(cmd *exec.Cmd) time.Duration {
	done(cmd)
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
}

// writeImage writes an image in OCI layout: true(1) with its libraries, and 100 MiB of the host's files below /usr.
func writeImage(dir string) {
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	add := func(name string, info fs.FileInfo) {
		h, data := got(tar.FileInfoHeader(info, "")), got(os.ReadFile(name))
		h.Name = strings.TrimPrefix(name, "/")
		must(w.WriteHeader(h))
		got(w.Write(data))
	}
	libraries, _ := exec.Command("ldd", "/bin/true").Output() // fails for a static one
	for _, name := range append(strings.Fields(string(libraries)), "/bin/true") {
		if info, err := os.Stat(name); err == nil && filepath.IsAbs(name) {
			add(name, info)
		}
	}
	must(filepath.WalkDir("/usr", func(name string, d fs.DirEntry, err error) error {
		if text.Len() > 100<<20 {
			return fs.SkipAll
		}
		info, failed := d.Info()
		if err == nil && failed == nil && info.Mode().IsRegular() && info.Size() <= 8<<20 {
			add(name, info)
		}
		return nil
	}))
	must(errors.Join(w.Close(), os.MkdirAll(dir+"/blobs/sha256", 0o755)))
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	got(z.Write(text.Bytes()))
	must(z.Close())
	type object = map[string]any
	blob := func(kind string, data []byte) object {
		sum := fmt.Sprintf("%x", sha256.Sum256(data))
		must(os.WriteFile(dir+"/blobs/sha256/"+sum, data, 0o644))
		return object{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + sum, "size": len(data)}
	}
	encode := func(v any) []byte { return got(json.Marshal(v)) }
	layer := blob("layer.v1.tar+gzip", packed.Bytes())
	config := blob("config.v1+json", encode(object{"os": "linux", "architecture": runtime.GOARCH,
		"rootfs": object{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(text.Bytes()))}}}))
	manifest := blob("manifest.v1+json", encode(object{"schemaVersion": 2, "config": config, "layers": []any{layer}}))
	manifest["annotations"] = object{"org.opencontainers.image.ref.name": "v1"}
	must(errors.Join(os.WriteFile(dir+"/oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644),
		os.WriteFile(dir+"/index.json", encode(object{"schemaVersion": 2, "manifests": []any{manifest}}), 0o644)))
}
