package config

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
)

// Tokens are whom the server takes calls from. They are kept as they are in the file, hashed.
type Tokens []token

type token struct {
	tenant string
	sum    [sha256.Size]byte
}

// hashed is how the file writes the hash of a token.
const hashed = "sha256:"

// LoadTokens reads a file of lines TENANT sha256:HEX. What begins with # is a comment. A token
// needs no salt, because it is random: nobody can list those that there may be.
func LoadTokens(name string) (Tokens, error) {
	text, err := os.ReadFile(name)
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
			return nil, fmt.Errorf("%s:%d: want TENANT %sHEX", name, i+1, hashed)
		}
		if !validTenant(fields[0]) {
			return nil, fmt.Errorf("%s:%d: tenant %q: want letters, digits, dots, dashes and underscores, at most 64, and a letter or digit first", name, i+1, fields[0])
		}
		sum, err := hex.DecodeString(strings.TrimPrefix(fields[1], hashed))
		if err != nil || len(sum) != sha256.Size {
			return nil, fmt.Errorf("%s:%d: the hash is not one of sha256sum", name, i+1)
		}
		all = append(all, token{fields[0], [sha256.Size]byte(sum)})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: there is no token", name)
	}
	return all, nil
}

// validTenant reports whether a name is one. It is also that of a directory, and a label of
// metrics.
func validTenant(name string) bool {
	for i, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || c != '.' && c != '-' && c != '_') {
			return false
		}
	}
	return name != "" && len(name) <= 64
}

// Tenant returns whose token this is. It takes the same time for every token.
func (t Tokens) Tenant(secret string) (tenant string, ok bool) {
	sum := sha256.Sum256([]byte(secret))
	for _, each := range t {
		if subtle.ConstantTimeCompare(sum[:], each.sum[:]) == 1 {
			tenant, ok = each.tenant, true
		}
	}
	return tenant, ok
}
