package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/cluster"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/output"
)

func nodes(flags *cli.Nodes) (r output.Result, err error) {
	c, err := config.Load(flags.Config)
	if err != nil {
		return r, err
	}
	if flags.NATS != "" {
		c.NATS.URL = flags.NATS
	}
	if flags.NATSCreds != "" {
		c.NATS.Creds = flags.NATSCreds
	}
	if c.NATS.URL == "" {
		return r, errors.New("no NATS server configured; use --nats URL or --config FILE")
	}
	ctx, cancel := context.WithTimeout(context.Background(), cluster.QueryTimeout)
	defer cancel()
	bus, err := cluster.Connect(&c, "nodes", slog.New(slog.DiscardHandler))
	if err != nil {
		return r, err
	}
	defer bus.Close()
	found, err := cluster.QueryStatus(ctx, bus)
	if err != nil {
		return r, err
	}
	return output.Result{Value: found, Text: func(w io.Writer) error { return printNodes(w, found) }}, nil
}

func printNodes(w io.Writer, found *cluster.Status) error {
	t := output.NewTable(w, "KIND", "NAME", "STATE", "BUSY", "RUNNING", "WAITING", "OLDEST", "PLACES", "ROOMS", "SESSIONS", "TASKS", "VERSION")
	percent := func(part float64) string { return fmt.Sprintf("%.0f%%", 100*part) }
	for _, n := range found.Nodes {
		if n.State == api.StateLeft || n.State == api.StateLost {
			ago := time.Since(n.Heard).Round(time.Second)
			t.Row("node", n.Name, fmt.Sprintf("%s %v ago", n.State, ago), "", "", "", "", "", "", "", "", n.Version)
			continue
		}
		oldest := (time.Duration(n.Oldest) * time.Millisecond).Round(100 * time.Millisecond)
		t.Row("node", n.Name, n.State, percent(n.Busy()), n.Running, n.Waiting, oldest,
			n.Places, fmt.Sprintf("%d/%d", n.RoomsIdle, n.RoomsAll), n.Sessions, percent(n.Pressure), n.Version)
	}
	for _, n := range found.Gateways {
		t.Row("gateway", n.Name, n.State, "", "", "", "", "", "", "", "", n.Version)
	}
	return t.Flush()
}
