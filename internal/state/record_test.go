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
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if bytes.Count(data, []byte("\n")) != 1 || !bytes.HasSuffix(data, []byte("}\n")) {
		t.Errorf("not one line: %q", data)
	}
	// Readers ignore unknown members.
	data = bytes.Replace(data, []byte("{"), []byte(`{"new":{"pid":-1},`), 1)
	if again, err := parseRecord(data); err != nil || !cmp.Equal(got, again) {
		t.Errorf("%+v, %v", again, err)
	}
	// Unknown values are left out.
	small := record("x", Running)
	for _, member := range []string{"init", "sandbox_uid", "sandbox_gid", "name", "tags", "report", "ready", "logs", "timeout_ms", "idle_timeout_ms"} {
		if bytes.Contains(encoded(t, &small), []byte(`"`+member+`"`)) {
			t.Errorf("%s is written although it is unknown", member)
		}
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
		if _, err := parseRecord(data[:n]); !safeopen.IsDamaged(err) {
			t.Fatalf("%d bytes: %v", n, err)
		}
		must(t, os.WriteFile(path, data[:n], 0o600))
		warnings := wantIDs(t, d)
		if len(warnings) != 1 {
			t.Fatalf("%d bytes: warnings %v", n, warnings)
		}
		wantCode(t, "warning", warnings[0], "state")
		_, err := d.Find(testID(1))
		wantCode(t, "found by its id", err, "state")
		_, err = d.Find("web-1.x_y")
		wantCode(t, "found by its name", err, "no-such-sandbox")
	}
	if _, err := parseRecord(data[:len(data)-1]); err != nil {
		t.Error(err)
	}
	// Replacing any byte causes no panic, and accepted records are valid.
	for n := range data {
		for _, c := range []byte{0, '"', '}', '-', '9', 0xff} {
			changed := bytes.Clone(data)
			changed[n] = c
			checkAccepted(t, changed)
		}
	}
	if w := d.Sweep(); w != nil {
		t.Error(w)
	}
	wantFiles(t, d, "lock", "names")
}

func TestRecordRefused(t *testing.T) {
	good := record("x", Running)
	good.Version, good.ID = 1, testID(1)
	text := string(encoded(t, &good))
	if _, err := parseRecord([]byte(text)); err != nil {
		t.Fatal(err)
	}
	ended := fullRecord()
	endedText := string(encoded(t, &ended))
	change := func(text, from, to string) string {
		if !strings.Contains(text, from) {
			t.Fatalf("%q is not in %q", from, text)
		}
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
		{"pid 0", pid("0")},
		{"pid -1", pid("-1")},
		{"process group", pid("-4711")},
		{"pid too great", pid("4194305")},
		{"pid beyond 32 bits", pid("4294967297")}, // would be 1
		{"pid beyond 64 bits", pid("18446744073709551618")},
		{"pid with a fraction", pid("4711.5")},
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
		{"id a path", change(text, testID(1), "../../etc/passwd")},
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
		if got, err := parseRecord([]byte(tt.in)); !safeopen.IsDamaged(err) {
			t.Errorf("%s: %+v, %v; want an error", tt.name, got, err)
		}
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
		if id != nil && (id.PID <= 1 || id.PID > 1<<22) {
			t.Errorf("pid %d", id.PID)
		}
	}
	if !ValidID(r.ID) || r.Name != "" && ValidName(r.Name) != nil {
		t.Errorf("id %q, name %q", r.ID, r.Name)
	}
	again, err := parseRecord(encoded(t, &r))
	must(t, err)
	// Compare the written form: an empty map is left out, and is nil when read back.
	if diff := cmp.Diff(encoded(t, &r), encoded(t, &again)); diff != "" {
		t.Errorf("(-first +again):\n%s", diff)
	}
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
		if err := parse(data, &k); err == nil && !(k.GraceMS >= 0 && k.GraceMS <= 1e12) {
			t.Errorf("%+v", k)
		}
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
	if e := found(t, d, testID(1)); e.Record.CreatedAt == "2" {
		t.Error("the record was replaced")
	}
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
	if k, err := o.ReadKill(); k != nil || err != nil {
		t.Errorf("%v, %v", k, err)
	}
	e := found(t, d, testID(1))
	for _, want := range []Kill{{}, {Signal: "TERM", GraceMS: 1500.5}, {Signal: "34"}, {Signal: "KILL", GraceMS: 1e12}} {
		must(t, e.WriteKill(want))
		if got, err := o.ReadKill(); err != nil || *got != want {
			t.Errorf("%+v, %v; want %+v", got, err, want)
		}
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

// docs/reference/state.md has a row for every member of the record, and no other rows. The
// report has its own page.
func TestRecordIsDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/state.md")
	must(t, err)
	_, members, _ := strings.Cut(string(doc), "\n## Record\n")
	members, _, _ = strings.Cut(members, "\n## ")
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| .+ \\| .+ \\| .+ \\|$").FindAllStringSubmatch(members, -1) {
		documented = append(documented, row[1])
	}
	if diff := cmp.Diff(harness.MemberNames(reflect.TypeFor[Record](), reflect.TypeFor[result.Report](), reflect.TypeFor[result.Limit]()), documented); diff != "" {
		t.Errorf("members in the order of the struct, against rows of docs/reference/state.md (-struct +doc):\n%s", diff)
	}
	for _, phase := range []Phase{Starting, Running, Ended} {
		if !strings.Contains(members, "`"+string(phase)+"`") {
			t.Errorf("docs/reference/state.md does not have the phase %q", phase)
		}
	}
}

// docs/reference/state.md describes every file.
func TestFilesAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/state.md")
	must(t, err)
	for _, name := range []string{recordName, accessName, lockName, activityName, killName} {
		if !strings.Contains(string(doc), "`ID/"+name+"`") {
			t.Errorf("docs/reference/state.md does not have ID/%s", name)
		}
	}
	if !strings.Contains(string(doc), "`"+namesName+"/NAME`") {
		t.Errorf("docs/reference/state.md does not have %s/NAME", namesName)
	}
}

func parseAccess(text []byte) (Access, error) {
	var f accessFile
	err := parse(text, &f)
	return f.access(), err
}

func FuzzAccess(f *testing.F) {
	f.Add([]byte(`{"version":5,"init":{"pid":7,"start_time":42,"boot_id":"boot","pid_namespace":99},"net":"none","workdir":"Lw==","env":["QT1i"]}`))
	f.Add([]byte(`{"version":5,"init":{"pid":7},"cred":{"UID":65534,"GID":100,"Groups":[1,2]},"net":"host","limits":{"Nice":-5},"cgroups":["L3g="]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := parseAccess(text)
		if err != nil {
			return
		}
		if a.Init.PID <= 1 || a.Init.PID > 1<<22 {
			t.Errorf("%q: pid %d", text, a.Init.PID)
		}
		for _, pair := range a.Env {
			if strings.ContainsRune(pair, 0) {
				t.Errorf("%q: variable %q", text, pair)
			}
		}
	})
}

// Access reads what WriteAccess wrote, and rejects a truncated file.
func TestAccess(t *testing.T) {
	d := opened(t)
	o, err := d.Create(testID(1), "box")
	must(t, err)
	defer o.Close()
	if _, _, ok := d.Access("box"); ok {
		t.Error("access before it was given")
	}
	nice := -5
	want := Access{
		Limits:  limits.Request{CPUs: 0.5, FSize: 1 << 62, NoFile: 3, Nice: &nice},
		Init:    proc.Identity{PID: 4711, Start: 1 << 60, BootID: "boot", PIDNS: 4026531836},
		Cred:    &proc.Cred{UID: 65534, GID: 7, Groups: proc.Groups{44, 109}},
		Net:     "none",
		Workdir: "/a\xff\nb",
		Cgroups: []string{"/sys/fs/cgroup/a", "/b\xff"},
		Env:     []string{"A=", "B=x=y\n", "C=\xfe"},
	}
	must(t, o.WriteAccess(want))
	if _, _, ok := d.Access("box"); ok {
		t.Error("access before it was granted")
	}
	must(t, o.GrantAccess())
	for _, word := range []string{"box", o.ID} {
		e, got, ok := d.Access(word)
		if !ok || e.ID != o.ID {
			t.Fatalf("%s: %v, %+v", word, ok, e)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", word, diff)
		}
	}
	text, err := o.folder.Read(accessName)
	must(t, err)
	for n := range len(text) - 1 {
		if _, err := parseAccess(text[:n]); !safeopen.IsDamaged(err) {
			t.Errorf("truncated to %d bytes: %v", n, err)
		}
	}
	for _, refused := range []Access{{}, {Init: proc.Identity{PID: 1 << 23}}, {Init: want.Init, Workdir: "\x00"}, {Init: want.Init, Env: []string{"A=\x00"}},
		{Init: want.Init, Limits: limits.Request{NoFile: -1}}} {
		if err := o.WriteAccess(refused); err == nil {
			t.Errorf("accepted %+v", refused)
		}
	}
	other := want.file()
	other.Version++
	if err := other.check(); err == nil {
		t.Error("accepted another version")
	}
	for _, word := range []string{"", "nobody", o.ID[:6], "../" + o.ID, testID(2)} {
		if _, _, ok := d.Access(word); ok {
			t.Errorf("access to %q", word)
		}
	}
	must(t, o.DropAccess())
	must(t, o.WriteAccess(want))
	must(t, o.DropAccess()) // before it was granted: it may contain secrets
	wantFiles(t, d, testID(1), testID(1)+"/activity", testID(1)+"/lock", "lock", "names", "names/box")
	if _, _, ok := d.Access("box"); ok {
		t.Error("access after it was dropped")
	}
	// A dead sandbox cannot be entered, even if its init is alive.
	must(t, o.WriteAccess(want))
	must(t, o.GrantAccess())
	must(t, o.Close())
	if _, _, ok := d.Access(o.ID); ok {
		t.Error("access to a dead sandbox")
	}
}
