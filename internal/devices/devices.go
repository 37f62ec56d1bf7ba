// Package devices finds the parts of the host that a sandbox needs for a device: device nodes, files, links and
// variables. A device is named by the path of its node, or as in the Container Device Interface (CDI), whose
// specifications the vendors' tools write: https://github.com/cncf-tags/container-device-interface.
//
// A specification describes changes to an OCI container. Its hooks are programs of the host and are never executed.
// NVIDIA's hooks for links and for the dynamic loader's cache are translated.
package devices

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Set holds the changes to a sandbox for its devices.
type Set struct {
	Nodes  []Node
	Mounts []Mount // read-only
	Links  []Link
	Env    values.Environment
	// Libraries are directories in the sandbox for LD_LIBRARY_PATH.
	Libraries []string
	Groups    []uint32 // supplementary groups
}

// Node is a device node.
type Node struct {
	Name   string // of the device, for errors
	Source string // absolute path on the host
	Dest   string // absolute path in the sandbox
	Number uint64 // expected device number; 0 for any
	Common bool   // of all devices of a specification
}

// Mount is a file or directory of the host that the device's programs need.
type Mount struct{ Source, Dest string }

// Link is a symbolic link in the sandbox.
type Link struct{ Target, Dest string }

// Check returns an error for an invalid device name. It does not look for the device.
func Check(name string) error {
	if path.IsAbs(name) {
		if path.Clean(name) == "/" || strings.IndexByte(name, 0) >= 0 {
			return fmt.Errorf("%q is not a device", name)
		}
		return nil
	}
	if _, _, ok := cut(name); !ok {
		return fmt.Errorf("%q: want a CDI name such as nvidia.com/gpu=all, or the absolute path of a character device", name)
	}
	return nil
}

// cut splits a CDI name into kind and name.
func cut(device string) (kind, name string, ok bool) {
	kind, name, ok = strings.Cut(device, "=")
	return kind, name, ok && validKind(kind) && validWord(name, "_-.:")
}

// validKind reports whether kind is a vendor and a class, such as nvidia.com/gpu.
func validKind(kind string) bool {
	vendor, class, ok := strings.Cut(kind, "/")
	return ok && validWord(vendor, "_-.") && validWord(class, "_-.")
}

// validWord reports whether s is a word of letters, digits and, inside it, other characters.
func validWord(s, inside string) bool {
	if s == "" || len(s) > 255 || strings.ContainsRune(inside, rune(s[0])) || strings.ContainsRune(inside, rune(s[len(s)-1])) {
		return false
	}
	return !strings.ContainsFunc(s, func(c rune) bool {
		return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && !strings.ContainsRune(inside, c)
	})
}

// Find returns the changes for the named devices. It reads CDI specifications only if a name needs them. An error is a
// *[result.Error].
func Find(names []string) (*Set, error) {
	s := new(Set)
	var known *specs
	for i, name := range names {
		if err := Check(name); err != nil {
			return nil, &result.Error{Code: "usage", Message: "device " + err.Error(), Err: err}
		}
		if slices.Contains(names[:i], name) {
			continue
		}
		if path.IsAbs(name) {
			name = path.Clean(name)
			if err := s.addNode(Node{Name: name, Source: name, Dest: name}); err != nil {
				return nil, failure(name, err)
			}
			continue
		}
		if known == nil {
			known = read()
		}
		spec, device, err := known.find(name)
		if err != nil {
			return nil, err
		}
		err = s.add(name, &spec.Edits, true)
		if err == nil {
			err = s.add(name, &device.Edits, false)
		}
		if err != nil {
			return nil, failure(name, fmt.Errorf("%s: %w", spec.path, err))
		}
	}
	if err := s.linkLibraries(); err != nil {
		return nil, failure(names[0], err)
	}
	return s, nil
}

// failure is the error for a device that cannot be shown.
func failure(name string, err error) error {
	if e, ok := errors.AsType[*result.Error](err); ok {
		return e
	}
	return &result.Error{Code: "device", Message: fmt.Sprintf("device %q: %v", name, err), Err: err}
}

// addNode adds a node unless another device has added it.
func (s *Set) addNode(n Node) error {
	for _, other := range s.Nodes {
		if other.Dest == n.Dest {
			if other.Source != n.Source {
				return fmt.Errorf("%s would be both %s and %s", n.Dest, other.Source, n.Source)
			}
			return nil
		}
	}
	s.Nodes = append(s.Nodes, n)
	return nil
}
