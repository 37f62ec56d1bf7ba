// Package tools finds the install prefixes behind the directories of PATH, and the targets of links in them, so that a
// command means the same program inside a sandbox as outside. It executes nothing.
package tools

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/hostfiles"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Set makes the tools of a PATH visible.
type Set struct {
	Mounts []room.Mount // read-only prefixes, and covers of credentials in them
	Vars   []values.Var // variables that point into the prefixes
	Path   string       // PATH with links to the prefixes resolved
}

// homes are variables with the directory of a tool. Without the variable, the tool uses a directory of the home, which
// the sandbox replaces.
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

// choices are variables that select a version.
var choices = []string{"PYENV_VERSION", "RBENV_VERSION", "NODENV_VERSION", "RUSTUP_TOOLCHAIN"}

// whole are directories that contain nothing but a tool's parts.
var whole = []string{".pyenv", ".rbenv", ".nodenv", ".cargo", ".rustup", ".volta", ".nvm", ".asdf", ".bun", ".deno", ".dotnet", ".ghcup", ".opam", ".npm-global"}

// manifests identify a prefix that belongs to a toolchain: the name of a file, and its text.
var manifests = []struct{ file, begins, contains string }{
	{file: "pyvenv.cfg"},
	{file: "conda-meta"},
	{file: "VERSION", begins: "go"},
	{file: "include/node/node.h"},
	{file: "lib/rustlib"},
	{file: "release", contains: "JAVA_VERSION="},
	{file: "bin/m2.conf"},    // Maven
	{file: "host/fxr"},       // .NET
	{file: "pwsh.deps.json"}, // PowerShell
}

// parts are the usual directories of a prefix. In a repository only those in code are shown.
var (
	parts = []string{"bin", "sbin", "shims", "lib", "lib32", "lib64", "libexec", "include", "share"}
	code  = []string{"bin", "sbin", "shims", "lib", "lib32", "lib64", "libexec"}
)

// Limits of the search: prefixes, and names in a directory of programs.
const (
	manyPrefixes = 100
	manyNames    = 5000
)

// programDirs are the names of directories of programs, whose prefix is the directory above.
var programDirs = []string{"bin", "sbin", "shims"}

// finder collects prefixes.
type finder struct {
	home  string
	shown func(dir string) bool // the sandbox shows it without --tools
	dirs  []string              // directories to show
	files []string              // programs to show, targets of links and scripts
	plain map[string]bool       // dirs of which only the directories in code are shown
	tools map[string]bool       // cached results of toolchain
	seen  map[string]bool       // searched directories of programs
}

// Find makes the tools of a caller visible. shown reports whether the sandbox shows a path without links anyway.
func Find(c room.Caller, lookup func(string) (string, bool), shown func(dir string) bool) Set {
	f := finder{home: real(c.Home), shown: shown, seen: map[string]bool{}, plain: map[string]bool{}, tools: map[string]bool{}}
	var set Set
	var dirs []string
	for _, dir := range filepath.SplitList(c.Path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		if target := real(dir); target != "" && target != filepath.Clean(dir) && !shown(target) && !f.ledOut(dir) {
			dir = target
		}
		dirs = append(dirs, dir)
		if !f.ledOut(dir) {
			f.programs(dir)
		}
	}
	set.Path = strings.Join(dirs, ":")
	for _, h := range homes {
		value, given := lookup(h.name)
		if !given && h.dir != "" && f.home != "" {
			value = filepath.Join(f.home, h.dir)
		}
		dir := real(value)
		if dir == "" || !filepath.IsAbs(value) || f.ledOut(value) || f.ledOut(filepath.Join(value, "bin")) {
			continue
		}
		if !f.visible(dir) && has(dirs, h.command) {
			if h.dir != "" {
				f.show(dir) // belongs to the tool by definition
			} else {
				f.prefix(filepath.Join(dir, "bin"))
			}
		}
		if f.visible(filepath.Join(dir, "bin")) || f.visible(dir) {
			set.Vars = append(set.Vars, values.Var{Name: h.name, Value: dir})
		}
	}
	f.userBase(&set, dirs, lookup)
	for _, name := range choices {
		if value, ok := lookup(name); ok {
			set.Vars = append(set.Vars, values.Var{Name: name, Value: value})
		}
	}
	f.libraries(&set, lookup)
	shownDirs, covers := f.cover(f.outermost())
	for _, dir := range shownDirs {
		set.Mounts = append(set.Mounts, room.Mount{Kind: room.ReadOnly, Source: dir, Dest: dir})
	}
	set.Mounts = append(set.Mounts, covers...)
	for _, file := range f.files {
		set.Mounts = append(set.Mounts, room.Mount{Kind: room.ReadOnly, Source: file, Dest: file})
	}
	return set
}

// userBase shows the packages of pip install --user.
func (f *finder) userBase(set *Set, dirs []string, lookup func(string) (string, bool)) {
	base, given := lookup("PYTHONUSERBASE")
	if !given {
		base = filepath.Join(f.home, ".local")
	}
	found, _ := filepath.Glob(filepath.Join(base, "lib/python3*")) // the pattern is good
	if f.ledOut(filepath.Join(base, "lib")) {
		return
	}
	if base = real(base); base == "" || len(found) == 0 || !has(dirs, "python3") {
		return
	}
	f.show(filepath.Join(base, "lib"))
	set.Vars = append(set.Vars, values.Var{Name: "PYTHONUSERBASE", Value: base})
}

// libraries passes on LD_LIBRARY_PATH, with the directories that will be in the sandbox.
func (f *finder) libraries(set *Set, lookup func(string) (string, bool)) {
	value, _ := lookup("LD_LIBRARY_PATH")
	var dirs []string
	for _, dir := range strings.FieldsFunc(value, func(r rune) bool { return r == ':' || r == ';' }) {
		if target := real(dir); filepath.IsAbs(dir) && target != "" && f.visible(target) {
			dirs = append(dirs, target)
		}
	}
	if len(dirs) > 0 {
		set.Vars = append(set.Vars, values.Var{Name: "LD_LIBRARY_PATH", Value: strings.Join(dirs, ":")})
	}
}

// programs shows the prefix of a directory of programs, and the targets of its links and scripts.
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
	ours := f.exposed(dir)
	if home := venvBase(filepath.Dir(dir)); home != "" {
		for _, name := range []string{"python3", "python"} {
			if target := real(filepath.Join(home, name)); !ours || f.known(target) {
				f.target(target)
			}
		}
	}
	d, err := openDir(dir)
	if err != nil {
		return
	}
	defer d.Close()
	entries, _ := d.ReadDir(manyNames) // best effort
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		target := ""
		switch {
		case e.Type()&os.ModeSymlink != 0:
			target = real(name)
		case e.Type().IsRegular():
			target = room.Interpreter(name)
		}
		if filepath.IsAbs(target) && (!ours || f.known(target)) {
			f.target(target)
		}
		if base := e.Name(); e.Type()&os.ModeSymlink != 0 && strings.HasPrefix(base, "python") {
			// A venv of a venv: the links on the way count as well.
			if link, err := os.Readlink(name); err == nil && filepath.IsAbs(link) && (!ours || f.known(link)) {
				f.target(link)
			}
		}
	}
}

// target shows a program that a link or a script leads to: with its prefix, or alone if it has none.
func (f *finder) target(name string) {
	dir := filepath.Dir(real(name))
	switch {
	case name == "" || f.visible(name) || unix.Access(name, unix.X_OK) != nil:
	case slices.Contains(programDirs, filepath.Base(dir)) || f.toolchain(dir) || store(dir) != "":
		f.programs(filepath.Dir(name))
	default:
		file := real(name)
		if st, err := os.Stat(file); err == nil && st.Mode().IsRegular() && len(f.files) < manyPrefixes && !hostfiles.Private(file) && !secret(file) {
			f.files = append(f.files, file)
		}
	}
}

// exposed reports whether the sandbox shows a directory anyway that is not the distribution's, such as a project. Earlier
// sandboxes or strangers may have written to it, so a link in it must not select which of the user's files are shown.
func (f *finder) exposed(dir string) bool {
	return f.shown(dir) && !values.Within(dir, "/usr") && !slices.Contains([]string{"/bin", "/sbin"}, dir)
}

// ledOut reports whether a link in an exposed directory leads to an outside directory that is not known to belong to a
// tool.
func (f *finder) ledOut(dir string) bool {
	target := real(dir)
	if target == "" || f.shown(target) || f.known(target) {
		return false
	}
	for above := filepath.Dir(dir); above != "/"; above = filepath.Dir(above) {
		if top := real(above); top != "" && f.exposed(top) {
			return true
		}
	}
	return false
}

// known reports whether a program, or a directory of programs, is known to belong to a tool: to a
// toolchain, a store or /opt, or is an interpreter of Python, which has no manifest.
func (f *finder) known(name string) bool {
	name = real(name)
	if name == "" {
		return false
	}
	for dir := name; dir != "/" && dir != filepath.Dir(filepath.Dir(filepath.Dir(name))); dir = filepath.Dir(dir) {
		if f.toolchain(dir) {
			return true
		}
	}
	return store(name) != "" || values.Within(name, "/opt") || strings.HasPrefix(filepath.Base(name), "python") && slices.Contains(programDirs, filepath.Base(filepath.Dir(name)))
}

// system reports whether a directory belongs to the distribution. Its links lead to visible files.
func system(dir string) bool {
	return values.Within(dir, "/usr") && !values.Within(dir, "/usr/local") || dir == "/bin" || dir == "/sbin"
}

// venvBase returns the directory of a Python venv's base interpreter.
func venvBase(prefix string) string {
	const most = 64 << 10
	for line := range strings.Lines(head(filepath.Join(prefix, "pyvenv.cfg"), most)) {
		key, value, _ := strings.Cut(line, "=")
		if value = strings.TrimSpace(value); strings.TrimSpace(key) == "home" && filepath.IsAbs(value) {
			return value
		}
	}
	return ""
}

// store returns the Nix or Guix store that contains a directory, "" for none.
func store(dir string) string {
	for _, store := range []string{"/nix/store", "/gnu/store"} {
		if strings.HasPrefix(dir, store+"/") {
			return store
		}
	}
	return ""
}

// prefix shows the install prefix of a directory of programs.
func (f *finder) prefix(dir string) {
	if store := store(dir); store != "" {
		f.show(store)
		return
	}
	if strings.HasPrefix(dir, "/mnt/") {
		return // of other systems, and of Windows
	}
	if strings.HasSuffix(dir, "/node_modules/.bin") {
		f.show(filepath.Dir(dir))
		return
	}
	if !slices.Contains(programDirs, filepath.Base(dir)) {
		f.plain[dir] = !f.toolchain(dir)
		f.show(dir)
		return
	}
	top := filepath.Dir(dir)
	if hostfiles.HomeWithin(top, f.home) == "" && f.toolchain(top) {
		f.show(top)
		return
	}
	f.show(dir)
	if hostfiles.HomeWithin(top, f.home) != "" {
		return // ~/bin: its neighbours are the user's
	}
	show := parts
	if f.ownWork(top) {
		show = code
	}
	for _, part := range show {
		// ~/.local/share has keyrings, mail and the like.
		if part != "share" || filepath.Base(top) != ".local" {
			f.show(filepath.Join(top, part))
		}
	}
}

// toolchain reports whether a prefix is a recognised toolchain, which can be shown completely.
func (f *finder) toolchain(top string) bool {
	is, known := f.tools[top]
	if !known {
		is = f.recognised(top)
		f.tools[top] = is
	}
	return is
}

// recognised is toolchain without the cache.
func (f *finder) recognised(top string) bool {
	for dir := top; dir != "/" && hostfiles.HomeWithin(dir, f.home) == ""; dir = filepath.Dir(dir) {
		if slices.Contains(whole, filepath.Base(dir)) {
			return true
		}
	}
	if _, err := os.Lstat(filepath.Join(top, ".git")); err == nil {
		return false // a working directory, whatever else it is
	}
	for _, m := range manifests {
		name := filepath.Join(top, m.file)
		if _, err := os.Lstat(name); err != nil {
			continue
		}
		if m.begins == "" && m.contains == "" {
			return true
		}
		if text := head(name, 4096); strings.HasPrefix(text, m.begins) && strings.Contains(text, m.contains) {
			return true
		}
	}
	return false
}

// ownWork reports whether a directory is in a repository of git: it or one above it, below the home
// directories, has a .git.
func (f *finder) ownWork(dir string) bool {
	for ; dir != "/" && hostfiles.HomeWithin(dir, f.home) == ""; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(filepath.Join(dir, ".git")); err == nil {
			return true
		}
	}
	return false
}

// show adds a directory, if it is one, but never a home directory or one above it.
func (f *finder) show(dir string) {
	dir = real(dir)
	if dir == "" || f.visible(dir) || len(f.dirs) > manyPrefixes || hostfiles.HomeWithin(dir, f.home) != "" || hostfiles.Private(dir) {
		return
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
	in := func(dir string) bool {
		rest, within := strings.CutPrefix(name, dir+"/")
		first, _, below := strings.Cut(rest, "/")
		return name == dir || within && !(below && f.plain[dir] && !slices.Contains(code, first))
	}
	return f.shown(name) || slices.ContainsFunc(f.dirs, in) || slices.Contains(f.files, name)
}

// outermost returns the directories to show, without those inside another.
func (f *finder) outermost() (list []string) {
	slices.Sort(f.dirs)
	for _, dir := range f.dirs {
		if !slices.ContainsFunc(list, func(other string) bool { return values.Within(dir, other) }) {
			list = append(list, dir)
		}
	}
	return list
}

// has reports whether there is a command in one of the directories.
func has(dirs []string, command string) bool {
	return slices.ContainsFunc(dirs, func(dir string) bool { return unix.Access(filepath.Join(dir, command), unix.X_OK) == nil })
}

// real resolves the symbolic links of a path; "" if it does not exist.
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
