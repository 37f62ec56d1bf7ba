package config

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"path/filepath"
	"slices"

	"github.com/sbxrun/sbxrun/internal/devices"
	"github.com/sbxrun/sbxrun/internal/network"
	"github.com/sbxrun/sbxrun/internal/snapshots"
	"github.com/sbxrun/sbxrun/internal/state"
)

// checkParts validates overlays, images, volumes, networks and tenants.
func (c *Config) checkParts() error {
	if c.DataDir != "" && !path.IsAbs(c.DataDir) {
		return fmt.Errorf("data_dir %q: want an absolute path", c.DataDir)
	}
	for _, name := range slices.Sorted(maps.Keys(c.Overlays)) {
		if dir := c.Overlays[name]; !path.IsAbs(dir) || path.Clean(dir) == "/" || state.ValidName(name) != nil {
			return fmt.Errorf("overlays.%s = %q: want a name of letters, digits, dots, dashes and underscores, and an absolute path other than /", name, dir)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Images)) {
		if state.ValidName(name) != nil {
			return fmt.Errorf("images.%s: want a name of letters, digits, dots, dashes and underscores", name)
		}
		if c.Images[name].Image == "" {
			return fmt.Errorf("images.%s.image: want the name of an image", name)
		}
		for _, d := range c.Images[name].Devices {
			if err := devices.Check(d); err != nil {
				return fmt.Errorf("images.%s.devices: %w", name, err)
			}
		}
		if err := c.Images[name].Rooms.check("images." + name + ".rooms"); err != nil {
			return err
		}
	}
	check := func(where string, t Tenant) error {
		if err := checkLimits(where, t.Memory, t.Pids, t.CPUs); err != nil {
			return err
		}
		for _, name := range t.Overlays {
			if c.Overlays[name] == "" {
				return fmt.Errorf("%s.overlays: no %q in [overlays]", where, name)
			}
		}
		for _, name := range t.Images {
			if _, ok := c.Images[name]; !ok {
				return fmt.Errorf("%s.images: no %q in [images]", where, name)
			}
		}
		if len(t.Network) > 0 && c.Sandbox.Network == "host" {
			return fmt.Errorf("%s.network: cannot be combined with sandbox.network = \"host\"", where)
		}
		for _, word := range t.Network {
			if r, err := network.ParseRule(word); err != nil {
				return fmt.Errorf("%s.network: %w", where, err)
			} else if _, err := network.Compile(r); err != nil {
				return fmt.Errorf("%s.network: %w", where, err)
			}
		}
		return nil
	}
	if err := check("tenant", c.Tenant); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Tenants)) {
		if !ValidTenant(name) {
			return fmt.Errorf("tenants.%s: want the name of a token in token_file, or %sUID for a user of a Unix socket", name, Local)
		}
		if err := check("tenants."+name, c.Tenants[name]); err != nil {
			return err
		}
	}
	return nil
}

// Warnings returns permitted settings that are probably mistakes.
func (c *Config) Warnings() (list []string) {
	seen := map[string]bool{} // tenants inherit the list of [tenant]
	add := func(where string, t Tenant) {
		for _, word := range t.Network {
			if r, err := network.ParseRule(word); err == nil && r.TopLevel() != "" && !seen[word] {
				seen[word] = true
				list = append(list, where+".network: "+r.TopLevel())
			}
		}
	}
	add("tenant", c.Tenant)
	for _, name := range slices.Sorted(maps.Keys(c.Tenants)) {
		add("tenants."+name, c.Tenants[name])
	}
	return list
}

// Data returns the directory of a tenant's volumes and snapshots. Names of tenants are valid file names.
func (c *Config) Data(tenant string) (string, error) {
	dir := c.DataDir
	if dir == "" {
		own, err := snapshots.Dir()
		if err != nil {
			return "", err
		}
		dir = filepath.Join(filepath.Dir(own), "serve")
	}
	return filepath.Join(dir, tenant), nil
}

// Within reports whether the tenant may reach a host; own are the addresses of this host.
func (t Tenant) Within(r network.Rule, own []netip.Addr) bool {
	return slices.ContainsFunc(t.Network, func(word string) bool {
		most, err := network.ParseRule(word) // validated by Check
		return err == nil && network.Covers(most, r, own)
	})
}
