package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"text/tabwriter"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/cluster"
	"github.com/sbxrun/sbxrun/internal/config"
)

// nodes lists who takes part in a cluster.
func nodes(args []string) int {
	var flags cli.Nodes
	if code, done := parse(&flags, args); done {
		return code
	}
	c, err := config.Load(flags.Config)
	if err != nil {
		return fail(err)
	}
	if flags.NATS != "" {
		c.NATS.URL = flags.NATS
	}
	if flags.NATSCreds != "" {
		c.NATS.Creds = flags.NATSCreds
	}
	if c.NATS.URL == "" {
		return fail(errors.New("nats: it is not said where; give --nats URL, or --config FILE"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), cluster.LookFor)
	defer cancel()
	bus, err := cluster.Connect(&c, "nodes", slog.New(slog.DiscardHandler))
	if err != nil {
		return fail(err)
	}
	defer bus.Close()
	found, err := cluster.Look(ctx, bus)
	if err == nil {
		err = printNodes(found, flags.JSON)
	}
	if err != nil {
		return fail(err)
	}
	return 0
}

func printNodes(found *cluster.Found, asJSON bool) error {
	if asJSON {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		return out.Encode(found)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KIND\tNAME\tSTATE\tRUNNING\tWAITING\tPLACES\tROOMS\tSESSIONS\tTASKS\tVERSION")
	for _, n := range append(found.Nodes, found.Gateways...) {
		state := "ready"
		if n.Draining {
			state = "draining"
		}
		if n.Kind == cluster.GatewayKind {
			fmt.Fprintf(w, "%s\t%s\t%s\t\t\t\t\t\t\t%s\n", n.Kind, n.Name, state, n.Version)
			continue
		}
		const percent = 100
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%d/%d\t%d\t%.0f%%\t%s\n", n.Kind, n.Name, state, n.Running, n.Waiting, n.Places, n.RoomsIdle, n.RoomsAll, n.Sessions, percent*n.Pressure, n.Version)
	}
	return w.Flush()
}
