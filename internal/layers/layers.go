// Package layers packs the upper layer of an overlay as a compressed tar, and unpacks it to a
// lower layer for overlayfs.
//
// The tar follows the OCI image specification (layer.md): an empty file .wh.NAME stands for a
// deletion, and a file .wh..wh..opq hides the contents of its directory in lower layers. Equal
// layers make equal tars, because names are sorted, all files belong to user 0, and access times are
// left out. Their hashes are therefore equal, and the store keeps them once. Sockets, named
// pipes, devices, setuid, setgid and sticky bits, and extended attributes are not kept.
//
// A command has written the layer to pack, and may still be writing to it, so package tree reads it.
// A layer to unpack may come from another machine: it is unpacked to a private directory, only names
// that stay inside it and file types that occur in layers are accepted, and no more data than
// announced.
package layers

import (
	"fmt"
	"path"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Count is the size of a tar, or its maximum.
type Count struct {
	Bytes   int64 // size of the tar
	Entries int
	Content int64 // size of all files, which is more if some are sparse
	LeftOut int   // sockets, named pipes and devices that were not packed
}

const (
	maxDepth = 100
	maxName  = 4000      // bytes of a path; PATH_MAX is 4096
	maxText  = 256 << 20 // bytes of all paths
)

func refused(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "invalid layer: " + fmt.Sprintf(format, args...)}
}

// cleanName checks the name of an entry and removes a trailing slash.
func cleanName(name string) (string, error) {
	clean := strings.TrimSuffix(name, "/")
	if clean == "" || len(clean) > maxName || path.IsAbs(clean) || path.Clean(clean) != clean || clean == "." || clean == ".." ||
		strings.HasPrefix(clean, "../") || strings.ContainsRune(clean, 0) || strings.Count(clean, "/") >= maxDepth {
		return "", refused("invalid name %.80q", name)
	}
	return clean, nil
}
