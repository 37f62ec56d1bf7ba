package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strings"
	"time"
)

// blob reads a blob of a known size and verifies its digest at the end. It resumes after the connection fails.
type blob struct {
	c      *client
	ctx    context.Context
	digest string
	size   int64

	at     int64 // bytes read
	sum    hash.Hash
	body   io.ReadCloser
	failed int // times in a row without progress
	err    error
}

const maxFailed = 5

// pause is the time before the first of several attempts to resume; it doubles.
var pause = time.Second

// openBlob opens a blob. The caller closes it.
func (c *client) openBlob(ctx context.Context, digest string, size int64) (*blob, error) {
	b := &blob{c: c, ctx: ctx, digest: digest, size: size, sum: sha256.New()}
	return b, b.open()
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
	if response.StatusCode == http.StatusPartialContent {
		if !strings.HasPrefix(response.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", b.at)) {
			return failure("the registry sends another range than requested")
		}
		return nil
	}
	if response.ContentLength > b.size {
		return b.tooLong()
	}
	_, err = io.CopyN(io.Discard, b.body, b.at)
	return err
}

func (b *blob) tooLong() error {
	b.err = fmt.Errorf("the layer %s is larger than its manifest says", b.digest)
	return b.err
}

func (b *blob) Read(p []byte) (int, error) {
	for {
		if b.err != nil || len(p) == 0 {
			return 0, b.err
		}
		n, err := b.body.Read(p)
		if n > 0 {
			if b.at += int64(n); b.at > b.size {
				return 0, b.tooLong()
			}
			b.sum.Write(p[:n])
			b.failed = 0
			return n, nil // the next call reports the error
		}
		switch {
		case err == nil:
		case err == io.EOF && b.at == b.size:
			b.err = io.EOF
			if got := "sha256:" + hex.EncodeToString(b.sum.Sum(nil)); got != b.digest {
				b.err = wrongDigest("layer", b.digest, got)
			}
		case b.ctx.Err() != nil:
			b.err = context.Cause(b.ctx)
		case errors.Is(err, errTooLong):
			b.tooLong()
		default:
			b.err = b.resume(err)
		}
	}
}

// resume opens the rest of the blob after an error. It gives up after several errors without a byte between them.
func (b *blob) resume(err error) error {
	for b.failed < maxFailed && b.err == nil && !errors.Is(err, errPermanent) {
		b.body.Close()
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
	if b.err != nil {
		return b.err
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("read the layer %s: %w", b.digest, b.c.explain(err))
}

func (b *blob) Close() error {
	b.err = errors.New("closed")
	return b.body.Close()
}
