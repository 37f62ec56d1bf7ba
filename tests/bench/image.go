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
func images(builds []*build) error {
	dir, err := os.MkdirTemp("/var/tmp", "sbxrun-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ref, data, bundle := "oci:"+filepath.Join(dir, "oci"), filepath.Join(dir, "data"), filepath.Join(dir, "bundle")
	if err := writeImage(filepath.Join(dir, "oci")); err != nil {
		return err
	}
	used := func(data string, args ...string) (time.Duration, error) {
		cmd := builds[0].command(args...)
		cmd.Env = append(cmd.Environ(), "SBXRUN_DATA_DIR="+data)
		return cpu(cmd)
	}
	if _, err := used(data, "image", "import", ref, "--name", "bench"); err != nil {
		return err
	}
	once := func(args ...string) func() (time.Duration, error) {
		return func() (time.Duration, error) { return used(data, append(args, "true")...) }
	}
	if _, err := compare("image", "CPU time of `true`", rounds(200), 5, []variant{
		{"A", "sbxrun --image", once("--image", "bench", "--cwd", "none")}, {"B", "sbxrun", once("--cwd", "none")},
	}); err != nil {
		return err
	}
	variants := []variant{{"A", "sbxrun image import", func() (time.Duration, error) {
		return used(filepath.Join(dir, "new"), "image", "import", ref)
	}}}
	if _, err := exec.LookPath("umoci"); err == nil {
		variants = append(variants, variant{"D", "umoci unpack", func() (time.Duration, error) {
			return cpu(exec.CommandContext(ctx, "umoci", "unpack", "--rootless", "--image", filepath.Join(dir, "oci")+":v1", bundle))
		}})
	}
	for i := range variants {
		measured := variants[i].once
		variants[i].once = func() (time.Duration, error) {
			if err := errors.Join(os.RemoveAll(filepath.Join(dir, "new")), os.RemoveAll(bundle)); err != nil {
				return 0, err
			}
			return measured()
		}
	}
	_, err = compare("image", "CPU time of an import of 100 MiB", rounds(7), 1, variants)
	return err
}

// cpu returns the CPU time of a command with the descendants that it has waited for.
func cpu(cmd *exec.Cmd) (time.Duration, error) {
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("%q: %w: %s", cmd.Args, err, out)
	}
	return cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// writeImage writes an image in OCI layout: true(1) with its libraries, and 100 MiB of the host's files below /usr.
func writeImage(dir string) error {
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	add := func(name string, info fs.FileInfo) error {
		h, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		data, err := os.ReadFile(name)
		if err == nil {
			h.Name = strings.TrimPrefix(name, "/")
			if err = w.WriteHeader(h); err == nil {
				_, err = w.Write(data)
			}
		}
		return err
	}
	libraries, _ := exec.Command("ldd", "/bin/true").Output() // fails for a static one
	for _, name := range append(strings.Fields(string(libraries)), "/bin/true") {
		if info, err := os.Stat(name); err == nil && filepath.IsAbs(name) {
			if err := add(name, info); err != nil {
				return err
			}
		}
	}
	err := filepath.WalkDir("/usr", func(name string, d fs.DirEntry, err error) error {
		if text.Len() > 100<<20 {
			return fs.SkipAll
		}
		info, failed := d.Info()
		if err != nil || failed != nil || !info.Mode().IsRegular() || info.Size() > 8<<20 {
			return nil
		}
		return add(name, info)
	})
	if err := errors.Join(err, w.Close(), os.MkdirAll(dir+"/blobs/sha256", 0o755)); err != nil {
		return err
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, err = z.Write(text.Bytes())
	err = errors.Join(err, z.Close())
	type object = map[string]any
	blob := func(kind string, data []byte) object {
		sum := fmt.Sprintf("%x", sha256.Sum256(data))
		err = errors.Join(err, os.WriteFile(dir+"/blobs/sha256/"+sum, data, 0o644))
		return object{"mediaType": "application/vnd.oci.image." + kind, "digest": "sha256:" + sum, "size": len(data)}
	}
	encode := func(v any) []byte {
		data, failed := json.Marshal(v)
		err = errors.Join(err, failed)
		return data
	}
	layer := blob("layer.v1.tar+gzip", packed.Bytes())
	config := blob("config.v1+json", encode(object{"os": "linux", "architecture": runtime.GOARCH,
		"rootfs": object{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(text.Bytes()))}}}))
	manifest := blob("manifest.v1+json", encode(object{"schemaVersion": 2, "config": config, "layers": []any{layer}}))
	manifest["annotations"] = object{"org.opencontainers.image.ref.name": "v1"}
	return errors.Join(err, os.WriteFile(dir+"/oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644),
		os.WriteFile(dir+"/index.json", encode(object{"schemaVersion": 2, "manifests": []any{manifest}}), 0o644))
}
