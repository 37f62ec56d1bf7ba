// Package registry reads images from registries (OCI distribution specification). A registry is not trusted: sizes are
// bounded, redirects are restricted, and package images verifies all digests. Error messages contain neither credentials
// nor text that a registry has chosen.
package registry

import (
	"fmt"
	"regexp"
	"sync"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// grammar is the grammar of references, which package name does not enforce: it accepts ../../etc. Compiling it takes
// half a millisecond.
var grammar = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(?:(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?/)?` + // host
		`[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*` + // repository
		`(?::[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?$`)
})

const maxReference = 512 // bytes

// parse parses a reference such as python:3.13, ghcr.io/owner/name:tag or name@sha256:DIGEST. A tag next to a digest
// has no effect, as in docker.
func parse(text string) (name.Reference, error) {
	if len(text) <= maxReference && grammar().MatchString(text) {
		if ref, err := name.ParseReference(text); err == nil {
			return ref, nil
		}
	}
	return nil, &result.Error{Code: "usage", Message: fmt.Sprintf("invalid image reference %.100q: want [HOST[:PORT]/]NAME[:TAG][@sha256:DIGEST] in lower case", text)}
}
