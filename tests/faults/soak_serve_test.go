package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// soakServe is a verb of the soak: a call of a server of its own, with one warm room. The server
// takes the role of sbxrun. The payload sees /out read-only, so its processes show that it runs,
// and its output shows a breach.
const soakServe = "serve"

// config writes the configuration of the try's server.
func (y *soakTry) config() string {
	dir := filepath.Join(y.s.top, "serve-"+y.id)
	harness.Must(y.s.t, os.Mkdir(dir, 0o700))
	text := fmt.Sprintf("listen = [%q]\nstate_dir = %q\ndrain_timeout = \"1ms\"\n[rooms]\nmin = 1\nmax = 1\n[sandbox]\nmounts = [%q, %q]\n",
		"unix:"+filepath.Join(dir, "socket"), filepath.Join(dir, "state"), y.s.out+":/out", y.s.actor+":/actor")
	name := filepath.Join(dir, "config.toml")
	harness.Must(y.s.t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

// ask makes the call when the room is warm, and reports whether it is. The server creates the room
// after the first call.
func (y *soakTry) ask() bool {
	client := &http.Client{Timeout: bound, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(y.s.top, "serve-"+y.id, "socket"))
	}}}
	send := func(call api.Call) (answer result) {
		body, err := json.Marshal(call)
		harness.Must(y.s.t, err)
		begin := time.Now()
		defer func() { answer.took = time.Since(begin) }()
		answer.args = []string{"POST", string(body)}
		r, err := client.Post("http://sbxrun/v1/run", "application/json", bytes.NewReader(body))
		if err != nil {
			answer.stderr = err.Error() // the server is not ready, or was killed
			return answer
		}
		defer r.Body.Close()
		text, err := io.ReadAll(r.Body)
		answer.stdout, answer.stderr = string(text), fmt.Sprint(r.Status, err)
		return answer
	}
	tried := result{}
	if !y.s.holds(bound, func() bool {
		if !strings.Contains(tried.stdout, `"proven"`) {
			tried = send(api.Call{Argv: []string{"true"}})
		}
		r, err := client.Get("http://sbxrun/v1/status")
		if err != nil {
			return y.client.over()
		}
		defer r.Body.Close()
		var st api.Status
		return json.NewDecoder(r.Body).Decode(&st) == nil && st.Machine != nil && st.Machine.Rooms.Idle > 0
	}) || y.client.over() {
		_ = y.client.cmd.Process.Kill() // fails only if it has exited
		y.errorf("no warm room: %v, %v", y.s.wait(y.client), tried)
		return false
	}
	timeout, err := time.ParseDuration(y.timeout)
	harness.Must(y.s.t, err)
	grace, err := time.ParseDuration(y.grace + "s")
	harness.Must(y.s.t, err)
	y.asked = make(chan result, 1)
	y.client.begin = time.Now()
	go func() {
		answer := send(api.Call{Argv: []string{"/actor", y.id}, Env: map[string]string{harness.MarkerName: y.marker(), actEnv: "fight"},
			TimeoutMS: float64(timeout.Milliseconds()), GraceMS: float64(grace.Milliseconds())})
		if alive := y.commands(); strings.Contains(answer.stdout, `"verdict":"proven"`) && len(alive) > 0 {
			y.errorf("proven, and these live: %v\n%s", answer, harness.List(alive))
		}
		if strings.Contains(answer.stdout, "/out/breach") {
			y.errorf("a payload has reached its PID 1: %v", answer)
		}
		client.CloseIdleConnections()
		y.asked <- answer
	}()
	return true
}

// dismiss waits for the answer, and then ends the server.
func (y *soakTry) dismiss() result {
	var answer result
	select {
	case answer = <-y.asked:
	case <-time.After(bound):
		y.errorf("no answer")
	}
	if !y.client.over() {
		_ = y.client.cmd.Process.Signal(unix.SIGTERM) // fails only if it has exited
	}
	server := y.s.wait(y.client)
	answer.code, answer.signal = server.code, server.signal
	if server.signal == 0 && server.code != 0 {
		y.errorf("the server: %v", server)
	}
	return answer
}
