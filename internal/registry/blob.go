package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// blob reads a blob of a known size, at most one byte more, and resumes after the connection fails.
type blob struct {
	c      *client
	ctx    context.Context
	digest string
	size   int64

	at     int64 // bytes read
	body   io.ReadCloser
	failed int // times in a row without progress
	err    error
}

const maxFailed = 5

// pause is the time before the first of several attempts to resume; it doubles.
var pause = time.Second

// openBlob opens a blob. The caller closes it.
func (c *client) openBlob(ctx context.Context, digest string, size int64) (io.ReadCloser, error) {
	b := &blob{c: c, ctx: ctx, digest: digest, size: size}
	if err := b.open(); err != nil {
		return nil, err
	}
	return b, nil
}

// open requests the rest of the blob. A registry that ignores the range sends all of it again.
func (b *blob) open() error {
	header := http.Header{}
	if b.at > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", b.at, b.size-1))
	}
	response, err := b.c.get(withLimit(b.ctx, b.size+1), "blobs/"+b.digest, header, http.StatusOK, http.StatusPartialContent)
	if err != nil {
		return err
	}
	b.body = response.Body
	if response.StatusCode == http.StatusOK {
		_, err = io.CopyN(io.Discard, b.body, b.at)
	} else if !strings.HasPrefix(response.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", b.at)) {
		err = failure("the registry sent a different range than requested")
	}
	if err != nil {
		b.body.Close()
	}
	return err
}

func (b *blob) Read(p []byte) (int, error) {
	for {
		p = p[:max(0, min(int64(len(p)), b.size+1-b.at))]
		if b.err != nil || len(p) == 0 {
			return 0, b.err
		}
		n, err := b.body.Read(p)
		if n > 0 {
			b.at += int64(n)
			b.failed = 0
			return n, nil // the next call reports the error
		}
		switch {
		case err == nil:
		case err == io.EOF && b.at >= b.size:
			b.err = io.EOF
		default:
			b.err = b.resume(err)
		}
	}
}

// resume opens the rest of the blob after an error. It gives up after several errors without a byte between them.
func (b *blob) resume(err error) error {
	b.body.Close()
	for b.failed < maxFailed && !errors.Is(err, errPermanent) {
		select {
		case <-time.After(pause << b.failed):
		case <-b.ctx.Done():
			return context.Cause(b.ctx)
		}
		b.failed++
		if err = b.open(); err == nil {
			return nil
		}
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read the blob %s: %w", b.digest, b.c.explain(err))
}

func (b *blob) Close() error {
	b.err = errors.New("closed")
	return b.body.Close()
}
