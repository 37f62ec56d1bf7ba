package config

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"
)

// Tokens are the known tokens, as hashes.
type Tokens []token

type token struct {
	tenant string
	sum    [sha256.Size]byte
}

// hashed is the prefix of a hash in the file.
const hashed = "sha256:"

// LoadTokens reads a file of lines TENANT sha256:HEX and comments starting with #. Random tokens need no
// salt, because they cannot be enumerated.
func LoadTokens(name string) (Tokens, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("token_file: %w", err)
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if err := checkTokenFile(name, st); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	var all Tokens
	for i, line := range strings.Split(string(text), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) != 2 || !strings.HasPrefix(fields[1], hashed) {
			return nil, fmt.Errorf("%s:%d: want TENANT %sHEX, with the hash that sha256sum prints", name, i+1, hashed)
		}
		if !validTenant(fields[0]) {
			return nil, fmt.Errorf("%s:%d: tenant %q: want 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit, and not with %s, which is reserved for users of a Unix socket", name, i+1, fields[0], Local)
		}
		sum, err := hex.DecodeString(strings.TrimPrefix(fields[1], hashed))
		if err != nil || len(sum) != sha256.Size {
			return nil, fmt.Errorf("%s:%d: invalid SHA-256 hash", name, i+1)
		}
		if [sha256.Size]byte(sum) == sha256.Sum256(nil) { // probably of an unset variable
			return nil, fmt.Errorf("%s:%d: hash of an empty token; create a token with openssl rand -hex 32", name, i+1)
		}
		all = append(all, token{fields[0], [sha256.Size]byte(sum)})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("token_file %s: no token found; want lines TENANT %sHEX", name, hashed)
	}
	return all, nil
}

// checkTokenFile rejects a file that others can write to, because they could add a token for any tenant.
func checkTokenFile(name string, st fs.FileInfo) error {
	const others = 0o022
	switch owner := int(st.Sys().(*syscall.Stat_t).Uid); {
	case !st.Mode().IsRegular():
		return fmt.Errorf("token_file %s: not a regular file", name)
	case owner != 0 && owner != os.Geteuid():
		return fmt.Errorf("token_file %s: owned by uid %d, who could add tokens; chown it to root or uid %d", name, owner, os.Geteuid())
	case st.Mode().Perm()&others != 0:
		return fmt.Errorf("token_file %s: writable by others (mode %04o); run chmod go-w %s", name, st.Mode().Perm(), name)
	}
	return nil
}

// Local is the reserved prefix of tenants that connect through a Unix socket, such as uid-1000.
const Local = "uid-"

// ValidTenant reports whether a tenant, of a token or of a Unix socket, has a valid name.
func ValidTenant(name string) bool { return validTenant(strings.TrimPrefix(name, Local)) }

// validTenant reports whether a token's tenant has a valid name. Names are also used for directories and
// metric labels.
func validTenant(name string) bool {
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || c != '.' && c != '-' && c != '_') {
			return false
		}
	}
	return name != "" && len(name) <= 64 && !strings.HasPrefix(name, Local)
}

// Tenant returns the tenant of a token. It takes the same time for every token.
func (t Tokens) Tenant(secret string) (tenant string, ok bool) {
	sum := sha256.Sum256([]byte(secret))
	for _, each := range t {
		if subtle.ConstantTimeCompare(sum[:], each.sum[:]) == 1 {
			tenant, ok = each.tenant, true
		}
	}
	return tenant, ok
}
