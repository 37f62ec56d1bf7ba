package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"github.com/sbxrun/sbxrun/internal/api"
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
		return refuse(&flags, err)
	}
	if flags.NATS != "" {
		c.NATS.URL = flags.NATS
	}
	if flags.NATSCreds != "" {
		c.NATS.Creds = flags.NATSCreds
	}
	if c.NATS.URL == "" {
		return refuse(&flags, errors.New("nats: it is not said where; give --nats URL, or --config FILE"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), cluster.LookFor)
	defer cancel()
	bus, err := cluster.Connect(&c, "nodes", slog.New(slog.DiscardHandler))
	if err != nil {
		return refuse(&flags, err)
	}
	defer bus.Close()
	found, err := cluster.Look(ctx, bus)
	if err == nil {
		err = printNodes(found, flags.JSON)
	}
	return outcome(&flags, err)
}

func printNodes(found *cluster.Found, asJSON bool) error {
	if asJSON {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		return out.Encode(found)
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KIND\tNAME\tSTATE\tBUSY\tRUNNING\tWAITING\tOLDEST\tPLACES\tROOMS\tSESSIONS\tTASKS\tVERSION")
	const percent = 100
	for _, n := range found.Nodes {
		if n.State == api.StateLeft || n.State == api.StateLost {
			ago := time.Since(n.Heard).Round(time.Second)
			fmt.Fprintf(w, "node\t%s\t%s %v ago\t\t\t\t\t\t\t\t\t%s\n", n.Name, n.State, ago, n.Version)
			continue
		}
		oldest := (time.Duration(n.Oldest) * time.Millisecond).Round(100 * time.Millisecond)
		fmt.Fprintf(w, "node\t%s\t%s\t%.0f%%\t%d\t%d\t%v\t%d\t%d/%d\t%d\t%.0f%%\t%s\n", n.Name, n.State, percent*n.Busy(), n.Running, n.Waiting, oldest,
			n.Places, n.RoomsIdle, n.RoomsAll, n.Sessions, percent*n.Pressure, n.Version)
	}
	for _, n := range found.Gateways {
		fmt.Fprintf(w, "gateway\t%s\t%s\t\t\t\t\t\t\t\t\t%s\n", n.Name, n.State, n.Version)
	}
	return w.Flush()
}
