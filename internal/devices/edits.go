package devices

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/values"
)

// add adds the changes of a specification for a device; common ones are for all devices of the specification.
func (s *Set) add(name string, e *edits, common bool) error {
	switch {
	case len(e.NetDevices) > 0:
		return errors.New("network devices are not supported: a sandbox has no interfaces of the host")
	case len(e.IntelRdt) > 0 && string(e.IntelRdt) != "null":
		return errors.New("intelRdt is not supported: an ordinary user cannot set it up")
	case slices.Contains(e.GIDs, 0):
		return errors.New("additionalGids contains group 0, which no sandbox gets")
	}
	for _, pair := range e.Env {
		v, err := values.ParsePair(pair)
		if err != nil {
			return fmt.Errorf("env: %w", err)
		}
		s.Env.Put(v)
	}
	for i := range e.DeviceNodes {
		n, err := e.DeviceNodes[i].node(name)
		n.Common = common
		if err == nil {
			err = s.addNode(n)
		}
		if err != nil {
			return err
		}
	}
	for _, m := range e.Mounts {
		if err := s.addMount(m); err != nil {
			return err
		}
	}
	for _, h := range e.Hooks {
		if err := s.translate(h); err != nil {
			return err
		}
	}
	s.Groups = append(s.Groups, e.GIDs...)
	return nil
}

// node checks a node of a specification.
func (n *node) node(name string) (Node, error) {
	source := n.source()
	switch {
	case !path.IsAbs(source) || !path.IsAbs(n.Path):
		return Node{}, fmt.Errorf("the path of device node %q is not absolute", source)
	case n.Type != "" && n.Type != "c" && n.Type != "u":
		return Node{}, fmt.Errorf("%s has type %q; only character devices are supported", source, n.Type)
	case n.Permissions != "" && (!strings.Contains(n.Permissions, "r") || !strings.Contains(n.Permissions, "w")):
		return Node{}, fmt.Errorf("%s has permissions %q; only rw is supported, because a mount cannot restrict a device", source, n.Permissions)
	}
	made := Node{Name: name, Source: path.Clean(source), Dest: path.Clean(n.Path)}
	if n.Major != 0 {
		made.Number = unix.Mkdev(n.Major, n.Minor)
	}
	return made, nil
}

// addMount adds a file or directory. It is always read-only, whatever its options are, and noexec would mean nothing in
// a sandbox with writable directories. Sockets lead to services of the host and are left out.
func (s *Set) addMount(m mount) error {
	switch {
	case m.Type != "" && m.Type != "bind" && m.Type != "none":
		return fmt.Errorf("mount %s has type %q; only binds are supported", m.ContainerPath, m.Type)
	case !path.IsAbs(m.HostPath) || !path.IsAbs(m.ContainerPath):
		return fmt.Errorf("mount %q at %q: the paths must be absolute", m.HostPath, m.ContainerPath)
	}
	made := Mount{path.Clean(m.HostPath), path.Clean(m.ContainerPath)}
	st, err := os.Stat(made.Source)
	if err != nil {
		return &result.Error{Code: "device", Message: fmt.Sprintf("mount of a device: %v", err), Hint: "the CDI specification may be out of date; generate it again", Err: err}
	}
	switch {
	case !st.IsDir() && !st.Mode().IsRegular():
		return nil
	case slices.Contains(s.Mounts, made):
		return nil
	case slices.ContainsFunc(s.Mounts, func(other Mount) bool { return other.Dest == made.Dest }):
		return fmt.Errorf("two mounts at %s", made.Dest)
	}
	s.Mounts = append(s.Mounts, made)
	return nil
}

// needless are NVIDIA hooks that a sandbox does not need: it has no privilege to create device nodes, its directories
// are open to it, it does not prefer the compatibility libraries of an image, and EGL finds no other GPUs.
var needless = []string{"disable-device-node-modification", "chmod", "enable-cuda-compat", "update-application-profile"}

// translate adds the effect of a hook, which is never executed.
func (s *Set) translate(h hook) error {
	program, args := path.Base(h.Path), h.Args
	if len(args) > 0 {
		args = args[1:] // the name of the program
	}
	if program == "nvidia-ctk" && len(args) > 0 && args[0] == "hook" {
		args = args[1:]
	} else if program != "nvidia-cdi-hook" {
		args = nil
	}
	if len(args) == 0 || h.HookName != "createContainer" {
		return fmt.Errorf("hook %s %s is not supported: sbxrun executes no hooks", h.HookName, h.Path)
	}
	switch name := args[0]; {
	case name == "create-symlinks":
		links, err := options(args[1:], "link")
		if err != nil {
			return fmt.Errorf("hook %s: %w", name, err)
		}
		for _, l := range links {
			target, dest, ok := strings.Cut(l, "::")
			if !ok || target == "" || !path.IsAbs(dest) {
				return fmt.Errorf("hook %s: link %.200q: want TARGET::LINK, with an absolute path", name, l)
			}
			s.addLink(Link{target, path.Clean(dest)})
		}
	case name == "update-ldcache", name == "create-soname-symlinks":
		folders, err := options(args[1:], "folder")
		if err != nil {
			return fmt.Errorf("hook %s: %w", name, err)
		}
		for _, dir := range folders {
			if !path.IsAbs(dir) || strings.Contains(dir, ":") {
				return fmt.Errorf("hook %s: %q is not a directory for LD_LIBRARY_PATH", name, dir)
			}
			if dir = path.Clean(dir); !slices.Contains(s.Libraries, dir) {
				s.Libraries = append(s.Libraries, dir)
			}
		}
	case slices.Contains(needless, name):
	default:
		return fmt.Errorf("hook %.80s is not supported: sbxrun executes no hooks", name)
	}
	return nil
}

// options returns the values of an option and skips all other options.
func options(args []string, name string) (list []string, err error) {
	for i := 0; i < len(args); i++ {
		option, value, given := strings.Cut(strings.TrimLeft(args[i], "-"), "=")
		switch {
		case !strings.HasPrefix(args[i], "-"):
			return nil, fmt.Errorf("unexpected argument %.80q", args[i])
		case given:
		case i+1 == len(args):
			return nil, fmt.Errorf("%s has no value", args[i])
		default:
			i++
			value = args[i]
		}
		if option == name {
			list = append(list, value)
		}
	}
	return list, nil
}

func (s *Set) addLink(l Link) {
	if !slices.ContainsFunc(s.Links, func(other Link) bool { return other.Dest == l.Dest }) {
		s.Links = append(s.Links, l)
	}
}

// linkLibraries adds the links that ldconfig(8) would make: the dynamic loader looks for a library by its SONAME.
func (s *Set) linkLibraries() error {
	for _, m := range s.Mounts {
		dir, base := path.Split(m.Dest)
		if !slices.Contains(s.Libraries, path.Clean(dir)) || !strings.Contains(base, ".so") {
			continue
		}
		name, err := soname(m.Source)
		if err != nil {
			return fmt.Errorf("%s: %w", m.Source, err)
		}
		if dest := path.Join(dir, name); name != "" && name == path.Base(name) && !slices.ContainsFunc(s.Mounts, func(other Mount) bool { return other.Dest == dest }) {
			s.addLink(Link{base, dest})
		}
	}
	return nil
}

// soname returns the SONAME of a shared library, or "" if the file has none.
func soname(name string) (string, error) {
	f, err := os.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	e, err := elf.NewFile(f)
	if err != nil {
		return "", nil // not a library
	}
	names, err := e.DynString(elf.DT_SONAME)
	if err != nil || len(names) == 0 {
		return "", nil
	}
	return names[0], nil
}
