package serve

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	sbxrun "github.com/sbxrun/sbxrun/clients/go"
	"github.com/sbxrun/sbxrun/tests/check"
)

const pythonPaths = `
import os, sys, threading, time
import sbxrun
client = sbxrun.Client("unix:" + sys.argv[1])
with client.session() as session:
    name = os.fsdecode(b"a\xff")
    session.write(name, b"1")
    session.write(os.fsdecode(b"a\xfe"), b"2")
    entries = session.list()
    assert [os.fsencode(e.path) for e in entries] == [b"a\xfe", b"a\xff"], entries
    assert entries[0].mode == "0644" and entries[0].mtime, entries
    assert session.read(entries[1].path) == b"1"
    report = session.exec(["cat", "-"], stdin="", files={os.fsdecode(b"b\xfd"): "3"}, collect=["b*", "*.none"])
    assert [os.fsencode(f.path) for f in report.files] == [b"b\xfd"] and report.unmatched == ["*.none"], report.data
    assert client.fetch(report.files[0]) == b"3"
    assert report.files[0].id in [f.id for f in client.files()]
    client.remove_file(report.files[0].id)
    assert report.files[0].id not in [f.id for f in client.files()]
    session.remove(name)
for begin in lambda c: client.run(["sleep", "1000"], cancel=c), lambda c: list(client.stream(["sleep", "1000"], cancel=c)):
    cancel = sbxrun.Cancel()
    timer = threading.Timer(0.5, cancel)
    timer.start()
    began = time.monotonic()
    try:
        begin(cancel)
        raise SystemExit("it was not cancelled")
    except sbxrun.Cancelled:
        assert time.monotonic() - began < 20
    try:
        client.run(["true"], cancel=cancel)
        raise SystemExit("it ran after the cancellation")
    except sbxrun.Cancelled:
        pass
try:
    client.run(["true"], workdir="x")
except sbxrun.Refused as e:
    assert e.hint and e.hint not in e.message, e
`

const nodePaths = `
import { Client, Refused } from "sbxrun";
import assert from "node:assert";
const client = new Client("unix:" + process.argv[2]);
const session = await client.session();
const name = Buffer.from([97, 255]);
await session.write(name, "1");
await session.write(Buffer.from([97, 254]), "2");
const entries = await session.list();
assert.deepEqual(entries.map((e) => e.path_base64), ["Yf4=", "Yf8="]);
assert.equal(entries[0].mode, "0644");
assert.equal((await session.read(Buffer.from(entries[1].path_base64, "base64"))).toString(), "1");
const report = await session.exec({ argv: ["true"], files: [{ path_base64: "Yv0=", text: "3" }], collect: ["b*", "*.none"] });
assert.equal(report.files[0].path_base64, "Yv0=");
assert.deepEqual(report.unmatched, ["*.none"]);
assert.ok((await client.files()).some((f) => f.id === report.files[0].id));
await client.removeFile(report.files[0].id);
assert.ok(!(await client.files()).some((f) => f.id === report.files[0].id));
await session.remove(name);
await session.end();
await assert.rejects(client.run({ argv: ["true"], workdir: "x" }), (e) => e instanceof Refused && e.hint !== "" && !e.message.includes(e.hint));
`

// The clients write, list and read files whose names are not UTF-8, manage the content store, and keep
// messages and hints apart. The Python client cancels calls from another thread.
func TestClientPaths(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	t.Run("python", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "paths.py")
		check.Must(t, os.WriteFile(file, []byte(pythonPaths), 0o600))
		made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python"), "/usr/bin/python3", "-B", "-W", "error::ResourceWarning", file, s.socket())
		s.idle()
	})
	t.Run("node", func(t *testing.T) {
		dir := nodeProject(t)
		check.Must(t, os.WriteFile(filepath.Join(dir, "paths.mjs"), []byte(nodePaths), 0o600))
		made(t, dir, "node", "paths.mjs", s.socket())
	})
	t.Run("go", func(t *testing.T) {
		client, err := sbxrun.New("unix:" + s.socket())
		check.Must(t, err)
		session, err := client.NewSession(t.Context(), sbxrun.SessionOptions{Files: []sbxrun.File{{Path: "a\xfe", Data: []byte("2")}}})
		check.Must(t, err)
		check.Must(t, session.Write(t.Context(), "a\xff", []byte("1"), ""))
		list, err := session.List(t.Context())
		check.Require(t, err == nil && len(list) == 2 && list[0].Path == "a\xfe" && list[1].Path == "a\xff" && list[0].Mode == "0644" && !list[0].ModTime.IsZero(), "%+v, %v", list, err)
		b, err := session.Read(t.Context(), list[1].Path)
		check.That(t, bytes.Equal(b, []byte("1")) && err == nil, "%q, %v", b, err)
		report, err := session.Run(t.Context(), sbxrun.Call{Argv: []string{"true"}, Files: []sbxrun.File{{Path: "b\xfd"}}, Collect: []string{"b*", "*.none"}})
		check.Require(t, err == nil && len(report.Files) == 1 && report.Files[0].Path == "b\xfd" && len(report.Unmatched) == 1, "%+v, %v", report, err)
		all, err := client.Files(t.Context())
		check.That(t, err == nil && len(all) == 1 && all[0].ID == report.Files[0].ID && !all[0].ExpiresAt.IsZero(), "%+v, %v", all, err)
		check.Must(t, client.RemoveFile(t.Context(), report.Files[0].ID))
		check.Must(t, session.End(t.Context()))
	})
}
