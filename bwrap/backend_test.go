package bwrap_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/bwrap"
)

// execute runs the Python code of a request, for ten seconds at most, and answers with how
// it ended. If the client disconnects, the code is ended.
func execute(w http.ResponseWriter, r *http.Request) {
	var request struct{ Code string }
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&request); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var stdout, stderr bytes.Buffer
	cmd := &bwrap.Command{
		Args:      []string{"python3", "-c", request.Code},
		Stdout:    &stdout,
		Stderr:    &stderr,
		MaxOutput: 1 << 20,
		Timeout:   10 * time.Second,
		// On a machine that can enforce them (sbxrun doctor): Limits: bwrap.Limits{Memory: 256 << 20, Pids: 64},
	}
	result, err := cmd.Run(r.Context())
	if failure, ok := errors.AsType[*bwrap.Error](err); ok {
		// The command never ran, or its teardown is unproven: a failure of the sandbox, not of the code.
		http.Error(w, failure.Message, http.StatusInternalServerError)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{ // the client may have disconnected
		"cause": result.Cause, "exit_code": result.ExitCode(), "stdout": stdout.String(), "stderr": stderr.String(),
	})
}

func Example_backend() {
	server := httptest.NewServer(http.HandlerFunc(execute))
	defer server.Close()
	answer, err := http.Post(server.URL, "application/json", strings.NewReader(`{"code": "print(6 * 7)"}`))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer answer.Body.Close()
	var text bytes.Buffer
	_, _ = text.ReadFrom(answer.Body)
	fmt.Print(text.String())
	// Output: {"cause":"exited","exit_code":0,"stderr":"","stdout":"42\n"}
}
