package serve

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/tests/check"
	"github.com/sbxrun/sbxrun/tests/harness"
)

// A call with an idempotency key continues when its connection breaks, and a retry gets its result.
func TestKeyOutlivesConnection(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	session := s.session(`{}`)
	for path, key := range map[string]string{"/v1/run": "a", session + "/exec": "b"} {
		call := sh("echo begun >&2; sleep 3; cat /proc/sys/kernel/random/uuid")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, _, _, _ = s.try(ctx, http.MethodPost, path, call, "Idempotency-Key", key)
		}()
		s.busy(1, "sleep 3")
		cancel()
		<-done
		status, b := s.ask(http.MethodPost, path, call, "Idempotency-Key", key)
		var a api.Answer
		err := json.Unmarshal(b, &a)
		check.That(t, err == nil && status == http.StatusOK && a.Cause == "exited" && len(text(a.Stdout)) == 37, "%s: %d %s", path, status, b)
		_, again := s.ask(http.MethodPost, path, call, "Idempotency-Key", key)
		check.That(t, string(again) == string(b), "%s, and then %s", b, again)
	}
}

// Stored answers do not use the tenant's memory.
func TestStoredAnswersUseNoBuffers(t *testing.T) {
	t.Parallel()
	s := serve(t, "[tenant]\nbuffers = \"6M\"\n")
	call := sh("head -c 1M /dev/zero | tr '\\0' x")
	for _, key := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		status, b := s.ask(http.MethodPost, "/v1/run", call, "Idempotency-Key", key)
		check.Require(t, status == http.StatusOK, "%s: %d %.300s", key, status, b)
	}
	status, b := s.ask(http.MethodPost, "/v1/run", call, "Idempotency-Key", "a")
	check.That(t, status == http.StatusOK && len(b) >= 1<<20, "%d %.300s", status, b)
}

// A working directory that does not exist, or is none, is an error of the request in every kind of sandbox.
func TestWrongWorkdir(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	session := s.session(`{}`)
	for _, dir := range []string{"/no/such", "/etc/passwd"} {
		call := sh("true")
		call.Workdir = dir
		code := api.Call{Code: "1", Workdir: dir}
		for _, path := range []string{"/v1/run", session + "/exec"} {
			for _, body := range []api.Call{call, code} {
				status, e := s.refused(http.MethodPost, path, body)
				check.That(t, status == http.StatusBadRequest && e.Failure.Code == api.Usage && !e.Started && strings.Contains(e.Failure.Message, dir), "%s, %s: %d %+v", path, dir, status, e)
			}
		}
	}
}

// A null member is an absent one, and code without a language is Python.
func TestNullAndDefaults(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	status, b := s.ask(http.MethodPost, "/v1/run", `{"argv":null,"language":null,"code":"print(6*7)","stdin":null,"env":null,"workdir":null,"timeout_ms":null,"grace_ms":null,
		"limits":{"memory":null,"output":null},"files":[{"path":"a","path_base64":null,"text":"","id":null,"base64":null,"mode":null}],"collect":null,"overlay":null,"volumes":null,"network":null}`)
	check.That(t, status == http.StatusOK && strings.Contains(string(b), `"stdout":"42\n"`), "%d %s", status, b)
	path := s.session(`{"limits":null,"idle_timeout_ms":null,"files":null}`)
	s.answers(http.StatusOK, `"text":"42"`, http.MethodPost, path+"/code", `{"code":"6*7","language":null,"limits":null}`)
}

// Stored files can be listed and removed by their tenant.
func TestListContentStore(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	var stored api.Stored
	_, b := s.ask(http.MethodPost, "/v1/files", []byte("text"))
	harness.Must(t, json.Unmarshal(b, &stored))
	list := func() (all api.StoredFiles) {
		status, b := s.ask(http.MethodGet, "/v1/files", nil)
		err := json.Unmarshal(b, &all)
		check.Require(t, err == nil && status == http.StatusOK, "%d %s", status, b)
		return all
	}
	all := list()
	check.That(t, len(all.Files) == 1 && all.Files[0].ID == stored.ID && all.Files[0].Size == 4 && all.Files[0].Expires != nil, "%+v", all)
	s.answers(http.StatusNoContent, "", http.MethodDelete, "/v1/files/"+stored.ID, nil)
	s.refuses(api.NoSuchFile, http.MethodDelete, "/v1/files/"+stored.ID, nil)
	all = list()
	check.That(t, len(all.Files) == 0, "%+v", all)
}

// collect descends into directories and with **, and reports patterns that match nothing.
func TestCollectDirectories(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	call := sh("mkdir -p out/a/b other; touch out/1.csv out/a/2.csv out/a/b/3.txt other/4.csv 5.csv")
	for _, test := range []struct{ patterns, want, unmatched []string }{
		{[]string{"out"}, []string{"out/1.csv", "out/a/2.csv", "out/a/b/3.txt"}, nil},
		{[]string{"**/*.csv", "*.png"}, []string{"5.csv", "other/4.csv", "out/1.csv", "out/a/2.csv"}, []string{"*.png"}},
		{[]string{"out/**/3.*", "none/x"}, []string{"out/a/b/3.txt"}, []string{"none/x"}},
	} {
		call.Collect = test.patterns
		a := s.run(call)
		var got []string
		for _, f := range a.Files {
			got = append(got, f.Path+f.Error)
		}
		slices.Sort(got)
		check.That(t, slices.Equal(got, test.want) && slices.Equal(a.Unmatched, test.unmatched), "%q: %q, unmatched %q", test.patterns, got, a.Unmatched)
	}
}

// File names that are not UTF-8 are distinct in listings and reports, and their files can be written and read.
func TestNamesNotUTF8(t *testing.T) {
	t.Parallel()
	s := serve(t, "")
	path := s.session(`{}`)
	call := sh("printf 1 >\"$(printf 'a\\377')\"; printf 2 >\"$(printf 'a\\376')\"; printf 3 >plain")
	call.Collect = []string{"a*"}
	a := s.call(path+"/exec", call)
	check.That(t, len(a.Files) == 2 && string(a.Files[0].PathBase64) == "a\xfe" && string(a.Files[1].PathBase64) == "a\xff", "%+v", a.Files)
	var list struct {
		Files []struct {
			Path       string
			PathBase64 []byte `json:"path_base64"`
		}
	}
	_, b := s.ask(http.MethodGet, path+"/files", nil)
	harness.Must(t, json.Unmarshal(b, &list))
	check.That(t, len(list.Files) == 3 && string(list.Files[0].PathBase64) == "a\xfe" && string(list.Files[1].PathBase64) == "a\xff" && list.Files[2].Path == "plain" && list.Files[2].PathBase64 == nil,
		"%s", b)
	status, b := s.ask(http.MethodGet, path+"/files/a%ff", nil)
	check.That(t, status == http.StatusOK && string(b) == "1", "%d %s", status, b)
	s.answers(http.StatusCreated, "", http.MethodPut, path+"/files/b%fd", []byte("4"))
	text := "5"
	put := sh("cat \"$(printf 'b\\375')\" \"$(printf 'c\\374')\"")
	put.Files = []api.FileIn{{PathBase64: []byte("c\xfc"), Text: &text}}
	if a := s.call(path+"/exec", put); *a.Stdout != "45" {
		t.Errorf("%q %q, %s", *a.Stdout, *a.Stderr, base64.StdEncoding.EncodeToString(put.Files[0].PathBase64))
	}
}
