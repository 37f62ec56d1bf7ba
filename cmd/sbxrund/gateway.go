package main

import (
	"errors"
	"log/slog"
	"net/http"
	"os"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/cluster"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/version"
)

// join makes the server a node of the configured cluster. It returns nil without one.
func join(c *config.Config, s *server.Server, handler http.Handler, log *slog.Logger) (*cluster.Node, error) {
	if c.NATS.URL == "" {
		return nil, nil
	}
	bus, err := cluster.Connect(c, cluster.NodeKind, log)
	if err != nil {
		return nil, err
	}
	return cluster.NewNode(bus, c.NATS.Name(), version.String(), s, handler, log)
}

func gateway(flags *cli.Gateway) (r output.Result, err error) {
	c, tokens, err := settings(&flags.Listening, nil)
	switch {
	case err != nil:
		return r, err
	case c.NATS.URL == "":
		return r, errors.New("gateway requires --nats")
	case len(c.Listen) == 0 && !activated():
		return r, errNoListen
	case flags.CheckConfig:
		return checked(), nil
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	end, again := signals()
	door, err := server.NewMiddleware(c, tokens, log)
	if err != nil {
		return r, err
	}
	bus, err := cluster.Connect(&c, cluster.GatewayKind, log)
	if err != nil {
		return r, err
	}
	defer bus.Close()
	g, err := cluster.NewGateway(bus, c.NATS.Name(), version.String(), door, log)
	if err != nil {
		return r, err
	}
	web, ctx, err := attend(&c, &flags.Listening, g.Handler(), door.Reload, end, again, log)
	if err != nil {
		return r, err
	}
	g.Drain()
	if web.Shutdown(ctx) != nil {
		web.Close()
	}
	g.Close()
	log.Info("ended")
	return r, nil
}
