package tests

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// TestDocs types the console blocks of the documents into a shell and compares the output with that in the documents.
func TestDocs(t *testing.T) {
	t.Parallel()
	documents, err := filepath.Glob("../docs/[^m]*/*.md")
	harness.Must(t, err)
	for _, document := range append(documents, "../README.md") {
		text, err := os.ReadFile(document)
		harness.Must(t, err)
		blocks := consoleBlocks(string(text))
		if len(blocks) == 0 {
			continue
		}
		t.Run(filepath.Base(document), func(t *testing.T) {
			t.Parallel()
			sh := newConsole(t)
			if os.Getuid() == 0 { // hide the state of a server that root runs
				sh.try(t, consoleStep{command: "mount -t tmpfs tmpfs /run"})
			}
			for _, block := range blocks {
				if _, err := exec.LookPath("cc"); err != nil && strings.Contains(fmt.Sprint(block), " cc ") {
					continue
				}
				for _, step := range block {
					sh.try(t, step)
				}
			}
		})
	}
}

// consoleStep is a command of a console block, with the output lines below it.
type consoleStep struct {
	command string
	want    []string
}

var consoleFence = regexp.MustCompile("(?ms)^```console\n(.*?)^```$")

func consoleBlocks(text string) (blocks [][]consoleStep) {
	for _, match := range consoleFence.FindAllStringSubmatch(text, -1) {
		var block []consoleStep
		for line := range strings.Lines(match[1]) {
			line = strings.TrimSuffix(line, "\n")
			if command, ok := strings.CutPrefix(line, "$ "); ok {
				block = append(block, consoleStep{command: command})
			} else if len(block) > 0 {
				block[len(block)-1].want = append(block[len(block)-1].want, line)
			}
		}
		blocks = append(blocks, block)
	}
	return blocks
}

// console is a shell in the top directory with its own PID namespace, home and state directory, so all sandboxes and
// processes belong to the document.
type console struct {
	stdin io.Writer
	lines <-chan string
	got   []string // lines not yet compared
}

var removedCgroup = regexp.MustCompile(`^removed +cgroup `)

const consoleMark = "end-of-the-command"

func newConsole(t *testing.T) *console {
	top, err := filepath.Abs("..")
	harness.Must(t, err)
	cmd := contained("bash", "--norc", "--noprofile")
	cmd.Dir = top
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "FIXTURE_SECONDS=") }),
		"HOME="+t.TempDir(), "SBXRUN_STATE_DIR="+filepath.Join(t.TempDir(), "state"), "SBXRUN_DATA_DIR="+filepath.Join(t.TempDir(), "data"),
		"XDG_RUNTIME_DIR="+t.TempDir(), "TMPDIR="+t.TempDir(), // for its mktemp
		"PATH="+filepath.Dir(harness.Binary(t))+":"+harness.Path, harness.Bwrap()) // without the caller's python3
	stdin, err := cmd.StdinPipe()
	harness.Must(t, err)
	out, in, err := os.Pipe()
	harness.Must(t, err)
	cmd.Stdout, cmd.Stderr = in, in
	reaped, err := harness.StartCommand(cmd)
	harness.Must(t, err)
	harness.Must(t, in.Close())
	lines := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(lines)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			select {
			case lines <- scanner.Text():
			case <-done:
				return
			}
		}
	}()
	t.Cleanup(func() {
		close(done)
		_ = stdin.Close() // the shell is PID 1, so all remaining processes end with it
		harness.Must(t, cmd.Wait())
		reaped()
		_ = out.Close()
	})
	return &console{stdin: stdin, lines: lines}
}

// try types a command and waits for the wanted lines. Some of them may come from a background command after the shell is
// ready for the next one.
func (c *console) try(t *testing.T, step consoleStep) {
	t.Helper()
	// A command that reads stdin must not read the following commands.
	_, err := fmt.Fprintf(c.stdin, "{ %s\n} </dev/null\necho %s\n", step.command, consoleMark)
	harness.Must(t, err)
	want := comparable(step.want)
	deadline := time.After(30*time.Second + harness.Slack)
	for marked := false; !marked || len(c.got) < len(want); {
		select {
		case line, ok := <-c.lines:
			switch {
			case !ok:
				t.Fatalf("$ %s\nthe shell has ended; before: %q", step.command, c.got)
			case line == consoleMark:
				marked = true
			case removedCgroup.MatchString(line): // root's cleanup also finds cgroups of other packages' tests
			default:
				c.got = append(c.got, line)
			}
		case <-deadline:
			t.Fatalf("$ %s\nprinted only %q, want %q", step.command, c.got, step.want)
		}
	}
	diff := cmp.Diff(want, comparable(c.got))
	check.Require(t, diff == "", "$ %s\nprints another text than the document has (-document +printed):\n%s", step.command, diff)
	c.got = nil
}

// Values that differ between runs.
var consoleVaries = []struct {
	what *regexp.Regexp
	name string
}{
	{regexp.MustCompile(`\b[0-9a-f]{16}\b`), "ID"},
	{regexp.MustCompile(`\b\d+\.\d+ s\b`), "TIME"},
	{regexp.MustCompile(`\b\d+s\b`), "AGE"},
	{regexp.MustCompile(`\[\d\d/\w+/\d{4} [\d:]{8}\]`), "DATE"},
	{regexp.MustCompile(`^ *\d+ `), "PID "},
	{regexp.MustCompile(` +`), " "},
}

func comparable(lines []string) []string {
	same := make([]string, 0, len(lines))
	for _, line := range lines {
		for _, v := range consoleVaries {
			line = v.what.ReplaceAllString(line, v.name)
		}
		same = append(same, line)
	}
	return same
}

// Links between the documents, and the anchors in them, resolve.
func TestDocLinks(t *testing.T) {
	t.Parallel()
	documents := []string{}
	for _, pattern := range []string{"../*.md", "../docs/*.md", "../docs/*/*.md", "../tests/*.md", "../fixtures/*.md", "../clients/*/*.md"} {
		found, err := filepath.Glob(pattern)
		harness.Must(t, err)
		documents = append(documents, found...)
	}
	for _, document := range documents {
		for _, link := range links.FindAllStringSubmatch(prose(t, document), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(link[1], "#")
			target := document
			if path != "" {
				target = filepath.Join(filepath.Dir(document), path)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", document, link[1], err)
			} else if anchor != "" && !slices.Contains(anchors(t, target), anchor) {
				t.Errorf("%s links to %s, which has no such heading", document, link[1])
			}
		}
	}
}

var (
	links      = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	codeBlocks = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	headings   = regexp.MustCompile(`(?m)^#+ (.*)$`)
	dropped    = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// prose returns a document without its code blocks.
func prose(t *testing.T, document string) string {
	text, err := os.ReadFile(document)
	harness.Must(t, err)
	return codeBlocks.ReplaceAllString(string(text), "")
}

// anchors returns the names by which GitHub links to the headings of a document.
func anchors(t *testing.T, document string) (names []string) {
	for _, heading := range headings.FindAllStringSubmatch(prose(t, document), -1) {
		text := links.ReplaceAllString(heading[1], "") // a link in a heading
		names = append(names, strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(text), ""), " ", "-"))
	}
	return names
}

// The Python function in the guide to back ends returns the documented values.
func TestBackendPython(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../docs/guides/backend.md")
	harness.Must(t, err)
	_, code, _ := strings.Cut(string(text), "```python\n")
	code, _, found := strings.Cut(code, "```\n")
	const limited = `"--memory", "256M", "--pids", "64", `
	check.Require(t, found && strings.Contains(code, limited), "backend.md has no such block: %s", code)
	run := func(code string) string {
		t.Helper()
		second := fmt.Sprint(harness.Deadline(time.Second).Seconds())
		cmd := exec.Command("python3", "-c", code+`
print(execute_code("print(6 * 7)", timeout=60))
print(execute_code("import time; print('begun', flush=True); time.sleep(600)", timeout=`+second+`))
print(execute_code("import os; print(os.listdir('.')); raise SystemExit(3)", timeout=60)[:3])
print(execute_code("import os; os.write(1, b'a\\xff')", timeout=60))
`)
		cmd.Env = []string{"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + harness.Path, harness.Bwrap(), "SBXRUN_STATE_DIR=" + filepath.Join(t.TempDir(), "state")}
		out, _ := harness.Command(t, cmd, harness.Bound) // an error shows in the output
		return string(out)
	}
	got := run(code)
	if strings.Contains(got, "RuntimeError: {'code': 'limit'") { // this machine cannot enforce limits
		got = run(strings.Replace(code, limited, "", 1))
	}
	want := "('exited', 0, '42\\n', '')\n('timeout', 124, 'begun\\n', '')\n('exited', 3, '[]\\n')\n('exited', 0, 'a\ufffd', '')\n"
	check.That(t, got == want, "got %s, want %s", got, want)
}
