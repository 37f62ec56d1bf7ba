// Command bench measures the cost of NATS and a gateway, and how throughput grows with the number of nodes.
// It alternates between the compared variants in one run: machines differ and are noisy, so only
// differences and ratios are meaningful. It never passes or fails.
//
// tests/README.md describes the programs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/tests/bench/measure"
)

var (
	binary  = flag.String("sbxrun", "bin/sbxrun", "the program to measure")
	only    = flag.String("only", "cost,share,scale,stored", "which programs to run")
	rounds  = flag.Int("n", 10, "share: how many rounds to measure")
	calls   = flag.Int("calls", 2000, "cost: how many calls of each kind; share: how many of each kind in all rounds")
	clients = flag.Int("clients", 8, "share: how many clients call at once")
	counts  = flag.String("nodes", "1,2,4,8,16,32,64", "scale: how many nodes there are")
	sleep   = flag.Duration("sleep", 500*time.Millisecond, "scale: how long a payload sleeps")
	places  = flag.Int("places", 4, "scale: how many payloads a node runs at once")
	lasts   = flag.Duration("for", 5*time.Second, "scale: how long each count of nodes is measured")
	profile = flag.String("profile", "", "scale: write a CPU profile to this file")
)

// ctx ends with SIGINT or SIGTERM, and ends all started processes.
var ctx = context.Background()

// natsRole makes this program a NATS server, in a separate process as in production.
const natsRole = "nats"

func main() {
	if len(os.Args) == 3 && os.Args[1] == natsRole {
		measure.Exit(serveNATS(os.Args[2]))
	}
	measure.Main(func(c context.Context) error {
		ctx = c
		return bench()
	})
}

// failure is the panic of must and try, which bench recovers.
type failure struct{ error }

// must returns a value. On an error it ends the benchmark, with everything deferred.
func must[V any](v V, err error) V {
	try(err)
	return v
}

func try(err error) {
	if err != nil {
		panic(failure{err})
	}
}

func bench() (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failure:
			err = r.error
		default:
			panic(r)
		}
	}()
	programs := map[string]func(dir, nats string){"cost": cost, "share": share, "scale": scale, "stored": stored}
	dir := must(os.MkdirTemp("", "sbxrun-bench-"))
	defer os.RemoveAll(dir)
	*binary = must(filepath.Abs(*binary))
	nats := start(must(os.Executable()), natsRole, filepath.Join(dir, "nats"))
	defer nats.end()
	url := ""
	until("NATS", func() bool {
		text, err := os.ReadFile(filepath.Join(dir, "nats", "url"))
		url = string(text)
		return err == nil
	})
	try(measure.PrintMachine())
	for name := range strings.SplitSeq(*only, ",") {
		run := programs[name]
		if run == nil {
			return fmt.Errorf("there is no program %q", name)
		}
		run(dir, url)
	}
	return nil
}

// serveNATS writes its address to dir/url, and runs until its parent exits.
func serveNATS(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true, JetStream: true, StoreDir: dir})
	if err != nil {
		return err
	}
	s.Start()
	defer s.Shutdown()
	if !s.ReadyForConnections(time.Minute) {
		return errors.New("it does not start")
	}
	name := filepath.Join(dir, "url")
	if err := os.WriteFile(name+".new", []byte(s.ClientURL()), 0o600); err != nil {
		return err
	}
	if err := os.Rename(name+".new", name); err != nil {
		return err
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, unix.SIGTERM)
	<-told
	return nil
}

// process is a started process with its log.
type process struct{ *exec.Cmd }

func start(name string, args ...string) *process {
	p := &process{exec.Command(name, args...)}
	p.Stderr = &bounded{}
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGTERM}
	try(p.Start())
	return p
}

// end ends a process with its descendants.
func (p *process) end() {
	_ = p.Process.Signal(unix.SIGTERM) // it may have exited
	if err := p.Wait(); err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v: %v: %s\n", p.Args, err, p.Stderr)
	}
}

// bounded keeps the first bytes of a log.
type bounded struct{ text []byte }

func (b *bounded) Write(p []byte) (int, error) {
	b.text = append(b.text, p[:min(len(p), 4096-len(b.text))]...)
	return len(p), nil
}

func (b *bounded) String() string { return string(b.text) }

// until waits up to a minute for a condition.
func until(what string, is func() bool) {
	try(measure.Until(ctx, what, time.Now().Add(time.Minute), is))
}
