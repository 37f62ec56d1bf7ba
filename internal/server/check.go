package server

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"path"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/admission"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/calls"
	"github.com/sbxrun/sbxrun/internal/cells"
	"github.com/sbxrun/sbxrun/internal/config"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/room"
	"github.com/sbxrun/sbxrun/internal/sessions"
	"github.com/sbxrun/sbxrun/internal/slot"
	"github.com/sbxrun/sbxrun/internal/tenants"
	"github.com/sbxrun/sbxrun/internal/values"
	"github.com/sbxrun/sbxrun/internal/workspace"
)

// execution is a checked call. Only the machine can make it fail from here on.
type execution struct {
	id       string
	caller   Identity
	ceilings config.Tenant

	argv, env []string
	dir       string
	stdin     string
	input     *calls.Input // follows stdin; nil if none
	shown     string       // the code shown in the list of recent calls
	files     []fileIn
	collect   []string

	parts          *parts // nil if none
	image          string // key; "" for the host's root
	named          bool   // the request named the image; otherwise it is the language's
	language       cells.Language
	timeout, grace time.Duration
	clamped        []string
	limits         limits.Request
	maxOutput      int64
	program        *slot.Program // nil if its interpreter cannot be prestarted
	code           string
	kill           bool  // kill everything if the output exceeds maxOutput
	maxAnswer      int64 // the part of maxOutput that fits into an answer

	session *sessions.Session // nil for a new sandbox
	process bool              // a background process of the session
	ended   error             // the session has ended; only a stored answer is returned

	memory   int64          // memory for the answer
	buffers  *tenants.Lease // the lease on memory, from admission until the answer is sent
	admitted *admission.Permit
	queued   time.Duration    // time in the queue
	left     []*result.Result // unproven teardowns, whose survivors keep the slot
}

// fileIn is a file to write to the workspace.
type fileIn struct {
	path string
	id   string // ID in the content store, instead of text
	text io.Reader
	size int64
	mode fs.FileMode
}

func usage(format string, args ...any) error {
	return api.NewError(api.Usage, fmt.Sprintf(format, args...), "")
}

// check validates a call and resolves its defaults and limits.
func (s *Server) check(w Identity, c *api.Call) (*execution, error) { return s.checkIn(w, nil, c) }

// checkIn is check for a background process of session x, unless x is nil.
func (s *Server) checkIn(w Identity, x *sessions.Session, c *api.Call) (*execution, error) {
	set := s.settings.Load()
	ex := &execution{session: x, process: x != nil, id: s.newID(), caller: w, ceilings: set.Of(w.Tenant), argv: c.Argv, dir: c.Workdir, stdin: c.Stdin, shown: set.shown(c.Argv, c.Code)}
	if len(c.Argv) == 0 && c.Language == "" && c.Code != "" {
		c.Language = defaultLanguage
	}
	switch {
	case (len(c.Argv) == 0) == (c.Language == ""):
		return nil, usage("give either argv or code")
	case len(c.Argv) > 0 && c.Code != "":
		return nil, usage("give either argv or code")
	case len(c.Argv) > 0 && c.Argv[0] == "":
		return nil, usage("the command is an empty string")
	}
	for _, word := range slices.Concat(c.Argv, []string{c.Workdir}) {
		if strings.ContainsRune(word, 0) {
			return nil, usage("argv or workdir contains a NUL byte")
		}
	}
	if err := room.CheckWorkdir(c.Workdir); err != nil {
		return nil, usage("workdir %q is not an absolute path", c.Workdir)
	}
	if c.Language != "" {
		l, err := set.language(c.Language)
		if err != nil {
			return nil, err
		}
		ex.language = l
		ex.argv = l.Argv(room.Home)
		if l.Ahead > 0 && !declaresEncoding(c.Code) {
			ex.program = &slot.Program{Args: ex.argv, File: l.File, Ahead: l.Ahead}
			ex.code = c.Code
		}
		ex.files = append(ex.files, fileIn{path: l.File, text: strings.NewReader(c.Code), size: int64(len(c.Code)), mode: 0o600})
	}
	for name, value := range c.Env {
		if _, err := values.ParsePair(name + "=" + value); err != nil || strings.Contains(name, "=") || strings.ContainsRune(value, 0) {
			return nil, usage("invalid env %.64q: names consist of letters, digits and underscores, and values contain no NUL byte", name)
		}
		ex.env = append(ex.env, name+"="+value)
	}
	sort.Strings(ex.env)
	var err error
	if ex.parts, err = checkParts(set, w.Tenant, ex.ceilings, c.Parts); err != nil {
		return nil, err
	}
	ex.named = c.Image != ""
	ex.image = cmp.Or(c.Image, ex.language.Image)
	if err := set.allows(ex.ceilings, ex.image); err != nil {
		return nil, err
	}
	return ex, ex.settle(set, c)
}

// ahead returns the program if its interpreter can be prestarted, knowing only the limits of the call.
func (ex *execution) ahead() *slot.Program {
	if ex.program == nil || ex.stdin != "" || len(ex.env) > 0 || ex.dir != "" || ex.grace > 0 || ex.kill || ex.limits.CPUTime > 0 {
		return nil
	}
	for _, f := range ex.files[1:] { // the first is the program
		if f.path == ex.program.File {
			return nil
		}
	}
	ex.program.Limits = ex.limits
	return ex.program
}

// declaresEncoding reports whether the first two lines may declare a source encoding. Python would seek back
// in the file then, which does not work with a FIFO.
func declaresEncoding(code string) bool {
	first, rest, _ := strings.Cut(code, "\n")
	second, _, _ := strings.Cut(rest, "\n")
	return strings.Contains(first+second, "coding")
}

// defaultLanguage is the language of code without a language.
const defaultLanguage = "python"

// language returns an available language.
func (set *settings) language(name string) (cells.Language, error) {
	l, ok := set.languages[name]
	if !ok {
		return l, api.NewError(api.Usage, fmt.Sprintf("unknown language %.64q", name), "use one of "+strings.Join(slices.Sorted(maps.Keys(set.languages)), ", "))
	}
	return l, nil
}

// settle checks what calls and cells have in common: files, times, limits and output.
func (ex *execution) settle(set *settings, c *api.Call) error {
	for _, f := range c.Files {
		in, err := checkFile(f)
		if err != nil {
			return err
		}
		ex.files = append(ex.files, in)
	}
	const most = 4 << 10 // each pattern is matched against every file name
	patterns := 0
	for _, pattern := range c.Collect {
		if _, err := path.Match(pattern, ""); err != nil || strings.Trim(pattern, "/") == "" || pattern[0] == '/' {
			return usage("invalid collect pattern %.64q", pattern)
		}
		if patterns += len(pattern); patterns > most {
			return usage("the patterns of collect have more than %d bytes in total", most)
		}
	}
	ex.collect = c.Collect
	return ex.bound(set, c)
}

func checkFile(f api.FileIn) (in fileIn, err error) {
	if f.PathBase64 != nil {
		if f.Path != "" {
			return in, usage("file %q: give either path or path_base64", f.Path)
		}
		f.Path = string(f.PathBase64)
	}
	if in.path, err = workspace.Clean(f.Path); err != nil {
		return in, err
	}
	given := 0
	if f.ID != "" {
		given, in.id = given+1, f.ID
	}
	if f.Text != nil {
		given, in.text, in.size = given+1, strings.NewReader(*f.Text), int64(len(*f.Text))
	}
	if f.Base64 != nil {
		b, err := base64.StdEncoding.DecodeString(*f.Base64)
		if err != nil {
			return in, usage("file %q: invalid base64", f.Path)
		}
		given, in.text, in.size = given+1, strings.NewReader(string(b)), int64(len(b))
	}
	if given != 1 {
		return in, usage("file %q: give exactly one of id, text and base64", f.Path)
	}
	in.mode = 0o644
	if f.Mode != "" {
		n, err := strconv.ParseUint(f.Mode, 8, 32)
		if err != nil {
			return in, usage("file %q: mode %q is not octal", f.Path, f.Mode)
		}
		in.mode = fs.FileMode(n).Perm()
	}
	return in, nil
}

// size estimates the memory of a call while it waits and runs, without its answer.
func (ex *execution) size() int64 {
	const rest = 4096
	size := rest + len(ex.stdin)
	for _, word := range slices.Concat(ex.argv, ex.env) {
		size += wordRest + len(word)
	}
	for _, f := range ex.files {
		size += int(f.size) + len(f.path)
	}
	return int64(size) + ex.lists()
}

// outputCap limits output for tenants without a limit, because budgets add up multiples of it.
const outputCap = 1 << 40

// bound resolves times, limits and output: the server's default if absent, and at most the ceiling.
func (ex *execution) bound(set *settings, c *api.Call) error {
	usual, longest := ex.timeouts(set)
	ex.timeout = ex.clamp("timeout_ms", c.TimeoutMS, usual, longest)
	ex.grace = ex.clamp("grace_ms", c.GraceMS, 0, time.Duration(set.Call.MaxGrace))
	asked, most := c.Limits.MaxOutput, int64(outputCap)
	if own := int64(ex.ceilings.MaxOutput); own > 0 {
		most = min(most, own)
	}
	ex.maxOutput = cmp.Or(asked, int64(set.Call.MaxOutput))
	if ex.maxOutput > most {
		ex.maxOutput = most
		if asked > 0 {
			ex.clamped = append(ex.clamped, "limits.max_output")
		}
	}
	ex.kill = c.Limits.Output == "kill"
	ex.maxAnswer = min(ex.maxOutput, int64(set.Call.MaxAnswer))
	var err error
	ex.limits, err = boundLimits(set, ex.ceilings, c.Limits)
	return err
}

// timeouts returns the default and the maximum timeout of an execution: a call, a cell, or a background
// process. A background process may run until its session ends; for everything else the maximum is
// call.max_timeout. The tenant's max_timeout applies to all of them.
func (ex *execution) timeouts(set *settings) (usual, longest time.Duration) {
	usual, longest = time.Duration(set.Call.Timeout), time.Duration(set.Call.MaxTimeout)
	if ex.process {
		longest = max(1, time.Until(ex.session.Expires))
		usual = longest
	}
	if own := time.Duration(ex.ceilings.MaxTimeout); own > 0 {
		longest = min(longest, own)
	}
	return min(usual, longest), longest
}

// boundLimits resolves the limits. A value above the tenant's ceiling is rejected instead of reduced, because
// a program that needs more would fail in its own way.
func boundLimits(set *settings, t config.Tenant, l api.Limits) (limits.Request, error) {
	out := limits.Request{Memory: l.Memory, Pids: l.Pids, CPUs: l.CPUs, CPUTime: milliseconds(l.CPUTimeMS), FSize: l.FSize, NoFile: limits.Files(set.Call.NoFile)}
	orElse(&out.Memory, int64(set.Call.Memory), int64(t.Memory))
	orElse(&out.Pids, set.Call.Pids, t.Pids)
	orElse(&out.CPUs, set.Call.CPUs, t.CPUs)
	for _, limit := range []struct {
		name         string
		asked, bound float64
	}{{"memory", float64(l.Memory), float64(t.Memory)}, {"pids", float64(l.Pids), float64(t.Pids)}, {"cpus", l.CPUs, t.CPUs}} {
		if limit.bound > 0 && limit.asked > limit.bound {
			return out, api.NewError(api.Policy, fmt.Sprintf("limits.%s is above the tenant's ceiling of %s", limit.name, strconv.FormatFloat(limit.bound, 'f', -1, 64)), "request less")
		}
	}
	if e := out.Check(); e != nil {
		return out, api.NewError(api.Usage, e.Message, e.Hint)
	}
	return out, nil
}

// orElse sets an absent limit to the server's default, or to the tenant's ceiling if that is lower or there
// is no default.
func orElse[T int64 | float64](limit *T, usual, ceiling T) {
	if *limit != 0 {
		return
	}
	if *limit = usual; ceiling > 0 && (usual == 0 || usual > ceiling) {
		*limit = ceiling
	}
}

// clamp returns a time, reduced to the maximum if necessary.
func (ex *execution) clamp(name string, asked float64, usual, most time.Duration) time.Duration {
	if asked == 0 {
		return usual
	}
	d := milliseconds(asked)
	if d > most {
		ex.clamped = append(ex.clamped, name)
		return most
	}
	return d
}

// milliseconds converts a time of the interface. It never rounds to 0, which means no deadline to the engine.
func milliseconds(ms float64) time.Duration {
	if ms == 0 {
		return 0
	}
	return max(1, time.Duration(min(ms*float64(time.Millisecond), math.MaxInt64/2)))
}
