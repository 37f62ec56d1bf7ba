package pool_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/pool"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/supervise"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

func TestMain(m *testing.M) {
	if text := os.Getenv("SBXRUN_TEST_SERVER"); text != "" {
		timeout, err := time.ParseDuration(text)
		if err == nil {
			err = serve(timeout)
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	harness.Main(m)
}

// serve is the main function of a server that runs three endless calls in three rooms.
func serve(timeout time.Duration) error {
	p := pool.New(bare, pool.Sizes{Min: 1, Max: 3}, func(err error) { fmt.Println(err) })
	defer p.Close()
	var rooms []*pool.Room
	for len(rooms) < 3 {
		if r := p.Take("a", limits.Request{}); r != nil {
			defer r.Give()
			rooms = append(rooms, r)
		} else {
			time.Sleep(time.Millisecond)
		}
	}
	var runs []*supervise.Command
	for _, r := range rooms {
		out, w := io.Pipe()
		run, err := r.Start(context.Background(), slot.Command{
			Args: []string{"sh", "-c", "trap '' TERM; setsid sleep 1000 & echo ready; sleep 1000"}, Options: supervise.Options{Stdout: w, Timeout: timeout},
		})
		if err != nil {
			return err
		}
		if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
			return err
		}
		runs = append(runs, run)
	}
	fmt.Println("ready")
	for _, run := range runs {
		res, err := run.Wait()
		if err != nil {
			return err
		}
		fmt.Println(res.Cause, res.Verdict)
	}
	return nil
}

// server starts such a server and waits until its calls run.
func server(t *testing.T, timeout time.Duration) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "SBXRUN_TEST_SERVER="+timeout.String())
	out, err := cmd.StdoutPipe()
	check.Must(t, err)
	check.Must(t, cmd.Start())
	lines := bufio.NewReader(out)
	line, err := lines.ReadString('\n')
	check.Require(t, line == "ready\n", "%q, %v", line, err)
	return cmd, lines
}

// gone waits until these processes have exited, and reaps those that were reparented to this process.
func gone(t *testing.T, list []proc.Stat) {
	t.Helper()
	for _, st := range list {
		harness.Until(t, bound, fmt.Sprintf("the end of %s, %d", st.Comm, st.PID), func() bool {
			_, _ = unix.Wait4(st.PID, nil, unix.WNOHANG, nil) // ECHILD: not this process's child
			got, err := proc.ReadStat(st.PID)
			return err != nil || got.Start != st.Start
		})
	}
}

// All processes of a killed server exit.
func TestKilled(t *testing.T) {
	for range max(2, harness.Soak(t)/5) {
		cmd, _ := server(t, time.Hour)
		var list []proc.Stat
		harness.Until(t, bound, "all processes among what is below", func() bool { // a list that changes may be incomplete (proc(5))
			list = proc.Descendants(cmd.Process.Pid, 1000)
			return len(list) >= 3*8
		})
		check.Must(t, cmd.Process.Kill())
		_ = cmd.Wait() // it was killed
		gone(t, list)
	}
}

// The calls of a stopped server end at their deadlines and are reported as timeouts.
func TestStopped(t *testing.T) {
	timeout := harness.Deadline(3 * time.Second) // all three begin, and the server is stopped, before
	cmd, lines := server(t, timeout)
	check.Must(t, cmd.Process.Signal(unix.SIGSTOP))
	var list []proc.Stat
	for _, st := range proc.Descendants(cmd.Process.Pid, 1000) {
		if st.Comm == "sleep" || st.Comm == "sh" || st.Comm == "setsid" {
			list = append(list, st)
		}
	}
	check.That(t, len(list) >= 6, "%+v", list)
	gone(t, list)
	check.Must(t, cmd.Process.Signal(unix.SIGCONT))
	for range 3 {
		line, err := lines.ReadString('\n')
		check.That(t, line == "timeout proven\n", "%q, %v", line, err)
	}
	check.OK(t, cmd.Wait())
}
