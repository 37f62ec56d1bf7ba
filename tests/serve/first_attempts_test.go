package serve

import (
	"net/http"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/tests/check"
)

// Requests as people first write them, who know other services, are refused with a hint at the right member.
func TestFirstAttempts(t *testing.T) {
	t.Parallel()
	s := serve(t, cold)
	for _, tt := range []struct{ body, hint string }{
		{`{"command": "ls -l"}`, `["sh", "-c", "COMMAND"]`},
		{`{"argv": "ls -l"}`, `["sh", "-c", "COMMAND"]`},
		{`{"code": "1", "timeout": 5}`, "timeout_ms"},
		{`{"code": "1", "files": [{"path": "a", "content": "x"}]}`, "text or base64"},
		{`{"code": "1", "limits": {"memory": "64M"}}`, "number of bytes"},
		{`{"code": "1", "stdin": {"a": 1}}`, "encode JSON as a string"},
		{`{"code": "1", "language": "javascript"}`, ", node, "},
	} {
		status, e := s.refused(http.MethodPost, "/v1/run", tt.body)
		check.That(t, status == http.StatusBadRequest && !e.Started && strings.Contains(e.Failure.Hint, tt.hint), "%s: %d %+v", tt.body, status, e)
	}
}
