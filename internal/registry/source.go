package registry

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sbxrun/sbxrun/internal/images"
)

// Source is an image in a registry. It implements [images.Source].
type Source struct {
	c *client
	// Digest is the digest in the reference; "" if it has none. Pass it to [images.Import], which verifies it.
	Digest string
	tag    string
}

// Open authenticates at the registry of a reference.
func Open(ctx context.Context, reference string, o Options) (*Source, error) {
	ref, err := parse(reference)
	if err != nil {
		return nil, err
	}
	c, err := connect(ctx, ref.Context(), o)
	if err != nil {
		return nil, err
	}
	s := &Source{c: c, tag: ref.Identifier()}
	if d, ok := ref.(name.Digest); ok {
		s.Digest = d.DigestStr()
	}
	return s, nil
}

// Name returns a reference without its digest: the usual name of the image in the store.
func Name(reference string) (string, error) {
	name, _, _ := strings.Cut(reference, "@")
	_, err := parse(reference)
	return name, err
}

// manifestTypes are the media types of manifests and indexes.
var manifestTypes = []string{string(types.OCIImageIndex), string(types.DockerManifestList), string(types.OCIManifestSchema1), string(types.DockerManifestSchema2)}

// Manifest returns the manifest or the index.
func (s *Source) Manifest(ctx context.Context) ([]byte, error) { return s.manifest(ctx, s.tag) }

// Blob opens a blob, or a manifest of an index.
func (s *Source) Blob(ctx context.Context, d images.Descriptor) (io.ReadCloser, error) {
	if !slices.Contains(manifestTypes, d.MediaType) {
		return s.c.openBlob(ctx, d.Digest, d.Size)
	}
	text, err := s.manifest(ctx, d.Digest)
	return io.NopCloser(strings.NewReader(string(text))), err
}

func (s *Source) manifest(ctx context.Context, identifier string) ([]byte, error) {
	response, err := s.c.get(ctx, "manifests/"+identifier, http.Header{"Accept": manifestTypes}, http.StatusOK)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("read the manifest: %w", s.c.explain(err))
	}
	return text, nil
}
