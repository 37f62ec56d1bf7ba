// Command sbxrund is the server that `sbxrun serve` and `sbxrun mcp` execute. It accepts calls over HTTP, on Unix sockets
// and TCP, or from one client on stdio, and runs them with sbxrun's engine.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/capture"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/cluster"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/devices/cdiyaml"
	_ "github.com/sbxrun/sbxrun/internal/entry"
	"github.com/sbxrun/sbxrun/internal/mcp"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/proxy"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/version"
)

func main() {
	devices.YAML = cdiyaml.ToJSON
	os.Exit(dispatch(os.Args[1:]))
}

func dispatch(args []string) int {
	commands := map[string]func(args []string) int{
		"serve":           cli.Command(serve),
		"gateway":         cli.Command(gateway),
		"nodes":           cli.Command(nodes),
		"mcp":             cli.Command(mcpCommand),
		"snapshot create": cli.Command(onSnapshots(snapshots.Open, createSnapshot)),
		"snapshot ls":     cli.Command(onSnapshots(snapshots.Look, listSnapshots)),
		"snapshot rm":     cli.Command(onSnapshots(snapshots.Open, removeSnapshots)),
		"snapshot export": cli.Command(onSnapshots(snapshots.Open, exportSnapshot)),
		"snapshot import": cli.Command(onSnapshots(snapshots.Open, importSnapshot)),
		"image pull":      cli.Command(onSnapshots(snapshots.Open, pullImage)),
		"image import":    cli.Command(onSnapshots(snapshots.Open, importImage)),
		"image ls":        cli.Command(onSnapshots(snapshots.Look, listImages)),
		"image inspect":   cli.Command(onSnapshots(snapshots.Look, inspectImages)),
		"image rm":        cli.Command(onSnapshots(snapshots.Open, removeImages)),
		"image export":    cli.Command(onSnapshots(snapshots.Open, exportImage)),
		"image commit":    cli.Command(onSnapshots(snapshots.Open, commitImage)),
	}
	for n := min(2, len(args)); n > 0; n-- {
		if command := commands[strings.Join(args[:n], " ")]; command != nil {
			return command(args[n:])
		}
	}
	word, rest := "", args
	if len(args) > 0 {
		word, rest = args[0], args[1:]
	}
	var err error
	switch word {
	case "snapshot":
		return snapshotGroup(args)
	case "image":
		return cli.Group(args)
	case network.Role:
		return proxy.Main()
	case "openapi": // for packages
		var text []byte
		if text, err = server.Document(version.Number, len(rest) > 0 && rest[0] == "3.0"); err == nil {
			_, err = os.Stdout.Write(append(text, '\n'))
		}
	case snapshots.UnpackWord:
		err = unpack(rest)
	case snapshots.UnpackImageWord:
		err = unpackImage(rest)
	case snapshots.EnsureImageWord:
		r, err := ensureImage(rest)
		return output.Finish(false, r, err)
	case devices.YAMLWord:
		var text []byte
		if text, err = io.ReadAll(os.Stdin); err == nil {
			text, err = cdiyaml.ToJSON(text)
		}
		if err == nil {
			_, err = os.Stdout.Write(text)
		}
	case capture.PackArg:
		err = capture.Pack(rest)
	case capture.ThawArg:
		err = capture.Thaw(rest)
	default:
		err = errors.New("sbxrund is the server of sbxrun; use sbxrun serve, gateway, nodes or mcp")
	}
	return output.Finish(false, output.Result{}, err)
}

func checked() output.Result { return output.Line(nil, "sbxrun: configuration OK") }

func serve(flags *cli.Serve) (r output.Result, err error) {
	c, tokens, err := settings(&flags.Listening, nil)
	if err == nil {
		err = c.CheckPaths()
	}
	if err != nil {
		return r, err
	}
	if flags.CheckConfig {
		for _, text := range c.Warnings() {
			output.Warn(errors.New(text))
		}
		return checked(), nil
	}
	// With another /proc sandboxes fail, and signals could reach unrelated processes.
	if err := state.CheckVisible(); err != nil {
		return r, err
	}
	makeThreads()
	proc.Expend()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	for _, text := range c.Warnings() {
		log.Warn("configuration", "note", text)
	}
	end, again := signals()
	lock, err := lockState(c.StateDir)
	if err != nil {
		return r, err
	}
	defer lock.Close() // nil if the directory cannot be locked, which server.New reports
	source, err := newRooms(&c, log)
	if err != nil {
		return r, err
	}
	defer source.close()
	s, err := server.New(c, tokens, source, log, version.String())
	if err != nil {
		return r, err
	}
	source.update(c.Images, s.WarmImages())
	s.TryLanguages()
	agents := mcp.New(s, version.String(), log)
	handler := s.Handler(agents)
	node, err := join(&c, s, handler, log)
	if err != nil {
		return r, err
	}
	reload := func(c config.Config, tokens config.Tokens) error {
		err := s.Reload(c, tokens)
		if err == nil {
			source.update(c.Images, s.WarmImages())
			agents.UpdateTools()
		}
		return err
	}
	web, ctx, err := attend(&c, &flags.Listening, handler, reload, end, again, log)
	if err != nil {
		return r, err
	}
	s.Stop()
	if node != nil {
		node.Announce()
	}
	s.Drain(ctx)
	ended(web, node, log)
	return r, nil
}

// makeThreads creates threads in advance, which Go uses before it creates others. Go ends the process if it cannot
// create a thread, so a command that uses up all tasks (pids.max) would end the server at its next blocking system call.
func makeThreads() {
	const most, part = 64, 8 // at most 1/part of the remaining tasks
	n := int64(most)
	if r, err := admission.Look(); err == nil {
		for _, b := range r.Bounds {
			n = min(n, (b.Max-b.Current)/part)
		}
	}
	proc.MakeThreads(int(n))
}

// lockState locks a state directory, because two servers would remove each other's new files and count them twice.
func lockState(dir string) (*os.File, error) {
	_ = os.MkdirAll(dir, 0o700) // [server.New] reports errors
	// After a server was killed while it forked, its child holds the lock for a moment.
	const moment = 2 * time.Second
	for end := time.Now().Add(moment); ; time.Sleep(moment / 50) {
		lock, err := lockDir(dir)
		switch {
		case !errors.Is(err, unix.EWOULDBLOCK):
			return lock, nil
		case time.Now().After(end):
			return nil, fmt.Errorf("state_dir %s: in use by another server; use one directory for each", dir)
		}
	}
}

// signals returns a channel for the signals to end, of which the second skips draining, and one for the signals to
// reload. Call it before listening. Each kind has its own channel, because many SIGHUPs could displace a SIGTERM
// (signal.Notify).
func signals() (end, reload <-chan os.Signal) {
	ends, reloads := make(chan os.Signal, 2), make(chan os.Signal, 1)
	signal.Notify(ends, unix.SIGTERM, unix.SIGINT)
	signal.Notify(reloads, unix.SIGHUP)
	signal.Ignore(unix.SIGPIPE)
	return ends, reloads
}

// attend serves requests on all sockets and reloads the configuration, until a signal to end. Running calls may finish
// until ctx is done; a second signal cancels it.
func attend(c *config.Config, flags *cli.Listening, handler http.Handler, reload func(config.Config, config.Tokens) error, end, again <-chan os.Signal, log *slog.Logger) (web *http.Server, ctx context.Context, err error) {
	listeners, err := listen(c)
	if err != nil {
		return nil, nil, err
	}
	web = server.Web(handler, server.Peer, log)
	web.IdleTimeout = 2 * time.Minute
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		log.Info("listening", "address", l.Addr().String())
		go func() { failed <- web.Serve(l) }()
	}
	_, _ = daemon.SdNotify(false, daemon.SdNotifyReady) // fails without systemd
	for {
		select {
		case err := <-failed:
			return nil, nil, err
		case <-end:
			_, _ = daemon.SdNotify(false, daemon.SdNotifyStopping)
			log.Info("draining")
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(c.DrainTimeout))
			go func() {
				<-end
				cancel()
			}()
			return web, ctx, nil
		case <-again:
			if _, _, err := settings(flags, reload); err != nil {
				log.Error("reload", "error", err)
			} else {
				log.Info("reloaded")
			}
		}
	}
}

// ended closes connections after their responses.
func ended(web *http.Server, node *cluster.Node, log *slog.Logger) {
	const moment = 5 * time.Second // for responses in transit
	ctx, cancel := context.WithTimeout(context.Background(), moment)
	defer cancel()
	if node != nil {
		node.Close(ctx)
	}
	if web.Shutdown(ctx) != nil {
		web.Close()
	}
	log.Info("ended")
}

var errNoListen = errors.New("no listening address; use --listen, such as --listen unix:/run/sbxrund.sock")

// settings returns the validated configuration with the flags, and passes it to reload unless that is nil.
func settings(flags *cli.Listening, reload func(config.Config, config.Tokens) error) (c config.Config, tokens config.Tokens, err error) {
	if c, err = config.Load(flags.Config); err != nil {
		return c, nil, err
	}
	if len(flags.Listen) > 0 {
		c.Listen = flags.Listen
	}
	for _, f := range []struct {
		to   *string
		from string
	}{{&c.TokenFile, flags.TokenFile}, {&c.TLSCert, flags.TLSCert}, {&c.TLSKey, flags.TLSKey},
		{&c.NATS.URL, flags.NATS}, {&c.NATS.Creds, flags.NATSCreds}, {&c.NATS.Node, flags.Node}} {
		if f.from != "" {
			*f.to = f.from
		}
	}
	if flags.DrainTimeout != 0 {
		c.DrainTimeout = values.Duration(flags.DrainTimeout)
	}
	if reload == nil && len(c.Listen) == 0 && !activated() && c.NATS.URL == "" {
		return c, nil, errNoListen
	}
	if err = c.Check(); err == nil && c.TokenFile != "" {
		tokens, err = config.LoadTokens(c.TokenFile)
	}
	var pair *tls.Certificate
	if err == nil {
		pair, err = loadCertificate(&c)
	}
	if err == nil && reload != nil {
		err = reload(c, tokens)
	}
	if err == nil && pair != nil {
		certificate.Store(pair)
	}
	return c, tokens, err
}
