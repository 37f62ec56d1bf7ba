package cells

import (
	_ "embed"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Language is how code is run, as an operator may configure it.
type Language struct {
	// Command runs a program that is in a file once; "{file}" is the file's path.
	Command []string `toml:"command" json:"command"`
	File    string   `toml:"file" json:"file"` // its name, such as main.py
	// Kept is the command of an interpreter that can be kept, without arguments of the
	// driver's, such as python3; and Driver which driver it understands: "python" or "node".
	// Without both it cannot be kept.
	Kept   []string `toml:"kept" json:"kept,omitempty"`
	Driver string   `toml:"driver" json:"driver,omitempty"`
	// Ahead is how many interpreters are started before a tenant's next programs come, if its
	// programs are read from their files when it has started.
	Ahead int `toml:"ahead" json:"ahead,omitempty"`
}

// Languages are those that are known, by their names. What of them a room has is for the
// caller to see.
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

// Check finds what is wrong with a language.
func (l Language) Check() error {
	_, known := drivers[l.Driver]
	switch {
	case len(l.Command) == 0 || l.File == "" || l.File != path.Base(l.File) || l.File == ".." || l.File == "." || l.File == "/":
		return usage("want a command, and a file that is one name")
	case l.Ahead < 0:
		return usage("ahead: want 0 or more")
	case l.Driver == "" && len(l.Kept) == 0:
		return nil
	case !known:
		return usage(fmt.Sprintf("there is no driver %q: want python or node", l.Driver))
	case len(l.Kept) == 0:
		return usage("a driver is for an interpreter that is kept: want its command as well")
	}
	return nil
}

// Argv is the command that runs a program once which is in dir.
func (l Language) Argv(dir string) []string {
	argv := slices.Clone(l.Command)
	for i, word := range argv {
		argv[i] = strings.ReplaceAll(word, "{file}", path.Join(dir, l.File))
	}
	return argv
}

// keep is the command of the interpreter that can be kept, which the language must have, and the driver
// that it reads first.
func (l Language) keep() (argv []string, driver string) {
	d := drivers[l.Driver]
	// The socket comes as 0 and becomes 3. sh executes the interpreter in its place, so a
	// signal to the command is one to the interpreter.
	argv = append([]string{"sh", "-c", `exec "$@" 3<&0 </dev/null`, "sh"}, l.Kept...)
	return append(argv, d.flag, fmt.Sprintf(d.boot, len(d.source))), d.source
}

// driver is what runs the cells of an interpreter.
type driver struct {
	flag   string // for a program in the command line
	boot   string // that reads so many bytes, and runs them
	source string
}

//go:embed driver.py
var driverPython string

//go:embed driver.js
var driverNode string

var drivers = map[string]driver{
	// It takes nothing from the working directory, where a json.py may lie, and has a table of
	// builtins of its own, which a cell does not change by accident.
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
