package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sbxrun/sbxrun/internal/cli"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/mcp"
	"github.com/sbxrun/sbxrun/internal/output"
	"github.com/sbxrun/sbxrun/internal/server"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/version"
)

// mcpCommand serves one agent on stdin and stdout.
func mcpCommand(flags *cli.MCP) (r output.Result, err error) {
	c, err := config.Load(flags.Config)
	if err == nil {
		c.Listen = nil // it opens no sockets
		err = c.Check()
	}
	if err == nil {
		err = c.CheckPaths()
	}
	if err != nil {
		return r, err
	}
	if flags.CheckConfig {
		return checked(), nil
	}
	if err := state.CheckVisible(); err != nil {
		return r, err
	}
	return r, serveStdio(&c)
}

func serveStdio(c *config.Config) error {
	told, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	defer stop()
	signal.Ignore(unix.SIGPIPE)
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	lock, err := ownState(c)
	if err != nil {
		return err
	}
	defer os.RemoveAll(c.StateDir)
	defer lock.Close()
	// An agent usually makes one call at a time.
	c.Rooms.Min = min(c.Rooms.Min, 1)
	for key, m := range c.Images {
		m.Rooms.Min = min(m.Rooms.Min, 1)
		c.Images[key] = m
	}
	source, err := newRooms(c, log)
	if err != nil {
		return err
	}
	defer source.close()
	s, err := server.New(*c, nil, source, log, version.String())
	if err != nil {
		return err
	}
	source.update(c.Images, s.WarmImages())
	s.TryLanguages()
	return mcp.New(s, version.String(), log).Serve(told, fmt.Sprintf("%s%d", config.Local, os.Getuid()), os.Stdin, os.Stdout)
}

// ownState creates and locks a state directory for this process. It removes the directories of killed processes.
func ownState(c *config.Config) (*os.File, error) {
	base := c.StateDir + "-mcp-"
	const young = time.Minute // may not be locked yet
	old, _ := filepath.Glob(base + "*")
	for _, name := range old {
		var st unix.Stat_t
		if unix.Lstat(name, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || time.Since(time.Unix(st.Mtim.Unix())) < young {
			continue
		}
		if lock, err := lockDir(name); err == nil {
			_ = os.RemoveAll(name) // the next start retries
			lock.Close()
		}
	}
	err := os.MkdirAll(filepath.Dir(base), 0o700)
	if err == nil {
		c.StateDir, err = os.MkdirTemp(filepath.Dir(base), filepath.Base(base))
	}
	if err != nil {
		return nil, fmt.Errorf("state_dir: %w; use a directory that this user can write to", err)
	}
	return lockDir(c.StateDir)
}

func lockDir(name string) (*os.File, error) {
	dir, err := os.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}
