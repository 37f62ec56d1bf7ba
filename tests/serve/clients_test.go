package serve

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sbxrun/sbxrun/cleanup/result"
	sbxrun "github.com/sbxrun/sbxrun/clients/go"
	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/overlay"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// All clients behave alike: each has a driver that executes the steps of one table, and the
// results are compared with the table.

// step is an operation of a client. args and want are JSON; $op stands for the ID that the last such operation
// returned. Members that want does not have are ignored. Three operations are the test's own: after waits until a
// command runs, left until it does not, and canceled until the server's log has a canceled call or cell.
type step struct {
	op, args, want string
	least          time.Duration // minimum duration
}

// behaviour is what each client must do with a server, or with a fake that gives one of the answers to each connection.
type behaviour struct {
	name    string
	client  string // members of the operation new
	host    string // host of a server with TLS, instead of the socket
	answers []string
	asked   []string // exactly what a fake must have been asked
	steps   []step
}

// nested is too deep for recursive parsers.
var nested = strings.Repeat("[", 200_000) + strings.Repeat("]", 200_000)

// malformed returns invalid answers.
func malformed() (all []string) {
	for _, text := range []string{nested, "null", "[]", "{}", `{"id":{}}`, `"text"`, "\xff"} {
		all = append(all, answer(200, text))
	}
	return append(all, answer(503, nested), answer(503, `{"error":{},"started":false}`), answer(503, `{"error":null,"started":true}`))
}

// held at the end of a fake's answer keeps the connection open.
const held = "\x00"

const (
	report   = `{"id":"1","cause":"exited","exit_code":0,"timed_out":false,"teardown":{"verdict":"proven"}}`
	refusal  = `{"error":{"code":"busy","message":"m"},"started":false}`
	begun    = `{"error":{"code":"busy","message":"m"},"started":true}`
	unproven = `{"error":{"code":"unproven","message":"m"},"started":true,"report":{"id":"1","cause":"timeout","exit_code":123,"timed_out":true,"teardown":{"verdict":"unproven"}}}`
	runTrue  = `{"call":{"argv":["true"]}}`
)

func answer(status int, body string, headers ...string) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", status, len(body), strings.Join(append(headers, ""), "\r\n"), body)
}

func streaming(lines string) string {
	return "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n" + lines
}

var behaviours = []behaviour{
	{name: "a non-zero exit is a report", steps: []step{
		{op: "run", args: `{"call":{"argv":["sh","-c","cat; echo $A; pwd; echo err >&2; exit 3"],"stdin":"in ","env":{"A":"b"},"workdir":"/tmp"}}`,
			want: `{"cause":"exited","exit_code":3,"stdout":"in b\n/tmp\n","stderr":"err\n","timed_out":false,"verdict":"proven"}`}}},
	{name: "a program", steps: []step{{op: "run", args: `{"call":{"code":"print(6*7)"}}`, want: `{"stdout":"42\n"}`},
		{op: "run", args: `{"call":{"language":"bash","code":"echo $BASH_SUBSHELL"}}`, want: `{"stdout":"0\n"}`}}},
	{name: "output that is no text", steps: []step{{op: "run", args: `{"call":{"argv":["printf","\\377\\001"]}}`, want: `{"hex":"ff01","stdout":"\ufffd\u0001"}`}}},
	{name: "a timeout is a report", steps: []step{
		{op: "run", args: `{"call":{"argv":["sh","-c","sleep 1000 & sleep 1000"],"timeout_ms":300}}`, want: `{"cause":"timeout","exit_code":124,"timed_out":true,"verdict":"proven"}`}}},
	{name: "a grace period", steps: []step{
		{op: "run", args: `{"call":{"argv":["sh","-c","trap 'echo saved; exit 5' TERM; while :; do sleep 0.05; done"],"timeout_ms":` + itoa(int(harness.Deadline(2*time.Second).Milliseconds())) + `,"grace_ms":20000}}`, want: `{"cause":"timeout","stdout":"saved\n"}`}}},
	{name: "a command that is not there is a report", steps: []step{{op: "run", args: `{"call":{"argv":["no-such-command"]}}`, want: `{"cause":"start-failed","exit_code":127}`}}},
	{name: "the same key is the same call", steps: []step{
		{op: "run", args: `{"key":"k","call":{"argv":["true"]}}`, want: `{"exit_code":0}`},
		{op: "run", args: `{"key":"k","call":{"argv":["true"]}}`, want: `{"id":"$run"}`},
		{op: "run", args: `{"key":"k","call":{"argv":["false"]}}`, want: `{"error":"refused","code":"idempotency","status":409}`},
		{op: "start", args: `{"key":"s","call":{"argv":["true"]}}`},
		{op: "wait", args: `{"process":"$start"}`, want: `{"exit_code":0}`},
		{op: "session", args: `{}`},
		{op: "cell", args: `{"key":"c","session":"$session","call":{"code":"x = globals().get('x', 0) + 1\nx"}}`, want: `{"value":"1"}`},
		{op: "cell", args: `{"key":"c","session":"$session","call":{"code":"x = globals().get('x', 0) + 1\nx"}}`, want: `{"value":"1"}`},
		{op: "cell", args: `{"key":"c","session":"$session","call":{"code":"0"}}`, want: `{"error":"refused","code":"idempotency","status":409}`},
		{op: "start", args: `{"key":"p","session":"$session","call":{"argv":["true"]}}`},
		{op: "start", args: `{"key":"p","session":"$session","call":{"argv":["true"]}}`, want: `{"id":"$start"}`},
		{op: "start", args: `{"key":"p","session":"$session","call":{"argv":["false"]}}`, want: `{"error":"refused","code":"idempotency","status":409}`},
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "limits", steps: []step{{op: "run", args: `{"call":{"argv":["sh","-c","head -c 5000 /dev/zero; sleep 1000"],"limits":{"max_output":1000,"output":"kill"}}}`, want: `{"cause":"output-limit"}`}}},
	{name: "files", steps: []step{
		{op: "store", args: `{"text":"stored"}`, want: `{}`},
		{op: "run", args: `{"call":{"argv":["sh","-c","cat a b >c.out"],"files":{"a":"x","b":{"id":"$store"}},"collect":["*.out"]}}`, want: `{"files":[{"path":"c.out","size":7}]}`},
		{op: "fetch", args: `{"file":"$file"}`, want: `{"text":"xstored"}`},
		{op: "fetch", args: `{"file":"sha256:00"}`, want: `{"error":"refused","code":"no-such-file","status":404}`}}},
	{name: "a stream", steps: []step{
		{op: "stream", args: `{"call":{"argv":["sh","-c","printf ü; printf '\\377' >&2; exit 4"]}}`, want: `{"stdout":"c3bc","stderr":"ff","exit_code":4}`},
		{op: "stream", args: `{"call":{"argv":["sh","-c","head -c 1000000 /dev/zero | tr '\\0' '\\n' | wc -c"]}}`, want: `{"stdout":"313030303030300a"}`}}},
	{name: "a stream that is quiet for longer than the margin", client: `"margin_ms":200`, steps: []step{{op: "stream", args: `{"call":{"argv":["sh","-c","sleep 1; echo x"]}}`, want: `{"stdout":"780a","exit_code":0}`}}},
	{name: "a stream of what is refused", steps: []step{{op: "stream", args: `{"call":{"argv":["true"],"files":{"/a":""}}}`, want: `{"error":"refused","code":"usage","status":400}`}}},
	{name: "who leaves ends the call", steps: []step{
		{op: "session", args: `{}`},
		{op: "leave", args: `{"session":"$session","how":"stream","call":{"argv":["sh","-c","echo up; exec sleep 7654"],"timeout_ms":200000}}`, want: `{}`},
		{op: "left", args: `"sleep 7654"`},
		{op: "leave", args: `{"session":"$session","how":"run","call":{"argv":["sh","-c","echo >up; exec sleep 7655"],"timeout_ms":200000}}`, want: `{"error":"left"}`},
		{op: "left", args: `"sleep 7655"`},
		{op: "remove", args: `{"session":"$session","path":"up"}`, want: `{}`},
		{op: "leave", args: `{"session":"$session","how":"cell","call":{"code":"import time\nopen('up','w')\ntime.sleep(1000)","timeout_ms":200000}}`, want: `{"error":"left"}`},
		{op: "canceled", args: `"cell"`},
		{op: "run", args: `{"session":"$session","call":{"argv":["echo","alive"]}}`, want: `{"stdout":"alive\n"}`},
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "a session keeps files", steps: []step{
		{op: "session", args: `{"options":{"files":{"given":"1"},"idle_timeout_ms":600000,"lifetime_ms":600000}}`},
		{op: "write", args: `{"session":"$session","path":"d/ü %?#.txt","text":"text"}`},
		{op: "write", args: `{"session":"$session","path":"run.sh","text":"#!/bin/sh\necho ran\n","mode":"755"}`},
		{op: "run", args: `{"session":"$session","call":{"argv":["sh","-c","cat given d/*; ./run.sh; echo 2 >made"]}}`, want: `{"stdout":"1textran\n"}`},
		{op: "read", args: `{"session":"$session","path":"made"}`, want: `{"text":"2\n"}`},
		{op: "read", args: `{"session":"$session","path":"d/ü %?#.txt"}`, want: `{"text":"text"}`},
		{op: "list", args: `{"session":"$session"}`, want: `{"entries":["directory d","file d/ü %?#.txt","file given","file made","file run.sh"]}`},
		{op: "remove", args: `{"session":"$session","path":"made"}`},
		{op: "read", args: `{"session":"$session","path":"made"}`, want: `{"error":"refused","code":"no-such-file","status":404}`},
		{op: "remove", args: `{"session":"$session","path":".."}`, want: `{"error":"refused","code":"usage","status":400}`},
		{op: "copy", args: `{"session":"$session"}`},
		{op: "stream", args: `{"session":"$copy","call":{"argv":["./run.sh"]}}`, want: `{"stdout":"72616e0a"}`},
		{op: "sessions", args: `{}`, want: `{"ids":["$session","$copy"]}`},
		{op: "end", args: `{"session":"$session"}`}, {op: "end", args: `{"session":"$session"}`}, {op: "end", args: `{"session":"$copy"}`},
		{op: "run", args: `{"session":"$session","call":{"argv":["true"]}}`, want: `{"error":"refused","code":"ended","status":410}`},
		{op: "end", args: `{"session":"none"}`}}},
	{name: "a large file is never held as a whole", steps: []step{
		{op: "session", args: `{}`},
		{op: "pour", args: `{"session":"$session","size":3000000}`, want: `{"size":3000000,"whole":false}`},
		{op: "pour-badly", args: `{"session":"$session"}`, want: `{"error":"wrong"}`},
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "cells", steps: []step{
		{op: "languages", args: `{}`, want: `{"cells":["node","python"]}`},
		{op: "images", args: `{}`, want: `{"images":0}`},
		{op: "session", args: `{}`},
		{op: "cell", args: `{"session":"$session","call":{"code":"x = 6\nprint(x)\nx * 7"}}`, want: `{"cause":"done","state":"kept","stdout":"6\n","value":"42"}`},
		{op: "cell", args: `{"session":"$session","call":{"code":"1/(x-6)"}}`, want: `{"cause":"done","exception":"ZeroDivisionError"}`},
		{op: "cell", args: `{"session":"$session","call":{"language":"node","code":"1+x"}}`, want: `{"cause":"done","exception":"ReferenceError"}`},
		{op: "cell", args: `{"session":"$session","call":{"code":"x"}}`, want: `{"value":"6"}`},
		{op: "cell", args: `{"session":"$session","call":{"code":"while True: pass","timeout_ms":300}}`, want: `{"cause":"timeout"}`}, // a busy machine may lose the interpreter
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "a call that nobody waits for", steps: []step{
		{op: "start", args: `{"call":{"argv":["sh","-c","echo one; echo err >&2; sleep 0.3; echo two; exit 6"]}}`},
		{op: "output", args: `{"process":"$start","options":{"from":1}}`, want: `{"text":"ne\ntwo\n"}`},
		{op: "wait", args: `{"process":"$start"}`, want: `{"cause":"exited","exit_code":6}`},
		{op: "output", args: `{"process":"$start","options":{"stream":"stderr"}}`, want: `{"text":"err\n"}`},
		{op: "status", args: `{"process":"$start"}`, want: `{"state":"ended"}`},
		{op: "end", args: `{"process":"$start"}`, want: `{"cause":"exited"}`},
		{op: "wait", args: `{"process":"$start"}`, want: `{"error":"refused","code":"no-such-call","status":404}`},
		{op: "start", args: `{"call":{"argv":["sleep","7657"],"timeout_ms":200000}}`},
		{op: "runs", args: `"sleep 7657"`},
		{op: "end", args: `{"process":"$start"}`, want: `{"cause":"canceled"}`},
		{op: "left", args: `"sleep 7657"`}}},
	{name: "a process of a session", steps: []step{
		{op: "session", args: `{}`},
		{op: "start", args: `{"session":"$session","call":{"argv":["sh","-c","trap 'echo told; exit 5' INT; echo >up; while :; do sleep 0.05; done"],"timeout_ms":200000}}`},
		{op: "run", args: `{"session":"$session","call":{"argv":["sh","-c","until [ -e up ]; do sleep 0.02; done"]}}`, want: `{"exit_code":0}`},
		{op: "status", args: `{"session":"$session","process":"$start"}`, want: `{"state":"running"}`},
		{op: "signal", args: `{"session":"$session","process":"$start","signal":"INT"}`},
		{op: "wait", args: `{"session":"$session","process":"$start"}`, want: `{"cause":"exited","exit_code":5}`},
		{op: "output", args: `{"session":"$session","process":"$start"}`, want: `{"text":"told\n"}`},
		{op: "signal", args: `{"session":"$session","process":"$start","signal":"INT"}`, want: `{"error":"refused","code":"ended"}`},
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "a process that is written to", steps: []step{
		{op: "session", args: `{}`},
		{op: "start", args: `{"session":"$session","call":{"argv":["cat"],"stdin":"one\n","keep_stdin":true}}`},
		{op: "send", args: `{"session":"$session","process":"$start","text":"two\n"}`},
		{op: "send", args: `{"session":"$session","process":"$start","text":"ü","end":true}`},
		{op: "output", args: `{"session":"$session","process":"$start"}`, want: `{"text":"one\ntwo\nü"}`},
		{op: "send", args: `{"session":"$session","process":"$start","text":"x"}`, want: `{"error":"refused","code":"ended"}`},
		{op: "end", args: `{"session":"$session"}`}}},
	{name: "an overlay, a snapshot, a volume", client: `"node":"node"`, steps: []step{
		{op: "session", args: `{"options":{"overlay":{"name":"app"},"volumes":[{"name":"v","path":"/vol"}]}}`},
		{op: "run", args: `{"session":"$session","call":{"argv":["sh","-c","cat /work/list; echo new >/work/added; rm /work/list; echo kept >/vol/file"]}}`, want: `{"stdout":"one\ntwo\n"}`},
		{op: "diff", args: `{"session":"$session"}`, want: `{"changes":["added added","deleted list"]}`},
		{op: "snapshot", args: `{"session":"$session","name":"base"}`},
		{op: "snapshots", args: `{}`, want: `{"ids":["$snapshot"]}`},
		{op: "end", args: `{"session":"$session"}`},
		{op: "session", args: `{"options":{"snapshot":"base","volumes":[{"name":"v","path":"/vol","read_only":true}]}}`},
		{op: "run", args: `{"session":"$session","call":{"argv":["sh","-c","cat /work/added /vol/file; ls /work"]}}`, want: `{"stdout":"new\nkept\nadded\nsub\n"}`},
		{op: "end", args: `{"session":"$session"}`},
		{op: "remove-snapshot", args: `{"name":"base"}`},
		{op: "session", args: `{"options":{"snapshot":"base"}}`, want: `{"error":"refused","status":404}`},
		{op: "session", args: `{"options":{"overlay":{"name":"other"}}}`, want: `{"error":"refused","code":"policy","status":403}`}}},
	{name: "what is wrong is refused", steps: []step{
		{op: "run", args: `{"call":{"argv":[]}}`, want: `{"error":"refused","code":"usage","status":400}`},
		{op: "run", args: `{"call":{"code":"1","language":"cobol"}}`, want: `{"error":"refused","code":"usage"}`},
		{op: "run", args: `{"call":{"argv":["true"],"files":{"../a":""}}}`, want: `{"error":"refused","code":"usage"}`},
		{op: "run", args: `{"call":{}}`, want: `{"error":"wrong"}`},
		{op: "run", args: `{"call":{"argv":["true"],"code":"1"}}`, want: `{"error":"wrong"}`},
		{op: "run", args: `{"call":{"argv":["true"],"timeout_ms":-1}}`, want: `{"error":"wrong"}`},
		// The server rejects it long before it was sent completely.
		{op: "store", args: `{"size":40000000}`, want: `{"error":"refused"}`}, {op: "store", args: `{"size":30000000}`, want: `{"error":"refused"}`},
		{op: "store", args: `{"size":10000000}`}}},
	{name: "nobody is there", client: `"address":"unix:/no/such/socket"`, steps: []step{{op: "run", args: runTrue, want: `{"error":"refused","code":"unreachable"}`}}},
	{name: "what is no address", steps: []step{
		{op: "new", args: `{"address":"unix:"}`, want: `{"error":"wrong"}`}, {op: "new", args: `{"address":"ftp://127.0.0.1"}`, want: `{"error":"wrong"}`},
		{op: "new", args: `{"address":"http://"}`, want: `{"error":"wrong"}`}, {op: "new", args: `{"address":"http://me:word@127.0.0.1"}`, want: `{"error":"wrong"}`},
		{op: "new", args: `{"address":"https://127.0.0.1/below"}`, want: `{"error":"wrong"}`}, {op: "new", args: `{"address":"http://127.0.0.1/?a=b"}`, want: `{"error":"wrong"}`},
		{op: "new", args: `{"address":"http://127.0.0.1:80:80"}`, want: `{"error":"wrong"}`}, {op: "new", args: `{"address":"http://[::1]:80/"}`, want: `{"error":null}`}}},
	{name: "TLS", host: "127.0.0.1", client: `"token":"me-token"`, steps: []step{{op: "run", args: `{"call":{"argv":["echo","secure"]}}`, want: `{"stdout":"secure\n"}`},
		{op: "stream", args: `{"call":{"argv":["echo","secure"]}}`, want: `{"stdout":"7365637572650a"}`},
		{op: "store", args: `{"size":3000000}`}}},
	{name: "a certificate for another host", host: "localhost", client: `"token":"me-token"`, steps: []step{{op: "run", args: runTrue, want: `{"error":"refused","code":"unreachable"}`}}},

	{name: "what has not started is tried again", answers: []string{answer(503, refusal, "Retry-After: 0.01"), answer(429, refusal, "Retry-After: 0.01"), answer(200, report)},
		asked: []string{"POST /v1/run", "POST /v1/run", "POST /v1/run"}, steps: []step{{op: "run", args: runTrue, want: `{"exit_code":0}`}}},
	{name: "but not in a loop", answers: []string{answer(503, refusal, "Retry-After: 0"), answer(429, refusal, "Retry-After: 0"), answer(503, refusal, "Retry-After: 0"), answer(200, report)},
		asked: slices.Repeat([]string{"POST /v1/run"}, 4), steps: []step{{op: "run", args: runTrue, want: `{"exit_code":0}`, least: 700 * time.Millisecond}}},
	{name: "a command that runs is not asked about in a loop", answers: append(slices.Repeat([]string{answer(200, `{"id":"7","state":"running"}`)}, 5), answer(200, `{"id":"7","state":"ended","report":`+report+`}`)),
		asked: slices.Repeat([]string{"GET /v1/calls/7?wait_ms=30000"}, 6), steps: []step{{op: "wait", args: `{"process":"7"}`, want: `{"cause":"exited"}`, least: 500 * time.Millisecond}}},
	{name: "but no stream, of which nothing is left", answers: []string{answer(200, `{"id":"7"}`), answer(429, refusal, "Retry-After: 0.01")},
		asked: []string{"POST /v1/sessions", "PUT /v1/sessions/7/files/big?mode=644"},
		steps: []step{{op: "session", args: `{}`}, {op: "pour", args: `{"session":"$session","size":3000}`, want: `{"error":"refused","code":"busy"}`}}},
	{name: "but not for ever", client: `"patience_ms":300`, answers: []string{answer(503, refusal, "Retry-After: 1")},
		asked: []string{"POST /v1/run"}, steps: []step{{op: "run", args: runTrue, want: `{"error":"refused","code":"busy","status":503}`}}},
	{name: "nor what will not be better", answers: []string{answer(500, strings.Replace(refusal, "busy", "setup", 1))},
		asked: []string{"POST /v1/run"}, steps: []step{{op: "run", args: runTrue, want: `{"error":"refused","code":"setup","status":500}`}}},
	{name: "what has started is not tried again", answers: []string{answer(503, begun)}, asked: []string{"POST /v1/run"},
		steps: []step{{op: "run", args: runTrue, want: `{"error":"unproven","code":"busy"}`}}},
	{name: "unproven", answers: []string{answer(500, unproven)}, asked: []string{"POST /v1/run"},
		steps: []step{{op: "run", args: runTrue, want: `{"error":"unproven","code":"unproven","verdict":"unproven"}`}}},
	{name: "no error that says whether it has started", answers: []string{answer(503, "{}"), answer(502, "bad gateway"), answer(200, "{"), "", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"},
		asked: []string{"POST /v1/run", "POST /v1/run", "POST /v1/run", "POST /v1/run", "POST /v1/run"},
		steps: []step{{op: "run", args: runTrue, want: `{"error":"lost"}`}, {op: "run", args: runTrue, want: `{"error":"lost"}`}, {op: "run", args: runTrue, want: `{"error":"lost"}`},
			{op: "run", args: runTrue, want: `{"error":"lost"}`}, {op: "run", args: runTrue, want: `{"error":"lost"}`}}},
	{name: "answers that are none", answers: malformed(), asked: slices.Repeat([]string{"POST /v1/run"}, len(malformed())), steps: slices.Repeat([]step{{op: "run", args: runTrue, want: `{"error":"lost"}`}}, len(malformed()))},
	{name: "ids that are none", answers: malformed(), asked: slices.Repeat([]string{"POST /v1/sessions"}, len(malformed())), steps: slices.Repeat([]step{{op: "session", args: `{}`, want: `{"error":"lost"}`}}, len(malformed()))},
	{name: "states that are none", answers: append(malformed(), answer(200, `{"id":"7","state":"ended"}`)), asked: slices.Repeat([]string{"GET /v1/calls/7?wait_ms=30000"}, 1+len(malformed())),
		steps: slices.Repeat([]step{{op: "wait", args: `{"process":"7"}`, want: `{"error":"lost"}`}}, 1+len(malformed()))},
	{name: "events that are none", answers: []string{streaming(nested + "\n"), streaming("null\n"), streaming("[]\n"), streaming(`{"event":"report"}` + "\n"), streaming(`{"event":"report","report":{}}` + "\n"),
		streaming(`{"event":"error","error":{}}` + "\n"), streaming(strings.Repeat(" ", 40<<20))}, asked: slices.Repeat([]string{"POST /v1/run?stream=1"}, 7),
		steps: slices.Repeat([]step{{op: "stream", args: runTrue, want: `{"error":"lost"}`}}, 7)},
	// E2B 1128: a client without a time limit of its own.
	{name: "no answer", client: `"margin_ms":1000`, answers: []string{held, streaming(`{"event":"start","id":"1"}` + "\n" + held)}, asked: []string{"POST /v1/run", "POST /v1/run?stream=1"},
		steps: []step{{op: "run", args: `{"call":{"argv":["true"],"timeout_ms":100}}`, want: `{"error":"lost"}`, least: 1100 * time.Millisecond},
			{op: "stream", args: runTrue, want: `{"error":"lost"}`, least: 6 * time.Second}}},
	{name: "a stream that breaks off", answers: []string{streaming(`{"event":"stdout","text":"a"}` + "\n"), streaming(`{"event":"stdout",`), streaming("nonsense\n")},
		asked: []string{"POST /v1/run?stream=1", "POST /v1/run?stream=1", "POST /v1/run?stream=1"},
		steps: []step{{op: "stream", args: runTrue, want: `{"error":"lost"}`}, {op: "stream", args: runTrue, want: `{"error":"lost"}`}, {op: "stream", args: runTrue, want: `{"error":"lost"}`}}},
	{name: "a stream that ends with an error", answers: []string{streaming(`{"event":"stdout","text":"a"}` + "\n" + `{"event":"error","error":` + unproven + "}\n"), streaming(`{"event":"error","error":` + refusal + "}\n")},
		asked: []string{"POST /v1/run?stream=1", "POST /v1/run?stream=1"},
		steps: []step{{op: "stream", args: runTrue, want: `{"stdout":"61","error":"unproven","verdict":"unproven"}`}, {op: "stream", args: runTrue, want: `{"error":"refused","code":"busy"}`}}},
	{name: "output goes on where a connection broke", client: `"margin_ms":1000`, answers: []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + held, answer(200, `{"id":"7","state":"running"}`), "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ndef"},
		asked: []string{"GET /v1/calls/7/output?follow=1&stream=stdout&from=0", "GET /v1/calls/7/output?follow=1&stream=stdout&from=3", "GET /v1/calls/7?wait_ms=1000", "GET /v1/calls/7/output?follow=1&stream=stdout&from=3"},
		steps: []step{{op: "output", args: `{"process":"7"}`, want: `{"text":"abcdef"}`}}},
	{name: "waiting for an end", answers: []string{answer(200, `{"id":"7","state":"running"}`), answer(200, `{"id":"7","state":"ended","report":`+report+`}`),
		answer(200, `{"id":"7","state":"ended","error":{"code":"busy","message":"m"}}`), answer(200, `{"id":"7","state":"ended","error":{"code":"unproven","message":"m"},"report":`+report+`}`),
		answer(200, `{"id":"7","state":"ended","started":true,"error":{"code":"lost","message":"m"}}`)},
		asked: slices.Repeat([]string{"GET /v1/calls/7?wait_ms=30000"}, 5),
		steps: []step{{op: "wait", args: `{"process":"7"}`, want: `{"cause":"exited"}`}, {op: "wait", args: `{"process":"7"}`, want: `{"error":"refused","code":"busy"}`},
			{op: "wait", args: `{"process":"7"}`, want: `{"error":"unproven","verdict":"proven"}`}, {op: "wait", args: `{"process":"7"}`, want: `{"error":"unproven","code":"lost"}`}}},
	{name: "a timeout of what runs in the background", answers: slices.Repeat([]string{answer(202, `{"id":"7","state":"running"}`)}, 4),
		asked: []string{"POST /v1/calls 30000 ms", "POST /v1/calls 5000 ms", "POST /v1/sessions/7/processes 0 ms", "POST /v1/sessions/7/processes 5000 ms"},
		steps: []step{{op: "start", args: runTrue}, {op: "start", args: `{"call":{"argv":["true"],"timeout_ms":5000}}`}, {op: "start", args: `{"session":"7","call":{"argv":["true"]}}`},
			{op: "start", args: `{"session":"7","call":{"argv":["true"],"timeout_ms":5000}}`}, {op: "start", args: `{"session":"7","call":{"argv":["true"],"timeout_ms":-1}}`, want: `{"error":"wrong"}`}}},
	{name: "an answer from elsewhere", answers: []string{answer(307, "", "Location: /v1/sessions/7"), answer(200, "{}")}, asked: []string{"DELETE /v1/sessions/7/files/.."},
		steps: []step{{op: "remove", args: `{"session":"7","path":".."}`, want: `{"error":"lost"}`}}},
	{name: "text in a query", answers: []string{answer(200, "{}"), answer(400, refusal)}, asked: []string{"PUT /v1/sessions/7/files/a?mode=6%264", "GET /v1/calls/7/output?follow=1&stream=a%26b%3Dc&from=0"},
		steps: []step{{op: "write", args: `{"session":"7","path":"a","text":"","mode":"6&4"}`}, {op: "output", args: `{"process":"7","options":{"stream":"a&b=c"}}`, want: `{"error":"refused"}`}}},
	{name: "a token and a node", client: `"token":"secret\n","node":"n1"`, answers: []string{answer(200, report)}, asked: []string{"POST /v1/run Bearer secret n1"}, steps: []step{{op: "run", args: runTrue, want: `{"exit_code":0}`}}},
}

// driver executes steps; a program reads and writes lines of JSON.
type driver func(step []byte) (answer []byte, err error)

// program starts a driver, which exits when its stdin ends. It trusts the certificate authority ca.
func program(t *testing.T, ca, dir, name string, args ...string) driver {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir = dir
	ca = filepath.Join(ca, "ca.pem")
	c.Env = append(os.Environ(), "SSL_CERT_FILE="+ca, "NODE_EXTRA_CA_CERTS="+ca) // as the READMEs say
	log := &harness.Log{}
	c.Stderr = log
	in, err := c.StdinPipe()
	check.Must(t, err)
	out, err := c.StdoutPipe()
	check.Must(t, err)
	done, err := harness.StartCommand(c)
	check.Must(t, err)
	t.Cleanup(func() {
		in.Close()
		hung := time.AfterFunc(harness.Bound, func() { _ = c.Process.Kill() }) // fails only if it has exited
		defer hung.Stop()
		err := c.Wait()
		check.That(t, err == nil && log.String() == "", "the driver: %v\n%s", err, log)
		done()
	})
	lines := bufio.NewReader(out)
	return func(step []byte) ([]byte, error) {
		hung := time.AfterFunc(harness.Bound, func() { _ = c.Process.Kill() })
		defer hung.Stop()
		if _, err := in.Write(append(step, '\n')); err != nil {
			return nil, err
		}
		return lines.ReadBytes('\n')
	}
}

// fake answers each connection with the next of its answers.
type fake struct {
	listener net.Listener
	mu       sync.Mutex
	asked    []string
}

func newFake(t *testing.T, answers []string) *fake {
	t.Helper()
	var over sync.WaitGroup
	t.Cleanup(over.Wait)
	l := harness.Listen(t) // closed before
	f := &fake{listener: l}
	over.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r, err := http.ReadRequest(bufio.NewReader(c))
			var body []byte
			if err == nil {
				body, err = io.ReadAll(r.Body)
			}
			if err != nil { // the client has disconnected, which f.asked does not contain
				c.Close()
				continue
			}
			asked := strings.TrimSpace(r.Method + " " + r.RequestURI + " " + r.Header.Get("Authorization") + " " + r.Header.Get("Sbxrun-Node"))
			if r.Method == http.MethodPost && regexp.MustCompile(`/(calls|processes)$`).MatchString(r.RequestURI) {
				var of api.Call
				_ = json.Unmarshal(body, &of) // without an ID if that fails
				asked += fmt.Sprintf(" %g ms", of.TimeoutMS)
			}
			f.mu.Lock()
			n := len(f.asked)
			f.asked = append(f.asked, asked)
			f.mu.Unlock()
			text := ""
			if n < len(answers) {
				text = answers[n]
			}
			_, _ = io.WriteString(c, strings.TrimSuffix(text, held)) // fails if the client has disconnected
			if strings.HasSuffix(text, held) {
				defer c.Close()
				continue
			}
			c.Close()
		}
	})
	return f
}

// conform runs the table with a client that trusts the certificate authority ca.
func conform(t *testing.T, ca string, drive driver) {
	_, config := app(t)
	whole := serve(t, config+"files = \"20M\"\n")
	for _, b := range behaviours {
		t.Run(b.name, func(t *testing.T) {
			part := *whole
			s := &part
			s.t = t
			ids := map[string]string{}
			do := func(op, args, want string) {
				t.Helper()
				for name, id := range ids {
					args = strings.ReplaceAll(args, `"$`+name+`"`, `"`+id+`"`)
					want = strings.ReplaceAll(want, `"$`+name+`"`, `"`+id+`"`)
				}
				line := fmt.Appendf(nil, `{"op":%q%s}`, op, strings.TrimSuffix(","+strings.TrimPrefix(strings.TrimSuffix(args, "}"), "{"), ","))
				out, err := drive(line)
				check.Require(t, err == nil, "%s: %v", line, err)
				var got struct {
					ID    string
					Files []struct{ ID string }
				}
				var all, wanted any
				err = json.Unmarshal(out, &got)
				check.Require(t, err == nil, "%s: %s", line, out)
				if want == "" { // no error
					want = `{"error":null}`
				}
				_, _ = json.Unmarshal(out, &all), json.Unmarshal([]byte(want), &wanted)
				check.That(t, within(wanted, all), "%s\n got %s\nwant %s", line, out, want)
				ids[op] = got.ID
				if len(got.Files) > 0 {
					ids["file"] = got.Files[0].ID
				}
			}
			address := "unix:" + s.socket()
			if b.host != "" {
				if s.cluster != "" {
					return // node and gateway would use the same socket there
				}
				_, address = overTLS(t, ca, "me")
				_, port, _ := strings.Cut(address, ":")
				address = "https://" + b.host + ":" + port
			}
			var f *fake
			if b.answers != nil {
				f = newFake(t, b.answers)
				address = "http://" + f.listener.Addr().String()
			}
			do("new", `{"address":"`+address+`",`+b.client+`}`, "")
			for _, st := range b.steps {
				began := time.Now()
				switch text := strings.Trim(st.args, `"`); st.op {
				case "runs":
					s.busy(1, text)
				case "left":
					s.without(text)
				case "canceled":
					line := regexp.MustCompile(`(?m)^.*"msg":"` + text + `".*"cause":"canceled"`)
					harness.Until(t, harness.Bound, "a canceled "+text+": "+s.log.String(), func() bool { return line.MatchString(s.log.String()) })
				default:
					do(st.op, st.args, st.want)
				}
				took := time.Since(began)
				check.That(t, took >= st.least, "%s took %v", st.op, took)
			}
			if f != nil {
				f.mu.Lock()
				defer f.mu.Unlock()
				check.NoDiff(t, cmp.Diff(b.asked, f.asked), "asked (-want +got)")
			}
		})
	}
	if !t.Failed() { // otherwise it waits for a session that was not ended
		whole.idle()
	}
}

// within reports whether got contains all of want. null stands for an absent member.
func within(want, got any) bool {
	switch want := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		for name, w := range want {
			ok = ok && within(w, g[name])
		}
		return ok
	case []any:
		g, ok := got.([]any)
		ok = ok && len(g) == len(want)
		for i := 0; ok && i < len(want); i++ {
			ok = within(want[i], g[i])
		}
		return ok
	}
	return want == got
}

// without waits until no process below the server has a command line that begins with the text.
func (s *server) without(text string) {
	s.t.Helper()
	harness.Until(s.t, harness.Bound, "the end of "+text, func() bool { return s.count(text) == 0 })
}

// made runs a tool to its end without network.
func made(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "HOME="+t.TempDir(), "PIP_DISABLE_PIP_VERSION_CHECK=1", "npm_config_offline=true", "npm_config_update_notifier=false")
	out, err := combined(c)
	check.Require(t, err == nil, "%v: %v\n%s", c.Args, err, out)
}

// clients returns the directory of a client.
func clients(t *testing.T, name string) string {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("../../clients", name))
	check.Must(t, err)
	return dir
}

// nodeProject creates a project with the Node client installed from its package.
func nodeProject(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	made(t, clients(t, "node"), "npm", "pack", "--silent", "--pack-destination", dir)
	made(t, dir, "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", dir, filepath.Join(dir, "sbxrun-0.1.0.tgz"))
	return dir
}

// copied copies a file of testdata to the directory where its imports are found.
func copied(t *testing.T, dir, name string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name), b, 0o644)
	}
	check.Must(t, err)
}

// The hand-written types, in TypeScript and in Go, have the members of the API.
func TestClientTypes(t *testing.T) {
	text := harness.ReadFile(t, filepath.Join(clients(t, "node"), "index.d.ts"))
	node := map[string][]string{}
	for _, x := range regexp.MustCompile(`(?s)export interface (\w+)[^{]*\{\n(.*?)\n\}`).FindAllStringSubmatch(string(text), -1) {
		for _, m := range regexp.MustCompile(`(?m)^  (\w+)\??: `).FindAllStringSubmatch(x[2], -1) {
			node[x[1]] = append(node[x[1]], m[1])
		}
	}
	for _, name := range []string{"Call", "NewSession", "SessionStatus"} {
		node[name] = append(node[name], node["Parts"]...)
	}
	node["NewProcess"] = append(node["NewProcess"], node["Call"]...)
	node["Report"], node["CellAnswer"] = append(node["Report"], node["Outcome"]...), append(node["CellAnswer"], node["Outcome"]...)
	for _, tt := range []struct {
		node, without string // members that a client represents in another way
		api, ours     reflect.Type
	}{
		{"Call", "", reflect.TypeFor[api.Call](), nil},
		{"NewProcess", "timeout_ms grace_ms", reflect.TypeFor[api.NewProcess](), reflect.TypeFor[sbxrun.Call]()},
		{"Limits", "", reflect.TypeFor[api.Limits](), reflect.TypeFor[sbxrun.Limits]()},
		{"FileIn", "text", reflect.TypeFor[api.FileIn](), reflect.TypeFor[sbxrun.File]()},
		{"FileOut", "", reflect.TypeFor[api.FileOut](), reflect.TypeFor[sbxrun.Collected]()},
		{"Report", "stdout_base64 stderr_base64", reflect.TypeFor[api.Answer](), reflect.TypeFor[sbxrun.Report]()},
		{"Cell", "timeout_ms", reflect.TypeFor[api.Cell](), reflect.TypeFor[sbxrun.Cell]()},
		{"CellAnswer", "stdout_base64 stderr_base64", reflect.TypeFor[api.CellAnswer](), reflect.TypeFor[sbxrun.CellAnswer]()},
		{"CellResult", "", reflect.TypeFor[api.CellResult](), reflect.TypeFor[sbxrun.CellResult]()},
		{"", "", reflect.TypeFor[api.Medium](), reflect.TypeFor[sbxrun.Medium]()},
		{"", "", reflect.TypeFor[result.Survivor](), reflect.TypeFor[sbxrun.Survivor]()},
		{"", "", reflect.TypeFor[result.ReportTeardown](), reflect.TypeFor[sbxrun.Teardown]()},
		{"CallStatus", "", reflect.TypeFor[api.CallStatus](), reflect.TypeFor[sbxrun.Status]()},
		{"NewSession", "idle_timeout_ms lifetime_ms", reflect.TypeFor[api.NewSession](), reflect.TypeFor[sbxrun.SessionOptions]()},
		{"Diff", "", reflect.TypeFor[api.Diff](), reflect.TypeFor[sbxrun.Diff]()},
		{"Change", "", reflect.TypeFor[overlay.Change](), reflect.TypeFor[sbxrun.Change]()},
		{"Snapshot", "", reflect.TypeFor[api.Snapshot](), reflect.TypeFor[sbxrun.Snapshot]()},
		{"SessionStatus", "", reflect.TypeFor[api.Session](), reflect.TypeFor[sbxrun.SessionStatus]()},
		{"Language", "", reflect.TypeFor[api.Language](), reflect.TypeFor[sbxrun.Language]()},
		{"Image", "", reflect.TypeFor[api.Image](), reflect.TypeFor[sbxrun.Image]()},
	} {
		want := slices.DeleteFunc(jsonNames(tt.api), func(name string) bool { return tt.node == "Report" && slices.Contains(atHome, name) })
		if tt.node != "" {
			check.NoDiff(t, cmp.Diff(want, node[tt.node], cmpopts.SortSlices(strings.Compare)), "%s (-api +index.d.ts)", tt.node)
		}
		if tt.ours == nil {
			continue
		}
		want = slices.DeleteFunc(want, func(name string) bool { return slices.Contains(strings.Fields(tt.without), name) })
		check.NoDiff(t, cmp.Diff(want, jsonNames(tt.ours), cmpopts.SortSlices(strings.Compare)), "%v (-api +clients/go)", tt.ours)
	}
}

// Where type checkers are installed, they accept the clients and the programs in the READMEs.
func TestClientTypesChecked(t *testing.T) {
	t.Parallel()
	node, python := t.TempDir(), t.TempDir()
	check.Must(t, os.CopyFS(filepath.Join(node, "node_modules", "sbxrun"), os.DirFS(clients(t, "node"))))
	check.Must(t, os.CopyFS(python, os.DirFS(filepath.Join(clients(t, "python")))))
	check.Must(t, os.WriteFile(filepath.Join(node, "package.json"), []byte(`{"type":"module"}`), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(node, "readme.ts"), []byte("declare const process: any;\n"+readmeCode(t, "clients/node/README.md", "js")), 0o644))
	check.Must(t, os.WriteFile(filepath.Join(python, "readme.py"), []byte("import asyncio\n"+readmeCode(t, "clients/python/README.md", "python")), 0o644))
	copied(t, python, "cancelled.py") // as when a stream is left with contextlib.aclosing
	for _, tt := range []struct {
		dir  string
		args []string
	}{
		{node, []string{"tsc", "--noEmit", "--strict", "--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom", "readme.ts"}},
		{python, []string{"mypy", "--strict", "--enable-incomplete-feature=Unpack", "--cache-dir", filepath.Join(python, "cache"), "sbxrun"}},
		{python, []string{"mypy", "--enable-incomplete-feature=Unpack", "--cache-dir", filepath.Join(python, "cache"), "readme.py"}},
		{python, []string{"mypy", "--check-untyped-defs", "--enable-incomplete-feature=Unpack", "--cache-dir", filepath.Join(python, "cache"), "cancelled.py"}},
	} {
		if _, err := exec.LookPath(tt.args[0]); err != nil {
			t.Logf("%v", err)
			continue
		}
		made(t, tt.dir, tt.args[0], tt.args[1:]...)
	}
}

// atHome are the members of a report that only command-line runs have.
var atHome = []string{"copied", "changes"}

// jsonNames returns the JSON names of a struct's members.
func jsonNames(t reflect.Type) (names []string) {
	for _, f := range reflect.VisibleFields(t) {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			names = append(names, name)
		}
	}
	return names
}

func TestNodeClient(t *testing.T) {
	t.Parallel()
	dir := nodeProject(t)
	copied(t, dir, "driver.mjs")
	ca := harness.Certificates(t)
	conform(t, ca, program(t, ca, dir, "node", "driver.mjs"))
}

// pythonProject creates an environment with the Python client installed from its package, and returns its interpreter.
func pythonProject(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	source := filepath.Join(dir, "source") // the build writes into its source
	check.Must(t, os.CopyFS(source, os.DirFS(clients(t, "python"))))
	made(t, dir, "/usr/bin/python3", "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", dir, source)
	made(t, dir, "/usr/bin/python3", "-m", "venv", "--without-pip", "venv")
	python := filepath.Join(dir, "venv", "bin", "python3")
	wheels, err := filepath.Glob(filepath.Join(dir, "sbxrun-*-py3-none-any.whl"))
	check.Require(t, err == nil && len(wheels) == 1, "%v %v", wheels, err)
	made(t, dir, "/usr/bin/python3", "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheels[0])
	return python
}

func TestPythonClients(t *testing.T) {
	t.Parallel()
	python := pythonProject(t)
	ca := harness.Certificates(t)
	made(t, clients(t, "python"), python, "-c", "import ast, pathlib\nfor f in pathlib.Path('sbxrun').glob('*.py'): ast.parse(f.read_text('utf-8'), feature_version=(3, 9))")
	for _, of := range []string{"threads", "asyncio"} {
		t.Run(of, func(t *testing.T) {
			t.Parallel()
			conform(t, ca, program(t, ca, "testdata", python, "-B", "-W", "error", "driver.py", of))
		})
	}
}

func TestAsyncioCancelled(t *testing.T) {
	t.Parallel()
	made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python"), "/usr/bin/python3", "-B", "cancelled.py")
}

func TestPythonMistakes(t *testing.T) {
	t.Parallel()
	made(t, "testdata", "env", "PYTHONPATH="+clients(t, "python"), "/usr/bin/python3", "-B", "-W", "error", "mistakes.py")
}

// An aborted call rejects with the signal's reason, also while a request waits for its retry.
func TestNodeAborted(t *testing.T) {
	t.Parallel()
	f := newFake(t, []string{answer(503, refusal, "Retry-After: 5")})
	made(t, clients(t, "node"), "node", "--input-type=module", "-e", fmt.Sprintf(`
import { Client } from "./index.js";
const leaving = new AbortController();
const reason = new Error("left");
const call = new Client("http://%s").run({ argv: ["true"] }, leaving);
setTimeout(() => leaving.abort(reason), 500);
process.exit((await call.catch((e) => e)) === reason ? 0 : 1);`, f.listener.Addr()))
}

// The Node client waits for a connection no longer than for an answer: here nobody accepts any.
func TestNodeConnects(t *testing.T) {
	t.Parallel()
	made(t, clients(t, "node"), "node", "--input-type=module", "-e", fmt.Sprintf(`
import { Client, Refused } from "./index.js";
try {
  await new Client("http://127.0.0.1:%d", { margin: 300 }).run({ argv: ["true"], timeout_ms: 1 });
} catch (e) {
  if (!(e instanceof Refused) || e.code !== "unreachable") throw e;
  process.exit(0);
}
process.exit(1);`, harness.SilentPort(t)))
}
