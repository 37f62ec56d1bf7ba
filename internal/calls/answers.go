package calls

import (
	"io"
	"net/http"
	"os"
	"sync"

	"github.com/sbxrun/sbxrun/internal/api"
	"github.com/sbxrun/sbxrun/internal/tenants"
)

// Answers stores HTTP responses for idempotency keys on disk. If a tenant needs more than its share, its
// oldest responses are dropped.
type Answers struct {
	dir  string
	disk *tenants.Budget

	mu  sync.Mutex
	all map[string][]*Answer // by tenant, oldest first
}

// Answer is a stored response.
type Answer struct {
	tenant, name string
	status       int
	lease        *tenants.Lease // nil after the response was dropped
}

// NewAnswers returns an empty store in dir, which is emptied. All responses together take at most total
// bytes.
func NewAnswers(dir string, total int64) (*Answers, error) {
	if err := os.RemoveAll(dir); err != nil {
		return nil, err
	}
	return &Answers{dir: dir, disk: tenants.NewBudget("bytes of stored answers", total), all: map[string][]*Answer{}}, os.MkdirAll(dir, 0o700)
}

// blockSize is the least that a file takes on disk.
const blockSize = 4096

// Put stores the response that write sends, for a tenant that may store own bytes. A response that cannot
// be stored is represented by an Answer, too, because its request must not run again.
func (a *Answers) Put(tenant string, own int64, write func(http.ResponseWriter)) *Answer {
	one := &Answer{tenant: tenant}
	f, err := os.CreateTemp(a.dir, "answer-")
	if err != nil {
		return one
	}
	defer f.Close()
	one.name = f.Name()
	w := &recorder{file: f, header: http.Header{}, status: http.StatusOK}
	write(w)
	one.status = w.status
	a.mu.Lock()
	defer a.mu.Unlock()
	for w.err == nil {
		if one.lease, err = a.disk.Take(tenant, max(blockSize, w.size), own); err == nil {
			a.all[tenant] = append(a.all[tenant], one)
			return one
		}
		one.lease = nil
		if len(a.all[tenant]) == 0 || api.AsError(err).Failure.Code == api.Policy { // it can never fit
			break
		}
		a.drop(a.all[tenant][0])
	}
	_ = os.Remove(one.name) // nothing else to do; the next server empties the directory
	return one
}

// Drop discards a response.
func (a *Answers) Drop(one *Answer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.drop(one)
}

func (a *Answers) drop(one *Answer) {
	own := a.all[one.tenant]
	for i := range own {
		if own[i] == one {
			a.all[one.tenant] = append(own[:i:i], own[i+1:]...)
			_ = os.Remove(one.name) // see Put
			one.lease.Free()
			one.lease = nil
			break
		}
	}
	if len(a.all[one.tenant]) == 0 {
		delete(a.all, one.tenant)
	}
}

// Write sends a stored response.
func (a *Answers) Write(w http.ResponseWriter, one *Answer) error {
	a.mu.Lock()
	stored := one.lease != nil
	var f *os.File
	var err error
	if stored {
		f, err = os.Open(one.name)
	}
	a.mu.Unlock()
	if err != nil {
		return err
	}
	if !stored {
		e := api.NewError(api.Idempotency, "the request has run, but its answer is no longer stored", "use POST /v1/calls for large outputs, or fewer keys")
		e.Started = true
		return e
	}
	defer f.Close()
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(one.status)
	_, _ = io.Copy(w, f) // the client may have disconnected
	return nil
}

// recorder writes the body of a response to a file.
type recorder struct {
	file   *os.File
	header http.Header
	status int
	size   int64
	err    error
}

func (r *recorder) Header() http.Header    { return r.header }
func (r *recorder) WriteHeader(status int) { r.status = status }
func (r *recorder) Write(b []byte) (int, error) {
	if r.err == nil {
		_, r.err = r.file.Write(b)
	}
	r.size += int64(len(b))
	return len(b), r.err
}
