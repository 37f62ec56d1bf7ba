package layers

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"io"
	"runtime"
	"slices"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

// frameSize is the amount of data that is compressed on its own. A layer is a sequence of frames
// (RFC 8878, 3.1), so that several processors can compress, and the result does not depend on
// their number.
const frameSize = 4 << 20

// Writer compresses and hashes a layer. It must be closed.
type Writer struct {
	to     io.Writer
	frame  *frame      // the current frame, or nil
	spare  chan *frame // for reuse: touching new memory costs as much as compressing
	hashes chan *frame // in order
	hashed chan hash.Hash
	frames chan *frame // in order
	done   chan error
	failed chan struct{} // closed after a write error

	encoder *zstd.Encoder
	size    int64
}

// frame is a part of a layer.
type frame struct {
	text, packed []byte
	hashed, made chan struct{} // receive a value when done
}

// NewWriter returns a Writer. Close returns the first error of to.
func NewWriter(to io.Writer) (*Writer, error) {
	n := runtime.GOMAXPROCS(0)
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(n), zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderCRC(false)) // the SHA-256 hash is stronger
	if err != nil {
		return nil, err
	}
	w := &Writer{to: to, encoder: encoder, spare: make(chan *frame, n+3), hashes: make(chan *frame, n+3), hashed: make(chan hash.Hash),
		frames: make(chan *frame, n+3), done: make(chan error, 1), failed: make(chan struct{})}
	for range n + 2 {
		w.spare <- &frame{hashed: make(chan struct{}, 1), made: make(chan struct{}, 1)}
	}
	go w.hash()
	go w.write()
	return w, nil
}

func (w *Writer) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		if w.frame == nil {
			w.frame = <-w.spare // bounds the number of frames
			// Allocate it whole: growing would touch and discard memory several times.
			w.frame.text = slices.Grow(w.frame.text, frameSize)
		}
		f := w.frame
		n := min(len(rest), frameSize-len(f.text))
		f.text = append(f.text, rest[:n]...)
		if rest = rest[n:]; len(f.text) == frameSize {
			w.flush()
		}
	}
	select {
	case <-w.failed:
		return 0, io.ErrClosedPipe
	default:
		return len(b), nil
	}
}

// flush starts compressing and hashing the frame.
func (w *Writer) flush() {
	f := w.frame
	w.frame = nil
	w.frames <- f
	w.hashes <- f
	go func() {
		f.packed = w.encoder.EncodeAll(f.text, slices.Grow(f.packed[:0], w.encoder.MaxEncodedSize(len(f.text))))
		f.made <- struct{}{}
	}()
}

func (w *Writer) hash() {
	h := sha256.New()
	for f := range w.hashes {
		h.Write(f.text)
		f.hashed <- struct{}{}
	}
	w.hashed <- h
}

func (w *Writer) write() {
	var err error
	for f := range w.frames {
		<-f.made
		if err == nil {
			if _, err = w.to.Write(f.packed); err != nil {
				close(w.failed)
			}
			w.size += int64(len(f.packed))
		}
		<-f.hashed
		f.text = f.text[:0]
		w.spare <- f
	}
	w.done <- err
}

// Close writes the remaining data and returns the hash of the uncompressed data and the compressed
// size.
func (w *Writer) Close() (sum string, size int64, err error) {
	if w.frame != nil {
		w.flush()
	}
	close(w.hashes)
	close(w.frames)
	h := <-w.hashed
	err = <-w.done
	w.encoder.Close()
	return hex.EncodeToString(h.Sum(nil)), w.size, err
}

// Reader decompresses and hashes a layer.
type Reader struct {
	from  io.Reader
	under *failing
	close func()
	hash  hash.Hash
}

// maxWindow bounds the window of a frame, and so the memory that a foreign layer can use.
const maxWindow = 16 << 20

// NewReader returns a Reader, which must be closed. The layer is compressed with zstd or gzip, or a plain tar.
func NewReader(from io.Reader) (*Reader, error) {
	under := &failing{r: from}
	in := bufio.NewReaderSize(under, 64<<10)
	begin, err := in.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	r := &Reader{from: in, under: under, close: func() {}, hash: sha256.New()}
	switch kind := Compression(begin); kind {
	case "zstd":
		d, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(8*maxWindow))
		if err != nil {
			return nil, err
		}
		r.from, r.close = d, d.Close
	case "gzip":
		d, err := gzip.NewReader(in)
		if err != nil {
			return nil, r.undecoded(err)
		}
		r.from = d
	}
	return r, nil
}

// Compression returns the compression of data that begins with these four bytes: "gzip", "zstd", or "" for none.
func Compression(begin []byte) string {
	switch {
	case bytes.HasPrefix(begin, []byte{0x1f, 0x8b}):
		return "gzip"
	case bytes.HasPrefix(begin, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(begin) == 4 && begin[0]&0xf0 == 0x50 && begin[1] == 0x2a && begin[2] == 0x4d && begin[3] == 0x18: // a skippable frame
		return "zstd"
	}
	return ""
}

// failing remembers the error of a reader, to tell it from errors of the decompressor.
type failing struct {
	r   io.Reader
	err error
}

func (f *failing) Read(b []byte) (int, error) {
	n, err := f.r.Read(b)
	if err != nil && err != io.EOF {
		f.err = err
	}
	return n, err
}

func (r *Reader) undecoded(err error) error {
	if r.under.err != nil {
		return r.under.err
	}
	return refused("cannot decompress it: %v", err)
}

func (r *Reader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	r.hash.Write(b[:n])
	if err != nil && err != io.EOF {
		err = r.undecoded(err)
	}
	return n, err
}

// Close releases the decompressor.
func (r *Reader) Close() { r.close() }

// Sum returns the hash of the data read.
func (r *Reader) Sum() string { return hex.EncodeToString(r.hash.Sum(nil)) }
