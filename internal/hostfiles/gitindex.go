package hostfiles

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/fnv"
	"io"
	"os"
	"path"
	"strings"

	"github.com/sbxrun/sbxrun/internal/tree"
	"golang.org/x/sys/unix"
)

// GitIndexName is the path of a repository's index in its working tree.
const GitIndexName = ".git/index"

// GitIndex returns a digest of the git index (gitformat-index(5)) of a working tree. The digest covers the
// entries without the status of their files, which git status refreshes. It is "" if there is no index of
// version 2 to 4, or the entries are in another file (split index).
func GitIndex(dir int) string {
	fd, st, err := tree.OpenFile(dir, GitIndexName)
	if err != nil {
		return ""
	}
	f := os.NewFile(uintptr(fd), GitIndexName)
	defer f.Close()
	const most = 64 << 20
	if st.Size > most {
		return ""
	}
	content, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return ""
	}
	return indexDigest(content)
}

func indexDigest(content []byte) string {
	for _, size := range []int{20, 32} { // SHA-1, SHA-256
		if digest := indexDigestOf(content, size); digest != "" {
			return digest
		}
	}
	return ""
}

// indexDigestOf is indexDigest for a size of hashes.
func indexDigestOf(content []byte, hash int) string {
	const header, stat = 12, 40
	if len(content) < header+hash || string(content[:4]) != "DIRC" {
		return ""
	}
	version, count := binary.BigEndian.Uint32(content[4:]), binary.BigEndian.Uint32(content[8:])
	if version < 2 || version > 4 {
		return ""
	}
	digest := fnv.New128a()
	rest := content[header : len(content)-hash]
	var name []byte
	for range count {
		entry := rest
		fixed := stat + hash + 2
		if len(rest) < fixed {
			return ""
		}
		flags := binary.BigEndian.Uint16(rest[stat+hash:])
		digest.Write(rest[24:28]) // the mode, which is not part of the status
		digest.Write(rest[stat:fixed])
		if flags&0x4000 != 0 {
			if len(rest) < fixed+2 || version < 3 {
				return ""
			}
			digest.Write(rest[fixed : fixed+2])
			fixed += 2
		}
		rest = rest[fixed:]
		if version == 4 {
			cut, n := offset(rest)
			if n == 0 || cut > uint64(len(name)) {
				return ""
			}
			name, rest = name[:len(name)-int(cut)], rest[n:]
		} else {
			name = name[:0]
		}
		end := bytes.IndexByte(rest, 0)
		if end < 0 {
			return ""
		}
		name = append(name, rest[:end]...)
		if long := int(flags & 0xfff); len(name) == 0 || long < 0xfff && long != len(name) {
			return ""
		}
		digest.Write(name)
		digest.Write([]byte{0})
		if version == 4 {
			rest = rest[end+1:]
			continue
		}
		padded := (fixed + end + 8) &^ 7 // one to eight NULs
		if len(entry) < padded {
			return ""
		}
		rest = entry[padded:]
	}
	for len(rest) >= 8 { // extensions, most of which are caches
		if string(rest[:4]) == "link" {
			return ""
		}
		size := uint64(binary.BigEndian.Uint32(rest[4:]))
		if size > uint64(len(rest)-8) {
			return ""
		}
		rest = rest[8+size:]
	}
	if len(rest) > 0 {
		return ""
	}
	return hex.EncodeToString(digest.Sum(nil))
}

// offset reads a number as in a pack's offset deltas (gitformat-pack(5)), and returns how many bytes it has.
func offset(b []byte) (value uint64, n int) {
	for n < len(b) && n < 9 {
		c := b[n]
		value = value<<7 | uint64(c&0x7f)
		n++
		if c&0x80 == 0 {
			return value, n
		}
		value++
	}
	return 0, 0
}

// GitDir returns the path of the repository directory (.git) that contains a path, or "".
func GitDir(name string) string {
	parts := strings.Split(name, "/")
	for i, part := range parts[:len(parts)-1] {
		if fold(part) == ".git" {
			return path.Join(parts[:i+1]...)
		}
	}
	return ""
}

// GitFile reads a path after a prefix in the first line of a file of git(1), which may be relative to dir.
func GitFile(file, dir, prefix string) (name string, ok bool) {
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", false
	}
	defer unix.Close(fd)
	buf := make([]byte, unix.PathMax)
	n, _ := unix.Read(fd, buf)
	line, _, _ := strings.Cut(string(buf[:max(n, 0)]), "\n")
	if name, ok = strings.CutPrefix(line, prefix); !ok || name == "" {
		return "", false
	}
	if !path.IsAbs(name) {
		name = path.Join(dir, name)
	}
	return path.Clean(name), true
}
