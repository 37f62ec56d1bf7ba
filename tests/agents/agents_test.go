//go:build agents

package agents

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// pixel is an image of one pixel, in base64, and code prints a text and writes the image.
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

const code = `import socket
print("computed in", socket.gethostname(), 6 * 7)
open("plot.png", "wb").write(bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d4944415478da6364f8cf500f00038601805a347d6b0000000049454e44ae426082"))`

// block returns the first code block below a heading in bold in docs/guides/agents.md.
func block(t *testing.T, heading string) string {
	t.Helper()
	text := harness.ReadFile(t, "../../docs/guides/agents.md")
	_, rest, ok := strings.Cut(string(text), "**"+heading+"**")
	found := regexp.MustCompile("(?s)\n```[a-z]*\n(.*?)```|\n\n    (.*?)\n").FindStringSubmatch(rest)
	check.Require(t, ok && found != nil, "agents.md has nothing on %s", heading)
	return found[1] + found[2]
}

// place is where one agent runs.
type place struct {
	t         *testing.T
	home, bin string
	env       []string
}

func newPlace(t *testing.T) *place {
	t.Helper()
	dir := harness.Dir(t)
	p := &place{t: t, home: filepath.Join(dir, "home"), bin: filepath.Join(dir, "bin")}
	p.write("project/README", "A project.\n")
	// Agents do not pass all variables on.
	script := "#!/bin/sh\nSBXRUN_STATE_DIR='" + dir + "/state' exec '" + harness.Binary(t) + "' \"$@\"\n"
	check.Must(t, os.Mkdir(p.bin, 0o755))
	check.Must(t, os.WriteFile(filepath.Join(p.bin, "sbxrun"), []byte(script), 0o755))
	node, err := exec.LookPath("node")
	check.Must(t, err)
	p.env = []string{"HOME=" + p.home, "PATH=" + p.bin + ":" + filepath.Dir(node) + ":" + harness.Path, "TMPDIR=" + dir, "TERM=dumb", "CI=1"}
	return p
}

func (p *place) write(name, text string) {
	p.t.Helper()
	name = filepath.Join(p.home, name)
	check.Must(p.t, os.MkdirAll(filepath.Dir(name), 0o755))
	check.Must(p.t, os.WriteFile(name, []byte(text), 0o600))
}

// run runs a shell command in the project and returns its output.
func (p *place) run(command string) string {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", "cd \"$HOME/project\" && "+command+"")
	cmd.Env, cmd.WaitDelay = p.env, time.Second
	out, err := cmd.CombinedOutput()
	check.That(p.t, err == nil, "%s: %v\n%s", command, err, out)
	return string(out)
}

// program returns an agent's program, which internal/setup/agents.sh has installed.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("SBXRUN_AGENTS")
	check.Require(t, dir != "", "run internal/setup/agents.sh, which sets SBXRUN_AGENTS")
	return filepath.Join(dir, "node_modules/.bin", name)
}

func TestClaudeCode(t *testing.T) {
	m, p := newModel(t, code), newPlace(t)
	p.env = append(p.env, "ANTHROPIC_BASE_URL="+m.URL, "ANTHROPIC_API_KEY=none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "DISABLE_AUTOUPDATER=1", "ENABLE_TOOL_SEARCH=false", "MCP_CONNECTION_NONBLOCKING=false")
	check.Must(t, os.Symlink(program(t, "claude"), filepath.Join(p.bin, "claude")))
	p.run(block(t, "Claude Code"))
	m.check(t, p.run("claude -p 'Compute it.' --allowedTools mcp__sbxrun__run_code"))
}

func TestCodex(t *testing.T) {
	m, p := newModel(t, code), newPlace(t)
	p.write(".codex/config.toml", `model = "stub"
model_provider = "stub"
approval_policy = "never"
[model_providers.stub]
name = "stub"
base_url = "`+m.URL+`/v1"
wire_api = "responses"
`+block(t, "Codex"))
	m.check(t, p.run(program(t, "codex")+" exec --skip-git-repo-check 'Compute it.'"))
}

func TestGeminiCLI(t *testing.T) {
	m, p := newModel(t, code), newPlace(t)
	p.env = append(p.env, "GOOGLE_GEMINI_BASE_URL="+m.URL, "GEMINI_API_KEY=none", "GEMINI_TELEMETRY_ENABLED=false")
	settings := object{"security": object{"auth": object{"selectedType": "gemini-api-key"}}}
	check.Must(t, json.Unmarshal([]byte(block(t, "Gemini CLI")), &settings))
	p.write(".gemini/settings.json", encoded(settings))
	m.check(t, p.run(program(t, "gemini")+" --model gemini-2.5-pro --yolo --skip-trust -p 'Compute it.'"))
}

func TestOpenCode(t *testing.T) {
	m, p := newModel(t, code), newPlace(t)
	p.env = append(p.env, "OPENCODE_DISABLE_AUTOUPDATE=1", "OPENCODE_DISABLE_MODELS_FETCH=1", "OPENCODE_CONFIG="+p.home+"/stub.json")
	p.write("stub.json", encoded(object{"provider": object{"stub": object{
		"npm": "@ai-sdk/openai-compatible", "options": object{"baseURL": m.URL + "/v1", "apiKey": "none"},
		"models": object{"stub": object{"attachment": true, "modalities": object{"input": []string{"text", "image"}, "output": []string{"text"}}}},
	}}}))
	p.write(".config/opencode/opencode.json", block(t, "opencode"))
	m.check(t, p.run(program(t, "opencode")+" run --model stub/stub 'Compute it.'"))
}

// check asserts that the tool has run in the sandbox, that the model has got its text and the image, and that the agent
// has printed the final answer.
func (m *model) check(t *testing.T, printed string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	check.Require(t, len(m.results) != 0, "the model has got no result: %s\n%s", strings.Join(m.log, "\n"), printed)
	got := m.results[0]
	for _, want := range []string{"computed in sandbox 42", pixel} {
		check.That(t, strings.Contains(got, want), "the model has not got %q: %.20000s", want, got)
	}
	check.That(t, strings.Contains(printed, final), "the agent printed %s", printed)
	if dir := os.Getenv("SBXRUN_AGENTS_DUMP"); dir != "" {
		_ = os.WriteFile(filepath.Join(dir, t.Name()), []byte(strings.Join(m.log, "\n")+"\n"+got+"\n"+printed), 0o600)
	}
}
