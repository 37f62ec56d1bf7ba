// Package config is what the server is told: the file in TOML, the tokens, and what holds
// where neither says anything. Nothing in a file is ignored: an unknown key is an error.
package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/state"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/values"
)

// Config is the whole file. docs/reference/configuration.md has every key. A number with the tag zero:"no" is more than 0.
type Config struct {
	Listen       []string        `toml:"listen"`
	TokenFile    string          `toml:"token_file"`
	TLSCert      string          `toml:"tls_cert"`
	TLSKey       string          `toml:"tls_key"`
	StateDir     string          `toml:"state_dir"`
	DataDir      string          `toml:"data_dir"`
	DrainTimeout values.Duration `toml:"drain_timeout"`
	Places       int             `toml:"places" zero:"no"`
	Processes    int             `toml:"processes"`
	MaxBody      values.Size     `toml:"max_body" zero:"no"`
	Buffers      values.Size     `toml:"buffers" zero:"no"`
	Connections  int             `toml:"connections" zero:"no"`

	MetricsTenants []string `toml:"metrics_tenants"`
	Hosts          []string `toml:"hosts"`
	ShowCode       bool     `toml:"show_code"`

	NATS      NATS                      `toml:"nats"`
	Call      Call                      `toml:"call"`
	Calls     Calls                     `toml:"calls"`
	Rooms     Rooms                     `toml:"rooms"`
	Sandbox   Sandbox                   `toml:"sandbox"`
	Sessions  Sessions                  `toml:"sessions"`
	Files     Files                     `toml:"files"`
	Overlays  map[string]string         `toml:"overlays"`
	Tenant    Tenant                    `toml:"tenant"`
	Tenants   map[string]Tenant         `toml:"tenants"`
	Languages map[string]cells.Language `toml:"languages"`
}

// NATS is how a node, or a gateway, takes part in a cluster.
type NATS struct {
	URL      string `toml:"url"`
	Creds    string `toml:"creds"`
	CA       string `toml:"ca"`
	Cert     string `toml:"cert"`
	Key      string `toml:"key"`
	Cluster  string `toml:"cluster"`
	Replicas int    `toml:"replicas"`
	Node     string `toml:"node"`
}

// Name is what this one is called in the cluster.
func (n *NATS) Name() string {
	if n.Node != "" {
		return n.Node
	}
	host, _ := os.Hostname() // without one, a name has to be given
	host, _, _ = strings.Cut(host, ".")
	return host
}

// ValidName reports whether a node, a gateway or a cluster can be called so: it is a part of subjects and of ids.
func ValidName(name string) bool {
	const most = 32
	return name != "" && len(name) <= most && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == ""
}

// check finds what is wrong.
func (n *NATS) check() error {
	if n.URL == "" {
		return nil
	}
	for _, name := range []string{n.Name(), n.Cluster} {
		if !ValidName(name) {
			return fmt.Errorf("nats: %q as the name of a node or cluster: want letters, digits, dashes and underscores, at most 32", name)
		}
	}
	switch {
	case n.Replicas < 1 || n.Replicas > 5:
		return errors.New("nats.replicas: want 1 to 5")
	case (n.Cert == "") != (n.Key == ""):
		return errors.New("nats.cert and nats.key go together")
	}
	for one := range strings.SplitSeq(n.URL, ",") {
		if one = strings.TrimSpace(one); !strings.Contains(one, "://") {
			one = "nats://" + one
		}
		if u, err := url.Parse(one); err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			// What it is may have a password in it.
			return errors.New("nats.url, or --nats: want nats://HOST:PORT, or tls, ws or wss in place of nats; or several of them, with commas")
		}
	}
	for _, file := range [][2]string{{"creds", n.Creds}, {"ca", n.CA}, {"cert", n.Cert}, {"key", n.Key}} {
		if f, err := os.Open(file[1]); err == nil {
			f.Close()
		} else if file[1] != "" {
			return fmt.Errorf("nats.%s: %w; name a file that this user can read", file[0], err)
		}
	}
	return nil
}

// Call is what holds for each call.
type Call struct {
	Timeout    values.Duration `toml:"timeout" zero:"no"`
	MaxTimeout values.Duration `toml:"max_timeout" zero:"no"`
	MaxGrace   values.Duration `toml:"max_grace"`
	MaxOutput  values.Size     `toml:"max_output" zero:"no"`
	MaxAnswer  values.Size     `toml:"max_answer" zero:"no"`
	Memory     values.Size     `toml:"memory"`
	Pids       int64           `toml:"pids"`
	CPUs       float64         `toml:"cpus"`
	NoFile     int64           `toml:"nofile"`
}

// Calls is what holds for calls that nobody waits for.
type Calls struct {
	Keep   values.Duration `toml:"keep" zero:"no"`
	Most   int             `toml:"most" zero:"no"`
	Output values.Size     `toml:"output" zero:"no"`
}

// Rooms is how many rooms are made ahead.
type Rooms struct {
	Min   int `toml:"min"`
	Max   int `toml:"max"`
	Calls int `toml:"calls"`
}

// Sandbox is what calls see.
type Sandbox struct {
	Network     string      `toml:"network"`
	TmpSize     values.Size `toml:"tmp_size" zero:"no"`
	Mounts      []string    `toml:"mounts"`
	AllSyscalls bool        `toml:"all_syscalls"`
}

// Sessions is what holds for each session.
type Sessions struct {
	IdleTimeout values.Duration `toml:"idle_timeout" zero:"no"`
	Lifetime    values.Duration `toml:"lifetime" zero:"no"`
	MaxEntries  int             `toml:"max_entries" zero:"no"`
}

// Files is the content store.
type Files struct {
	TTL   values.Duration `toml:"ttl" zero:"no"`
	Quota values.Size     `toml:"quota"`
}

// Tenant is the ceilings of one tenant. What is zero is no bound, but for Queue, Sessions and Files.
type Tenant struct {
	Concurrency int             `toml:"concurrency"`
	Queue       int             `toml:"queue"`
	Rate        float64         `toml:"rate"`
	Sessions    int             `toml:"sessions"`
	Processes   int             `toml:"processes"`
	Requests    int             `toml:"requests"`
	MaxTimeout  values.Duration `toml:"max_timeout"`
	Memory      values.Size     `toml:"memory"`
	Pids        int64           `toml:"pids"`
	CPUs        float64         `toml:"cpus"`
	MaxOutput   values.Size     `toml:"max_output"`
	Buffers     values.Size     `toml:"buffers"`
	Output      values.Size     `toml:"output"`
	Files       values.Size     `toml:"files"`
	// What is beside the workspace. Here zero is none, and a list that is empty is not one that is
	// left out.
	Overlays  []string    `toml:"overlays"`
	Network   []string    `toml:"network"`
	Volumes   int         `toml:"volumes"`
	Snapshots values.Size `toml:"snapshots"`
}

// Ceilings are those of the gate.
func (t Tenant) Ceilings() tenants.Ceilings {
	return tenants.Ceilings{Concurrency: t.Concurrency, Queue: t.Queue, Rate: t.Rate}
}

// Default is what holds where the file says nothing.
func Default() Config {
	return Config{
		DrainTimeout: values.Duration(30 * time.Second),
		Places:       64,
		Processes:    256,
		MaxBody:      16 << 20,
		Buffers:      512 << 20,
		Connections:  4096,
		NATS:         NATS{Cluster: "sbxrun", Replicas: 1},
		StateDir:     state.ServerDir(),
		Call: Call{
			Timeout: values.Duration(30 * time.Second), MaxTimeout: values.Duration(5 * time.Minute), MaxGrace: values.Duration(30 * time.Second), MaxOutput: 1 << 20, MaxAnswer: 8 << 20, NoFile: 1024,
		},
		Calls:     Calls{Keep: values.Duration(10 * time.Minute), Most: 1024, Output: 2 << 30},
		Rooms:     Rooms{Min: 4, Max: 32, Calls: 1000},
		Sandbox:   Sandbox{Network: "none", TmpSize: 256 << 20},
		Sessions:  Sessions{IdleTimeout: values.Duration(15 * time.Minute), Lifetime: values.Duration(24 * time.Hour), MaxEntries: 10_000},
		Files:     Files{TTL: values.Duration(24 * time.Hour), Quota: 1 << 30},
		Tenant:    Tenant{Concurrency: 32, Queue: 128, Sessions: 64, Processes: 32, Requests: 1024, MaxOutput: 64 << 20, Buffers: 256 << 20, Output: 512 << 20, Files: 256 << 20},
		Languages: cells.Languages(),
	}
}

// Load reads a file; "" for none.
func Load(name string) (Config, error) {
	c := Default()
	if name == "" {
		return c, nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return c, fmt.Errorf("--config: %w; name a file in TOML that this user can read", err)
	}
	if err := decode(name, text, reflect.New(withQuoted(reflect.TypeOf(c))).Interface()); err != nil {
		return c, err
	}
	if err := decode(name, text, &c); err != nil {
		return c, err
	}
	// A tenant of the file that leaves a ceiling out has that of all; 0 is not left out. So it is read
	// once more, over what holds for all.
	for name := range c.Tenants {
		c.Tenants[name] = c.Tenant
	}
	return c, toml.Unmarshal(text, &struct {
		Tenants map[string]Tenant `toml:"tenants"`
	}{c.Tenants})
}

// decode reads a file into a struct, and says what is wrong in it.
func decode(name string, text []byte, to any) error {
	dec := toml.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(to)
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch {
	case errors.As(err, &unknown):
		e := unknown.Errors[0]
		row, _ := e.Position()
		return fmt.Errorf("%s:%d: there is no key %s", name, row, strings.Join(e.Key(), "."))
	case errors.As(err, &wrong):
		row, column := wrong.Position()
		message := strings.TrimPrefix(wrong.Error(), "toml: ")
		if is, field, ok := strings.Cut(strings.TrimPrefix(message, "cannot decode TOML "), " into struct field "); ok { // of which the names are Go's
			want := field[strings.LastIndex(field, " of type ")+len(" of type "):]
			message = fmt.Sprintf("%s: want %s, not a TOML %s", strings.Join(wrong.Key(), "."), cmp.Or(tomlTypes[want], want), is)
		}
		return fmt.Errorf("%s:%d:%d: %s", name, row, column, message)
	case err != nil:
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// quoted stands for [values.Duration] where only the TOML is looked at: go-toml sets that to an integer
// without asking it, as so many nanoseconds.
type quoted string

// withQuoted returns a type that is like t, but for quoted.
func withQuoted(t reflect.Type) reflect.Type {
	switch {
	case t == reflect.TypeFor[values.Duration]():
		return reflect.TypeFor[quoted]()
	case t.Kind() == reflect.Map:
		return reflect.MapOf(t.Key(), withQuoted(t.Elem()))
	case t.Kind() == reflect.Struct:
		fields := reflect.VisibleFields(t)
		for i := range fields {
			fields[i].Type = withQuoted(fields[i].Type)
		}
		return reflect.StructOf(fields)
	}
	return t
}

// tomlTypes names types of Go as TOML does.
var tomlTypes = map[string]string{
	"config.quoted": `a string: "5", "0.5", "1500ms" or "5m"`,

	"int": "an integer", "int64": "an integer", "float64": "a float", "string": `a string, in "quotes"`, "bool": "true or false", "[]string": `a list of strings: ["a", "b"]`,
}

// Check finds what is wrong for everybody.
func (c *Config) Check() error {
	for _, l := range c.Listen {
		network, address, _ := strings.Cut(l, ":")
		switch {
		case network == "unix" && path.IsAbs(address) && len(address) < 108: // sun_path of unix(7)
		case network == "tcp" && strings.Contains(address, ":"):
			if c.TokenFile == "" {
				return fmt.Errorf("listen %q: TCP is refused without token_file: whoever reached it could run commands", l)
			}
		default:
			return fmt.Errorf("listen %q: want unix:PATH, absolute and shorter than 108 bytes, or tcp:HOST:PORT", l)
		}
	}
	if !path.IsAbs(c.StateDir) {
		return fmt.Errorf("state_dir %q: want an absolute path", c.StateDir)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return errors.New("tls_cert and tls_key go together")
	}
	if err := c.NATS.check(); err != nil {
		return err
	}
	if err := checkNumbers("", reflect.ValueOf(*c)); err != nil {
		return err
	}
	if err := checkLimits("call", c.Call.Memory, c.Call.Pids, c.Call.CPUs); err != nil {
		return err
	}
	if c.Rooms.Max != 0 && c.Rooms.Max < c.Rooms.Min {
		return errors.New("rooms: want min from 0 to max")
	}
	if c.Call.Timeout > c.Call.MaxTimeout {
		return errors.New("call.timeout is above call.max_timeout")
	}
	if _, err := c.Policy(); err != nil {
		return err
	}
	if err := c.checkParts(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(c.Languages)) {
		if err := c.Languages[name].Check(); err != nil {
			return fmt.Errorf("languages.%s: %w", name, err)
		}
	}
	return nil
}

// checkLimits finds limits under which no call could run: one that asks for none has them.
func checkLimits(name string, memory values.Size, pids int64, cpus float64) error {
	if e := (limits.Request{Memory: int64(memory), Pids: pids, CPUs: cpus}).Check(); e != nil {
		return fmt.Errorf("%s: %w", name, e)
	}
	return nil
}

// checkNumbers finds numbers below 0, of which no key has a use, and those that are not to be 0. TOML's own
// numbers do not pass the checks of package values.
func checkNumbers(name string, v reflect.Value) error {
	negative := false
	switch {
	case v.CanInt():
		negative = v.Int() < 0
	case v.CanFloat():
		negative = !(v.Float() >= 0) // nan
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			key := strings.TrimPrefix(name+"."+tag.Get("toml"), ".")
			if err := checkNumbers(key, v.Field(i)); err != nil {
				return err
			}
			if tag.Get("zero") == "no" && v.Field(i).IsZero() {
				return fmt.Errorf("%s: want more than 0", key)
			}
		}
	case v.Kind() == reflect.Map:
		for _, key := range slices.SortedFunc(slices.Values(v.MapKeys()), func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) }) {
			if err := checkNumbers(name+"."+key.String(), v.MapIndex(key)); err != nil {
				return err
			}
		}
	}
	if negative {
		return fmt.Errorf("%s: want 0 or more", name)
	}
	return nil
}

// CheckPaths finds what the machine does not have of the directories that sandboxes are shown.
func (c *Config) CheckPaths() error {
	missing := func(key, name string) error {
		if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: there is no %q; create it, or leave it out", key, name)
		}
		return nil // that it cannot be used for another reason is found when it is
	}
	p, err := c.Policy()
	for _, m := range p.Mounts {
		err = cmp.Or(err, missing("sandbox.mounts", m.Source))
	}
	for _, name := range slices.Sorted(maps.Keys(c.Overlays)) {
		err = cmp.Or(err, missing("overlays."+name, c.Overlays[name]))
	}
	return err
}

// Policy is what the sandbox of a call shows.
func (c *Config) Policy() (p room.Policy, err error) {
	p = room.Policy{Cwd: room.CwdNone, TmpSize: int64(c.Sandbox.TmpSize), NoFilter: c.Sandbox.AllSyscalls}
	switch c.Sandbox.Network {
	case "", "none":
	case "host":
		p.Network = room.NetHost
	default:
		return p, fmt.Errorf("sandbox.network %q: want none or host", c.Sandbox.Network)
	}
	for _, m := range c.Sandbox.Mounts {
		if !path.IsAbs(m) {
			return p, fmt.Errorf("sandbox.mounts: %q: want SRC or SRC:DST, absolute paths", m)
		}
		source, dest, err := room.ParseBind(m, "")
		if err != nil {
			return p, fmt.Errorf("sandbox.mounts: %w", err)
		}
		p.Mounts = append(p.Mounts, room.Mount{Source: source, Dest: dest})
	}
	p.Mounts = slices.Clip(p.Mounts) // a session adds its own to a copy
	return p, nil
}

// Of returns the ceilings of a tenant.
func (c *Config) Of(tenant string) Tenant {
	if t, ok := c.Tenants[tenant]; ok {
		return t
	}
	return c.Tenant
}
