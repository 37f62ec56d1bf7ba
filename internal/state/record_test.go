package state

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sbxrun/sbxrun/cleanup/result"
	"github.com/sbxrun/sbxrun/internal/limits"
	"github.com/sbxrun/sbxrun/internal/proc"
	"github.com/sbxrun/sbxrun/internal/safeopen"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// fullRecord has every member.
func fullRecord() Record {
	uid, gid := uint32(65534), uint32(0)
	return Record{
		Version: 1, ID: testID(1), Name: "web-1.x_y", Tags: map[string]string{"a": "b", "": "\x00\n\"{}"},
		Argv: []string{"sh", "-c", "echo \"}\" <&>"}, CreatedAt: "2026-01-01T00:00:00.000Z", Phase: Ended,
		Supervisor: proc.Identity{PID: 2, Start: 1<<64 - 1, BootID: "25fe2ea7-6fbe-4e2a-bd25-bf5a4c9a8b9e", PIDNS: 4026531836},
		Init:       &proc.Identity{PID: 1 << 22, Start: 5, BootID: "25fe2ea7-6fbe-4e2a-bd25-bf5a4c9a8b9e", PIDNS: 4026532000},
		UID:        &uid, GID: &gid, Workdir: "/w", Net: "none", Hostname: "h", TimeoutMS: 1.5, IdleTimeoutMS: 1e6,
		Overlays: []Overlay{{Source: "/s", Dest: "/d", Since: "2026-01-01T00:00:00Z", Upper: "/u", Layer: 9, Layers: []Layer{{SHA256: "ab", Size: 1, Bytes: 2, Entries: 3}}}},
		Ready:    &Ready{Probe: "tcp:80", ReadyAt: "x", Error: "y"},
		Logs:     &Logs{StdoutBytes: 1 << 40, StderrBytes: 2, StdoutTruncated: true, StderrTruncated: true},
		Report:   &result.Report{Version: 1, Status: result.StatusKilled, Argv: []string{}, Teardown: result.ReportTeardown{Survivors: []result.Survivor{}}},
	}
}

func encoded(t testing.TB, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	must(t, err)
	return append(data, '\n')
}

func parseRecord(data []byte) (r Record, err error) {
	err = parse(data, &r)
	return r, err
}

func TestRecord(t *testing.T) {
	want := fullRecord()
	data := encoded(t, &want)
	got, err := parseRecord(data)
	must(t, err)
	check.NoDiff(t, cmp.Diff(want, got), "(-want +got)")
	check.That(t, bytes.Count(data, []byte("\n")) == 1 && bytes.HasSuffix(data, []byte("}\n")), "not one line: %q", data)
	// Readers ignore unknown members.
	data = bytes.Replace(data, []byte("{"), []byte(`{"new":{"pid":-1},`), 1)
	again, err := parseRecord(data)
	check.That(t, err == nil && cmp.Equal(got, again), "%+v, %v", again, err)
	// Unknown values are left out.
	small := record("x", Running)
	for _, member := range []string{"init", "sandbox_uid", "sandbox_gid", "name", "tags", "report", "ready", "logs", "timeout_ms", "idle_timeout_ms"} {
		check.That(t, !bytes.Contains(encoded(t, &small), []byte(`"`+member+`"`)), "%s is written although it is unknown", member)
	}
}

// A record truncated anywhere is rejected. Only the final newline may be missing.
func TestRecordTruncated(t *testing.T) {
	d := opened(t)
	o := created(t, d, 1, "web-1.x_y")
	r := fullRecord()
	must(t, o.Write(r))
	must(t, o.Close())
	data := encoded(t, &r)
	path := filepath.Join(d.Path(), testID(1), recordName)
	for n := range len(data) - 1 {
		_, err := parseRecord(data[:n])
		check.Require(t, safeopen.IsDamaged(err), "%d bytes: %v", n, err)
		must(t, os.WriteFile(path, data[:n], 0o600))
		warnings := wantIDs(t, d)
		check.Require(t, len(warnings) == 1, "%d bytes: warnings %v", n, warnings)
		wantCode(t, "warning", warnings[0], "state")
		_, err = d.Find(testID(1))
		wantCode(t, "found by its id", err, "state")
		_, err = d.Find("web-1.x_y")
		wantCode(t, "found by its name", err, "no-such-sandbox")
	}
	_, err := parseRecord(data[:len(data)-1])
	check.That(t, err == nil, "%v", err)
	// Replacing any byte causes no panic, and accepted records are valid.
	for n := range data {
		for _, c := range []byte{0, '"', '}', '-', '9', 0xff} {
			changed := bytes.Clone(data)
			changed[n] = c
			checkAccepted(t, changed)
		}
	}
	w := d.Sweep()
	check.That(t, w == nil, "%v", w)
	wantFiles(t, d, "lock", "names")
}

func TestRecordRefused(t *testing.T) {
	good := record("x", Running)
	good.Version, good.ID = 1, testID(1)
	text := string(encoded(t, &good))
	_, err := parseRecord([]byte(text))
	check.Must(t, err)
	ended := fullRecord()
	endedText := string(encoded(t, &ended))
	change := func(text, from, to string) string {
		check.Require(t, strings.Contains(text, from), "%q is not in %q", from, text)
		return strings.Replace(text, from, to, 1)
	}
	pid := func(pid string) string { return change(text, `"pid":4711`, `"pid":`+pid) }
	tests := []struct{ name, in string }{
		{"empty", ""},
		{"newline", "\n"},
		{"null", "null"},
		{"not an object", "[]"},
		{"nothing in it", "{}"},
		{"two", text + text},
		{"something after it", text + "x"},
		{"zeros, as after a crash", strings.Repeat("\x00", 4096)},
		{"nested too deep", strings.Repeat(`{"a":`, 20000)},
		{"pid 1", pid("1")},
		{"process group", pid("-4711")},
		{"pid too great", pid("4194305")},
		{"pid beyond 32 bits", pid("4294967297")}, // would be 1
		{"pid a text", pid(`"4711"`)},
		{"pid null", pid("null")},
		{"no pid", change(text, `"pid":4711`, `"pod":4711`)},
		{"no supervisor", change(text, `"supervisor"`, `"x"`)},
		{"supervisor null", change(text, `"supervisor":{`, `"supervisor":null,"x":{`)},
		{"two supervisors", change(text, `"supervisor"`, `"supervisor":{"pid":4711},"supervisor":{"pid":1},"x"`)},
		{"start negative", change(text, `"start_time":1`, `"start_time":-1`)},
		{"init pid 1", change(endedText, `"pid":4194304`, `"pid":1`)},
		{"init without a pid", change(endedText, `"pid":4194304`, `"x":1`)},
		{"version 0", change(text, `"version":1`, `"version":0`)},
		{"version 2", change(text, `"version":1`, `"version":2`)},
		{"no id", change(text, testID(1), "")},
		{"id of 16 dots and slashes", change(text, testID(1), "../../../../../..")},
		{"id in capitals", change(text, testID(1), strings.ToUpper(testID(1)))},
		{"id too long", change(text, testID(1), testID(1)+"0")},
		{"id too short", change(text, testID(1), testID(1)[1:])},
		{"name a path", change(endedText, "web-1.x_y", "../x")},
		{"name with an escape", change(endedText, "web-1.x_y", `\u001b[2J`)},
		{"phase unknown", change(text, `"running"`, `"resting"`)},
		{"no phase", change(text, `"running"`, `""`)},
		{"ended without a report", change(text, `"running"`, `"ended"`)},
		{"running with a report", change(endedText, `"ended"`, `"running"`)},
		{"status unknown", change(endedText, `"killed"`, `"\u001b[2J"`)},
	}
	for _, tt := range tests {
		got, err := parseRecord([]byte(tt.in))
		check.That(t, safeopen.IsDamaged(err), "%s: %+v, %v; want an error", tt.name, got, err)
	}
}

// checkAccepted checks that an accepted record names no process that must not be signalled,
// and can be written and read back.
func checkAccepted(t *testing.T, data []byte) {
	t.Helper()
	r, err := parseRecord(data)
	if err != nil {
		return
	}
	for _, id := range []*proc.Identity{&r.Supervisor, r.Init} {
		check.That(t, id == nil || id.PID > 1 && id.PID <= 1<<22, "process %+v", id)
	}
	check.That(t, ValidID(r.ID) && (r.Name == "" || ValidName(r.Name) == nil), "id %q, name %q", r.ID, r.Name)
	again, err := parseRecord(encoded(t, &r))
	must(t, err)
	// Compare the written form: an empty map is left out, and is nil when read back.
	check.NoDiff(t, cmp.Diff(encoded(t, &r), encoded(t, &again)), "(-first +again)")
	for _, alive := range []bool{false, true} {
		switch s := (&Entry{Record: r, Alive: alive}).Status(); s {
		case "starting", "running", "completed", "failed", "killed", "error", "lost":
		default:
			t.Errorf("status %q", s)
		}
	}
}

func FuzzRecord(f *testing.F) {
	full, small := fullRecord(), record("x", Starting)
	small.Version, small.ID = 1, testID(2)
	data := encoded(f, &full)
	f.Add(data)
	f.Add(encoded(f, &small))
	f.Add(data[:len(data)/2])
	f.Add([]byte(`{"supervisor":{"pid":-1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		checkAccepted(t, data)
		var k Kill
		err := parse(data, &k)
		check.That(t, err != nil || k.GraceMS >= 0 && k.GraceMS <= 1e12, "%+v", k)
	})
}

func TestWriteRefused(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	bad := record("2", Running)
	bad.Supervisor.PID = 1
	wantCode(t, "pid 1", o.Write(bad), "state")
	long := record("2", Running)
	long.Argv = []string{strings.Repeat("x", safeopen.MaxFile)}
	wantCode(t, "too long", o.Write(long), "state")
	wantCode(t, "too long a file", writeFile(o, "env", make([]byte, safeopen.MaxFile+1)), "state")
	must(t, writeFile(o, "env", make([]byte, safeopen.MaxFile)))
	e := found(t, d, testID(1))
	check.That(t, e.Record.CreatedAt != "2", "the record was replaced")
	// A file that is too long is not read.
	must(t, os.Truncate(filepath.Join(d.Path(), testID(1), recordName), 1<<40))
	_, err := d.Find(testID(1))
	wantCode(t, "a record of a terabyte", err, "state")
	for _, name := range []string{"", ".", "..", "/etc/passwd", "../lock", "a/b"} {
		_, err := o.OpenFile(name, os.O_RDONLY)
		wantCode(t, "open "+name, err, "state")
		wantCode(t, "write "+name, writeFile(o, name, nil), "state")
	}
}

func TestKill(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "")
	k, err := o.ReadKill()
	check.That(t, k == nil && err == nil, "%v, %v", k, err)
	e := found(t, d, testID(1))
	for _, want := range []Kill{{}, {Signal: "TERM", GraceMS: 1500.5}, {Signal: "34"}, {Signal: "KILL", GraceMS: 1e12}} {
		must(t, e.WriteKill(want))
		got, err := o.ReadKill()
		check.That(t, err == nil && *got == want, "%+v, %v; want %+v", got, err, want)
	}
	for _, bad := range []Kill{{Signal: "NONE"}, {Signal: "0"}, {Signal: "65"}, {Signal: "-1"}, {Signal: "SIGTERM"}, {Signal: "term"}, {GraceMS: -1}, {GraceMS: 1e13}} {
		wantCode(t, "a bad request", e.WriteKill(bad), "state")
	}
	path := filepath.Join(d.Path(), testID(1), killName)
	for _, bad := range []string{"", "{", "null x", `{"signal":"FOO"}`, `{"signal":9}`, `{"grace_ms":1e400}`, `{"grace_ms":-0.1}`, `{"grace_ms":"1"}`} {
		must(t, os.WriteFile(path, []byte(bad), 0o600))
		_, err := o.ReadKill()
		wantCode(t, bad, err, "state")
	}
}

// A reader always sees a complete record while it is replaced.
func TestWriteIsAtomic(t *testing.T) {
	d := opened(t)
	o := written(t, d, 1, "web")
	done := make(chan error)
	go func() {
		defer close(done)
		r := record("2026", Running)
		for i := range 300 {
			r.Argv = []string{strings.Repeat("x", i*100)}
			if err := o.Write(r); err != nil {
				done <- err
			}
		}
	}()
	for {
		select {
		case err := <-done:
			must(t, err)
			wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", testID(1)+"/record.json", "lock", "names", "names/web")
			return
		default:
			found(t, d, "web")
		}
	}
}

// docs/reference/state.md describes every file, and has a row for every member of the record, and no other rows. The report
// has its own page.
func TestRecordIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/state.md")
	must(t, err)
	_, members, _ := strings.Cut(string(doc), "\n## Record\n")
	members, _, _ = strings.Cut(members, "\n## ")
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(members, -1) {
		documented = append(documented, row[1])
	}
	diff := cmp.Diff(harness.MemberNames(reflect.TypeFor[Record](), reflect.TypeFor[result.Report](), reflect.TypeFor[result.Limit]()), documented)
	check.That(t, diff == "", "members in the order of the struct, against rows of docs/reference/state.md (-struct +doc):\n%s", diff)
	for _, phase := range []Phase{Starting, Running, Ended} {
		check.That(t, strings.Contains(members, "`"+string(phase)+"`"), "docs/reference/state.md does not have the phase %q", phase)
	}
	for _, name := range []string{recordName, accessName, lockName, activityName, killName} {
		check.That(t, strings.Contains(string(doc), "`ID/"+name+"`"), "docs/reference/state.md does not have ID/%s", name)
	}
	check.That(t, strings.Contains(string(doc), "`"+namesName+"/NAME`"), "docs/reference/state.md does not have %s/NAME", namesName)
}

func parseAccess(text []byte) (Access, error) {
	var a Access
	err := parse(text, &a)
	return a, err
}

func FuzzAccess(f *testing.F) {
	f.Add([]byte(`{"version":6,"init":{"pid":7,"start_time":42,"boot_id":"boot","pid_namespace":99},"room":{"net":"none","dir":"Lw==","env":["QT1i"]}}`))
	f.Add([]byte(`{"version":6,"init":{"pid":7},"room":{"user":{"UID":65534,"GID":100,"Groups":[1,2]},"net":"host","limits":{"Nice":-5},"cgroups":["L3g="]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := parseAccess(text)
		if err != nil {
			return
		}
		check.That(t, a.Init.PID > 1 && a.Init.PID <= 1<<22, "%q: pid %d", text, a.Init.PID)
		for _, pair := range a.Room.Env {
			check.That(t, !strings.ContainsRune(pair, 0), "%q: variable %q", text, pair)
		}
	})
}

// Access reads what WriteAccess wrote, and rejects a truncated file.
func TestAccess(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "box")
	must(t, err)
	defer o.Close()
	_, _, ok := d.Access("box")
	check.That(t, !ok, "access before it was given")
	nice := -5
	init := proc.Identity{PID: 4711, Start: 1 << 60, BootID: "boot", PIDNS: 4026531836}
	room := Room{
		User:    proc.Cred{UID: 65534, GID: 7, Groups: proc.Groups{44, 109}},
		Net:     "none",
		Limits:  limits.Request{CPUs: 0.5, FSize: 1 << 62, NoFile: 3, Nice: &nice},
		Cgroups: []string{"/sys/fs/cgroup/a", "/b\xff"},
		Env:     []string{"A=", "B=x=y\n", "C=\xfe"},
		Dir:     "/a\xff\nb",
	}
	want := Access{accessVersion, init, room}
	must(t, o.WriteAccess(init, room))
	_, _, ok = d.Access("box")
	check.That(t, !ok, "access before it was granted")
	must(t, o.GrantAccess())
	for _, word := range []string{"box", o.ID} {
		e, got, ok := d.Access(word)
		check.Require(t, ok && e.ID == o.ID, "%s: %v, %+v", word, ok, e)
		check.NoDiff(t, cmp.Diff(want, got), "%s (-want +got)", word)
	}
	text, err := o.folder.Read(accessName)
	must(t, err)
	for n := range len(text) - 1 {
		_, err := parseAccess(text[:n])
		check.That(t, safeopen.IsDamaged(err), "truncated to %d bytes: %v", n, err)
	}
	for _, refused := range []Access{{}, {Init: proc.Identity{PID: 1 << 23}}, {Init: init, Room: Room{Dir: "\x00"}}, {Init: init, Room: Room{Env: []string{"A=\x00"}}},
		{Init: init, Room: Room{Limits: limits.Request{NoFile: -1}}}} {
		err := o.WriteAccess(refused.Init, refused.Room)
		check.That(t, err != nil, "accepted %+v", refused)
	}
	other := want
	other.Version++
	err = other.check()
	check.That(t, err != nil, "accepted another version")
	for _, word := range []string{"", "nobody", o.ID[:6], "../" + o.ID, testID(2)} {
		_, _, ok := d.Access(word)
		check.That(t, !ok, "access to %q", word)
	}
	must(t, o.DropAccess())
	must(t, o.WriteAccess(init, room))
	must(t, o.DropAccess()) // before it was granted: it may contain secrets
	wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", "lock", "names", "names/box")
	_, _, ok = d.Access("box")
	check.That(t, !ok, "access after it was dropped")
	// A dead sandbox cannot be entered, even if its init is alive.
	must(t, o.WriteAccess(init, room))
	must(t, o.GrantAccess())
	must(t, o.Close())
	_, _, ok = d.Access(o.ID)
	check.That(t, !ok, "access to a dead sandbox")
}
