package main

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/tests/check"
)

// write creates all files of a kind and returns their directory.
func write(t *testing.T, what string) string {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, run("../..", what, dir))
	return dir
}

func read(t *testing.T, elem ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(elem...))
	check.Must(t, err)
	return string(b)
}

// pages returns the man pages and their sources.
func pages(t *testing.T) map[string]string {
	t.Helper()
	sources, err := filepath.Glob("../../docs/man/*.md")
	check.Must(t, err)
	pages := map[string]string{}
	for _, source := range sources {
		pages[strings.TrimSuffix(filepath.Base(source), ".md")] = source
	}
	return pages
}

// Every command and flag is completed, with its help, and in the command's man page; and sbxrun(1) has every command.
func TestEverywhere(t *testing.T) {
	man := write(t, "man")
	for _, c := range cli.Commands() {
		path := strings.Fields(c.Path())
		name := strings.Replace("sbxrun-"+path[0]+".1", "-run", "", 1)
		text, completed := read(t, man, name), cli.Complete(append(path, "-"))
		check.That(t, regexp.MustCompile(`\b`+c.Name+`\b`).MatchString(text), "%s: no command %s", name, c.Name)
		words := cli.Complete(append(path[:len(path)-1:len(path)-1], ""))
		check.That(t, slices.Contains(words, c.Name+"\t"+c.Help), "completion proposes no %s: %q", c.Path(), words)
		for _, f := range c.Flags {
			for _, word := range cli.Spellings(f) {
				want := `\fB` + strings.ReplaceAll(word, "-", `\-`) + `\fP`
				check.That(t, strings.Contains(text, want), "%s: no %s of sbxrun %s", name, word, c.Name)
				check.That(t, slices.Contains(completed, word+"\t"+f.Help), "completion of %s proposes no %s", c.Path(), word)
			}
			flat := strings.NewReplacer(`\-`, "-", `'\''`, "'", `\`, "").Replace(text)
			check.That(t, strings.Contains(flat, strings.ReplaceAll(f.Help, `\`, "")), "%s: no help of --%s: %s", name, f.Name, f.Help)
		}
	}
}

// Each man page has the usual sections in the usual order, and a synopsis from the grammar.
func TestManSections(t *testing.T) {
	dir := write(t, "man")
	for name := range pages(t) {
		page := read(t, dir, name)
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^\.SH (.*)$`).FindAllStringSubmatch(page, -1) {
			got = append(got, m[1])
		}
		want := []string{"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"}
		if name == "sbxrun.1" {
			want = []string{"NAME", "SYNOPSIS", "DESCRIPTION", "COMMANDS", "OPTIONS", "EXIT STATUS", "SIGNALS",
				"ENVIRONMENT", "FILES", "EXAMPLES", "SEE ALSO"}
		}
		check.NoDiff(t, cmp.Diff(want, got), "%s: sections (-want +got)", name)
		check.That(t, !strings.Contains(page, "{{"), "%s: a template action was left in the page", name)
	}
}

// Every command has a man page with a proper beginning; that of run is sbxrun.1. There are no other pages, and all
// references lead to existing pages.
func TestManPages(t *testing.T) {
	all := pages(t)
	want := []string{"sbxrun.1"}
	for _, c := range cli.Model().Model.Children {
		if c.Name != "run" {
			want = append(want, "sbxrun-"+c.Name+".1")
		}
	}
	slices.Sort(want)
	diff := cmp.Diff(want, slices.Sorted(maps.Keys(all)))
	check.Require(t, diff == "", "pages (-want +got):\n%s", diff)
	for name, source := range all {
		text := read(t, source)
		title := strings.TrimSuffix(name, ".1")
		check.That(t, strings.HasPrefix(text, title+" 1 ") && strings.Contains(text, "# NAME\n\n"+title+" - "), "%s does not begin as the page of %s", source, title)
		command, found := strings.CutPrefix(title, "sbxrun-")
		check.That(t, !found || strings.Contains(text, `{{template "synopsis" commands "`+command+`"}}`), "%s: no synopsis of %s", source, command)
		for _, m := range regexp.MustCompile(`\*\*(sbxrun[a-z-]*)\*\*\(1\)`).FindAllStringSubmatch(text, -1) {
			check.That(t, all[m[1]+".1"] != "", "%s refers to %s(1), which does not exist", source, m[1])
		}
	}
	general := read(t, all["sbxrun.1"])
	for name := range all {
		title := strings.TrimSuffix(name, ".1")
		check.That(t, title == "sbxrun" || strings.Contains(general, "**"+title+"**(1)"), "sbxrun.1 does not refer to %s", title)
	}
	check.Equal(t, read(t, write(t, "man"), "sbxrun-run.1"), ".so man1/sbxrun.1\n", "man sbxrun-run shows")
}

// groff formats the man pages without warnings, if it is installed.
func TestManIsClean(t *testing.T) {
	groff, err := exec.LookPath("groff")
	if err != nil {
		t.Log("no groff here: not checked")
		return
	}
	dir := write(t, "man")
	for name := range pages(t) {
		out, err := exec.Command(groff, "-man", "-ww", "-z", "-Tutf8", filepath.Join(dir, name)).CombinedOutput()
		check.That(t, err == nil && len(out) == 0, "groff: %v\n%s", err, out)
	}
}

// TestReference checks that docs/reference/commands.md is up to date.
func TestReference(t *testing.T) {
	text := read(t, write(t, "reference"), "commands.md")
	for _, c := range cli.Commands() {
		want := "\n## sbxrun " + c.Path() + "\n"
		check.That(t, strings.Count(text, want) == 1, "%q is not in the reference once", want)
	}
	check.NoDiff(t, cmp.Diff(text, read(t, "../../docs/reference/commands.md")), "docs/reference/commands.md: run ./setup.sh reference (-want +got)")
}

// The flags in tables of the documentation exist.
func TestTables(t *testing.T) {
	known := map[string]bool{}
	for _, c := range cli.Commands() {
		for _, f := range c.Flags {
			for _, word := range cli.Spellings(f) {
				known[word] = true
			}
		}
	}
	sources, err := filepath.Glob("../../docs/[^m]*/*.md")
	check.Require(t, err == nil && len(sources) != 0, "%v %v", sources, err)
	rows := 0
	for _, source := range sources {
		for _, row := range regexp.MustCompile("(?m)^\\| `--.*").FindAllString(read(t, source), -1) {
			rows++
			cell, _, _ := strings.Cut(row[2:], "|")
			for _, flag := range regexp.MustCompile("--[a-z-]+").FindAllString(cell, -1) {
				check.That(t, known[flag], "%s: no flag %s: %s", source, flag, row)
			}
		}
	}
	check.That(t, rows != 0, "no table of flags was found")
}

// The command lines in the documentation can be parsed.
func TestCommandLines(t *testing.T) {
	sources, err := filepath.Glob("../../docs/[^m]*/*.md")
	check.Require(t, err == nil && len(sources) != 0, "%v %v", sources, err)
	blocks := regexp.MustCompile("(?ms)^```(?:sh|console|ini|yaml|crontab)\n(.*?)^```$")
	calls := regexp.MustCompile(`(?m)(?:^|[\s/=(])(sbxrun .*)$`)
	tried := 0
	for _, source := range append(sources, "../../README.md") {
		for _, block := range blocks.FindAllStringSubmatch(read(t, source), -1) {
			text := strings.ReplaceAll(block[1], "\\\n", "")
			for _, call := range calls.FindAllStringSubmatch(text, -1) {
				if strings.HasPrefix(call[1], "sbxrun: ") { // a message
					continue
				}
				for _, args := range shellWords(t, call[1]) {
					tried++
					err := parse(args)
					check.That(t, err == nil, "%s: %s: %v", filepath.Base(source), call[1], err)
				}
			}
		}
	}
	check.That(t, tried >= 50, "%d command lines were found, want at least 50", tried)
}

// shellWords returns the arguments of each call of sbxrun in a shell's command line, of which it executes nothing else.
func shellWords(t *testing.T, line string) (calls [][]string) {
	t.Helper()
	cmd := exec.Command("bash", "-c", `sbxrun() { printf '%s\0' "$@" $'\1' >&3; }; command_not_found_handle() { echo value; }; exec 3>&1 >/dev/null 2>&1; PATH=/dev/null; eval "$0"`, line)
	cmd.Dir = t.TempDir()  // for redirections
	out, _ := cmd.Output() // the exit code is that of another command
	for _, call := range strings.Split(strings.TrimSuffix(string(out), "\x01\x00"), "\x01\x00") {
		calls = append(calls, strings.Split(strings.TrimSuffix(call, "\x00"), "\x00"))
	}
	return calls
}

// parse parses a command line, whose first words name the command.
func parse(args []string) error {
	commands := cli.Commands()
	i := slices.IndexFunc(commands, func(c *kong.Node) bool { return strings.HasPrefix(strings.Join(args, " ")+" ", c.Path()+" ") })
	n := len(strings.Fields(commands[max(i, 0)].Path()))
	if i < 0 {
		i, n = 0, 0 // run
	}
	if err := cli.Parse(commands[i].Target.Addr().Interface(), args[n:]); !errors.Is(err, cli.ErrHelp) {
		return err
	}
	return nil
}
