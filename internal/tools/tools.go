// Package tools finds what stands behind the directories of PATH: the install prefixes of
// programs that a sandbox does not show by itself, with what their links lead to, so that a
// command means the same inside as outside. It only looks; nothing is executed.
package tools

import (
	"bufio"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Set is what shows the tools of a PATH.
type Set struct {
	Mounts []room.Mount // prefixes read-only, and what is covered in them
	Vars   []values.Var // that point into them
	Path   string       // PATH, without symbolic links that lead there
}

// homes are the variables that say where a tool keeps its parts. Without the variable it
// is a directory of the home, which the sandbox has another one of.
var homes = []struct {
	name, dir string // dir: below the home
	command   string // if this is in PATH, the directory is shown
}{
	{"RUSTUP_HOME", ".rustup", "rustup"},
	{"CARGO_HOME", ".cargo", "cargo"},
	{"GOMODCACHE", "go/pkg/mod", "go"},
	{"PYENV_ROOT", ".pyenv", "pyenv"},
	{"RBENV_ROOT", ".rbenv", "rbenv"},
	{"NODENV_ROOT", ".nodenv", "nodenv"},
	{"VOLTA_HOME", ".volta", "volta"},
	{"ASDF_DATA_DIR", ".asdf", "asdf"},
	{"MISE_DATA_DIR", ".local/share/mise", "mise"},
	{"UV_PYTHON_INSTALL_DIR", ".local/share/uv/python", "uv"},
	{"UV_TOOL_DIR", ".local/share/uv/tools", "uv"},
	{"BUN_INSTALL", ".bun", "bun"},
	{"JAVA_HOME", "", "java"},
	{"GOROOT", "", "go"},
	{"DOTNET_ROOT", "", "dotnet"},
	{"MAVEN_HOME", "", "mvn"},
	{"M2_HOME", "", "mvn"},
	{"GRADLE_HOME", "", "gradle"},
	{"VIRTUAL_ENV", "", "python"},
	{"CONDA_PREFIX", "", "conda"},
	{"GEM_HOME", "", "gem"},
}

// choices are variables that choose among versions.
var choices = []string{"PYENV_VERSION", "RBENV_VERSION", "NODENV_VERSION", "RUSTUP_TOOLCHAIN"}

// whole are the directories right below a home that have nothing but a tool's parts. Of
// others only the usual directories of a prefix are shown.
var whole = []string{".pyenv", ".rbenv", ".nodenv", ".cargo", ".rustup", ".volta", ".nvm", ".asdf", ".bun", ".deno", ".dotnet", ".ghcup", ".opam", ".npm-global"}

// parts are the usual directories of a prefix.
var parts = []string{"bin", "sbin", "shims", "lib", "lib32", "lib64", "libexec", "include", "share"}

// secrets are the names, within a prefix, of what holds credentials.
var secrets = []string{
	"credentials", "credentials.toml", ".netrc", ".npmrc", "etc/npmrc", "npmrc", "pip.conf", ".pypirc", ".condarc", "condarc", ".git-credentials", ".gitconfig", ".env",
	".config", ".ssh", ".aws", ".azure", ".docker", ".gnupg", ".kube", ".gem/credentials", ".m2/settings.xml", ".gradle/gradle.properties",
}

// many bounds how much is looked at: prefixes, and names in a directory of programs.
const (
	manyPrefixes = 100
	manyNames    = 5000
)

// finder collects prefixes.
type finder struct {
	home  string
	shown func(dir string) bool // the sandbox has it anyway
	dirs  []string              // to be shown
	seen  map[string]bool       // directories of programs that were looked at
}

// Find returns what shows the tools of a caller. shown tells of a real path whether the
// sandbox shows it anyway.
func Find(c room.Caller, lookup func(string) (string, bool), shown func(dir string) bool) Set {
	f := finder{home: real(c.Home), shown: shown, seen: map[string]bool{}}
	var set Set
	var dirs []string
	for _, dir := range filepath.SplitList(c.Path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		if target := real(dir); target != "" && target != filepath.Clean(dir) && !shown(target) {
			dir = target
		}
		dirs = append(dirs, dir)
		f.programs(dir)
	}
	set.Path = strings.Join(dirs, ":")
	for _, h := range homes {
		value, given := lookup(h.name)
		if !given && h.dir != "" && f.home != "" {
			value = filepath.Join(f.home, h.dir)
		}
		dir := real(value)
		if dir == "" || !filepath.IsAbs(value) {
			continue
		}
		if !f.visible(dir) && has(dirs, h.command) {
			f.show(dir)
		}
		if f.visible(dir) {
			set.Vars = append(set.Vars, values.Var{Name: h.name, Value: dir})
		}
	}
	f.userBase(&set, dirs, lookup)
	for _, name := range choices {
		if value, ok := lookup(name); ok {
			set.Vars = append(set.Vars, values.Var{Name: name, Value: value})
		}
	}
	for _, dir := range f.outermost() {
		set.Mounts = append(set.Mounts, room.Mount{Kind: room.ReadOnly, Source: dir, Dest: dir})
	}
	set.Mounts = append(set.Mounts, f.covers()...)
	return set
}

// userBase shows what pip install --user has installed.
func (f *finder) userBase(set *Set, dirs []string, lookup func(string) (string, bool)) {
	base, given := lookup("PYTHONUSERBASE")
	if !given {
		base = filepath.Join(f.home, ".local")
	}
	found, _ := filepath.Glob(filepath.Join(base, "lib/python3*")) // the pattern is good
	if base = real(base); base == "" || len(found) == 0 || !has(dirs, "python3") {
		return
	}
	f.show(filepath.Join(base, "lib"))
	set.Vars = append(set.Vars, values.Var{Name: "PYTHONUSERBASE", Value: base})
}

// programs shows what a directory of programs belongs to, and what its links and its
// scripts lead to.
func (f *finder) programs(dir string) {
	dir = real(dir)
	if dir == "" || f.seen[dir] || len(f.seen) > manyPrefixes {
		return
	}
	f.seen[dir] = true
	if !f.visible(dir) {
		f.prefix(dir)
	}
	if system(dir) {
		return
	}
	if home := venvBase(filepath.Dir(dir)); home != "" {
		f.programs(home)
	}
	d, err := os.Open(dir)
	if err != nil {
		return
	}
	defer d.Close()
	entries, _ := d.ReadDir(manyNames) // what can be read
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		target := ""
		switch {
		case e.Type()&os.ModeSymlink != 0:
			target = real(name)
		case e.Type().IsRegular():
			target = room.Interpreter(name)
		}
		if filepath.IsAbs(target) && !f.visible(target) && unix.Access(target, unix.X_OK) == nil {
			f.programs(filepath.Dir(target))
		}
		if base := e.Name(); e.Type()&os.ModeSymlink != 0 && strings.HasPrefix(base, "python") {
			// A venv of a venv: the links on the way count as well.
			if link, err := os.Readlink(name); err == nil && filepath.IsAbs(link) {
				f.programs(filepath.Dir(link))
			}
		}
	}
}

// system reports whether a directory is the distribution's, whose links lead to its own.
func system(dir string) bool {
	return room.Within(dir, "/usr") && !room.Within(dir, "/usr/local") || dir == "/bin" || dir == "/sbin"
}

// venvBase is the directory of the interpreter that a Python venv was made from.
func venvBase(prefix string) string {
	file, err := os.Open(filepath.Join(prefix, "pyvenv.cfg"))
	if err != nil {
		return ""
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), "=")
		if value = strings.TrimSpace(value); strings.TrimSpace(key) == "home" && filepath.IsAbs(value) {
			return value
		}
	}
	return ""
}

// prefix shows what a directory of programs belongs to.
func (f *finder) prefix(dir string) {
	for _, store := range []string{"/nix/store", "/gnu/store"} {
		if strings.HasPrefix(dir, store+"/") {
			f.show(store)
			return
		}
	}
	if strings.HasPrefix(dir, "/mnt/") {
		return // of other systems, and of Windows
	}
	if base := filepath.Base(dir); base != "bin" && base != "sbin" && base != "shims" {
		f.show(dir)
		return
	}
	top := filepath.Dir(dir)
	if room.HomeWithin(top, f.home) == "" && f.wholly(top) {
		f.show(top)
		return
	}
	f.show(dir)
	if room.HomeWithin(top, f.home) != "" {
		return // ~/bin: its neighbours are the user's
	}
	for _, part := range parts {
		// ~/.local/share has keyrings, mail and the like.
		if part != "share" || filepath.Base(top) != ".local" {
			f.show(filepath.Join(top, part))
		}
	}
}

// wholly reports whether all of a prefix is shown: if it is a tool's own.
func (f *finder) wholly(top string) bool {
	holds := func(name string) bool {
		_, err := os.Lstat(filepath.Join(top, name))
		return err == nil
	}
	if slices.Contains(whole, filepath.Base(top)) || holds("pyvenv.cfg") || holds("conda-meta") {
		return true
	}
	above := filepath.Dir(top)
	// Not what is the user's own work, with a bin directory in it.
	return above != "/" && room.HomeWithin(above, f.home) == "" && !holds(".git")
}

// show adds a directory, if it is one, but never a home directory or one above it.
func (f *finder) show(dir string) {
	dir = real(dir)
	if dir == "" || f.visible(dir) || len(f.dirs) > manyPrefixes || room.HomeWithin(dir, f.home) != "" {
		return
	}
	for _, name := range secrets {
		if f.home != "" && room.Within(dir, filepath.Join(f.home, name)) {
			return
		}
	}
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return
	}
	f.dirs = append(f.dirs, dir)
	if bin := filepath.Join(dir, "bin"); !f.seen[bin] {
		f.programs(bin)
	}
}

// visible reports whether a real path will be in the sandbox.
func (f *finder) visible(name string) bool {
	return f.shown(name) || slices.ContainsFunc(f.dirs, func(dir string) bool { return room.Within(name, dir) })
}

// outermost are the directories to be shown, without those that lie in another.
func (f *finder) outermost() (list []string) {
	slices.Sort(f.dirs)
	for _, dir := range f.dirs {
		if !slices.ContainsFunc(list, func(other string) bool { return room.Within(dir, other) }) {
			list = append(list, dir)
		}
	}
	return list
}

// covers hide what holds credentials in what is shown.
func (f *finder) covers() (list []room.Mount) {
	seen := map[string]bool{}
	for _, dir := range f.dirs {
		for _, name := range secrets {
			name = real(filepath.Join(dir, name))
			// A link may lead to where it is not shown.
			if name == "" || seen[name] || !slices.ContainsFunc(f.dirs, func(d string) bool { return name != d && room.Within(name, d) }) {
				continue
			}
			seen[name] = true
			m := room.Mount{Kind: room.Empty, Dest: name}
			if st, err := os.Stat(name); err == nil && st.IsDir() {
				m = room.Mount{Kind: room.Tmpfs, Dest: name, Size: 4096}
			}
			list = append(list, m)
		}
	}
	return list
}

// has reports whether there is a command in one of the directories.
func has(dirs []string, command string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return unix.Access(filepath.Join(dir, command), unix.X_OK) == nil })
}

// real is a path without symbolic links; "" if there is nothing.
func real(name string) string {
	if name == "" {
		return ""
	}
	name, err := filepath.EvalSymlinks(name)
	if err != nil {
		return ""
	}
	return name
}
