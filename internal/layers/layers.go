// Package layers packs the upper layer of an overlay as a tar, compressed, and makes a layer of one
// again that overlayfs takes as a lower one.
//
// The tar is as others write and read layers (OCI image specification, layer.md): what is deleted is
// an empty file .wh.NAME, and a directory that hides what is below it has .wh..wh..opq in it.
// Equal layers make equal tars: names are sorted, all belongs to user 0, and times of access are
// left out. So their hashes are equal too, and the store has them once. Not kept are sockets,
// named pipes and devices, setuid, setgid and sticky bits, and extended attributes.
//
// A payload has written what is packed, and may still write to it: package tree reads it. What is
// unpacked may come from another machine: only names are taken that lead nowhere else, and kinds
// that a layer has, into a directory that nobody else can reach; and no more than was announced.
package layers

import (
	"fmt"
	"path"
	"strings"

	"github.com/sbxrun/sbxrun/cleanup/result"
)

// Count is what a tar has, or may have at most.
type Count struct {
	Bytes   int64 // of the tar
	Entries int
	LeftOut int // sockets, named pipes and devices; of what is packed
}

const (
	maxDepth = 100
	maxName  = 4000      // bytes of a path; PATH_MAX is 4096
	maxText  = 256 << 20 // bytes of all paths
)

func refused(format string, args ...any) error {
	return &result.Error{Code: "damaged", Message: "the layer is refused: " + fmt.Sprintf(format, args...)}
}

// cleanName checks the name of an entry, and returns it in its shortest form.
func cleanName(name string) (string, error) {
	clean := strings.TrimSuffix(name, "/")
	if clean == "" || len(clean) > maxName || path.IsAbs(clean) || path.Clean(clean) != clean || clean == "." || clean == ".." ||
		strings.HasPrefix(clean, "../") || strings.ContainsRune(clean, 0) || strings.Count(clean, "/") >= maxDepth {
		return "", refused("an entry is called %.80q", name)
	}
	return clean, nil
}
