package tools

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/values"
)

// terminfoDirs are the directories in which ncurses looks for descriptions of terminals, besides TERMINFO,
// TERMINFO_DIRS and ~/.terminfo.
var terminfoDirs = []string{"/etc/terminfo", "/lib/terminfo", "/usr/share/terminfo", "/usr/lib/terminfo"}

// Terminal makes the description of the caller's terminal available if it is not one of the system's: it returns a mount
// in the sandbox's home, or the variable TERMINFO. shown reports whether the sandbox shows a path without links.
func Terminal(c room.Caller, lookup func(string) (string, bool), shown func(dir string) bool) (mounts []room.Mount, vars []values.Var) {
	name, _ := lookup("TERM")
	if name == "" || strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, ".") {
		return nil, nil
	}
	// By first letter, or on some systems by its number.
	entries := []string{filepath.Join(name[:1], name), filepath.Join(fmt.Sprintf("%x", name[0]), name)}
	find := func(dir string) (entry string) {
		for _, entry := range entries {
			if st, err := os.Stat(filepath.Join(dir, entry)); err == nil && st.Mode().IsRegular() {
				return entry
			}
		}
		return ""
	}
	for _, dir := range terminfoDirs {
		if find(dir) != "" {
			return nil, nil
		}
	}
	given, _ := lookup("TERMINFO")
	dirs := []string{given, filepath.Join(c.Home, ".terminfo")}
	list, _ := lookup("TERMINFO_DIRS")
	for _, dir := range append(dirs, strings.Split(list, ":")...) {
		if !filepath.IsAbs(dir) {
			continue
		}
		entry := find(dir)
		switch file := real(filepath.Join(dir, entry)); {
		case entry == "" || file == "":
		case shown(file) && shown(real(dir)):
			return nil, []values.Var{{Name: "TERMINFO", Value: real(dir)}}
		default:
			return []room.Mount{{Kind: room.ReadOnly, Source: file, Dest: filepath.Join(room.Home, ".terminfo", entry), Try: true}}, nil
		}
	}
	return nil, nil
}
