package cells

import (
	_ "embed"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Language is how code is run. Operators can configure it.
type Language struct {
	// Command runs a program once; "{file}" stands for its path.
	Command []string `toml:"command" json:"command"`
	File    string   `toml:"file" json:"file"` // such as main.py
	// Kept is the command of an interpreter that cells can share, such as python3, and Driver is the driver
	// that it understands, "python" or "node". Without both, the language has no cells.
	Kept   []string `toml:"kept" json:"kept,omitempty"`
	Driver string   `toml:"driver" json:"driver,omitempty"`
	// Ahead is the number of interpreters prestarted for a tenant's next programs. The interpreter must open the
	// program only after it has started.
	Ahead int `toml:"ahead" json:"ahead,omitempty"`
	// Image is the key of the image in which it runs; "" for the host's programs.
	Image string `toml:"image" json:"image,omitempty"`
}

// Languages returns the known languages by name, installed or not.
func Languages() map[string]Language {
	return map[string]Language{
		"python": {Command: []string{"python3", "{file}"}, File: "main.py", Kept: []string{"python3"}, Driver: "python"},
		"node":   {Command: []string{"node", "{file}"}, File: "main.js", Kept: []string{"node"}, Driver: "node"},
		"bash":   {Command: []string{"bash", "{file}"}, File: "main.sh"},
		"sh":     {Command: []string{"sh", "{file}"}, File: "main.sh"},
		"ruby":   {Command: []string{"ruby", "{file}"}, File: "main.rb"},
		"java":   {Command: []string{"java", "{file}"}, File: "Main.java"},
		"go":     {Command: []string{"go", "run", "{file}"}, File: "main.go"},
	}
}

// Check validates the configuration of a language.
func (l Language) Check() error {
	_, known := drivers[l.Driver]
	switch {
	case len(l.Command) == 0 || l.File == "" || l.File != path.Base(l.File) || l.File == ".." || l.File == "." || l.File == "/":
		return usage("want a command, and a file name without slashes")
	case l.Ahead < 0:
		return usage("ahead: want 0 or more")
	case l.Driver == "" && len(l.Kept) == 0:
		return nil
	case !known:
		return usage(fmt.Sprintf("unknown driver %q: want python or node", l.Driver))
	case len(l.Kept) == 0:
		return usage("driver requires kept")
	}
	return nil
}

// Argv returns the command that runs the program in dir.
func (l Language) Argv(dir string) []string {
	argv := slices.Clone(l.Command)
	for i, word := range argv {
		argv[i] = strings.ReplaceAll(word, "{file}", path.Join(dir, l.File))
	}
	return argv
}

// keep returns the command of the interpreter for cells, and the driver that it reads first.
func (l Language) keep() (argv []string, driver string) {
	d := drivers[l.Driver]
	// The socket is descriptor 0 and becomes 3. sh execs the interpreter, so the interpreter receives the
	// command's signals.
	argv = append([]string{"sh", "-c", `exec "$@" 3<&0 </dev/null`, "sh"}, l.Kept...)
	return append(argv, d.flag, fmt.Sprintf(d.boot, len(d.source))), d.source
}

// driver runs cells inside an interpreter.
type driver struct {
	flag   string // takes a program as argument
	boot   string // reads %d bytes and executes them
	source string
}

//go:embed driver.py
var driverPython string

//go:embed driver.js
var driverNode string

var drivers = map[string]driver{
	// It imports nothing from the working directory, which may have a json.py, and uses its own table of
	// builtins, which cells cannot change by accident.
	"python": {"-c", `import os, sys
sys.path[:] = [p for p in sys.path if p]
text = b""
while len(text) < %[1]d: text += os.read(3, %[1]d - len(text))
exec(compile(text, "<driver>", "exec"), {"__name__": "driver", "__builtins__": dict(vars(__builtins__))})`, driverPython},
	"node": {"-e", `const text = Buffer.alloc(%[1]d)
for (let n = 0; n < text.length;) n += require('fs').readSync(3, text, n, text.length - n)
new Function('require', 'module', 'exports', text)(require, module, exports)`, driverNode},
}

func usage(message string) *result.Error {
	return &result.Error{Code: "usage", Message: "cells: " + message}
}
