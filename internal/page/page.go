// Package page is the server's page for browsers: one document without anything of anybody's.
// What it shows its script asks the HTTP interface for, with a token that the user types in where
// one is needed. So nothing that a browser sends by itself, such as a cookie, gives any right.
//
// What commands write is shown on it, and they would have the token if any of that was taken for
// markup or script. The script makes text nodes alone, and the policy below would have the
// browser refuse the rest.
package page

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"net/http"
	"strings"
	"sync"
)

//go:embed page.html
var document []byte

// policy is the Content-Security-Policy: the document's own style and script by their hashes, and
// no other; images that the script has fetched; requests to this server alone; no frame around it.
var policy = sync.OnceValue(func() string {
	return strings.Join([]string{
		"default-src 'none'", "style-src " + hash("style"), "script-src " + hash("script"), "img-src blob: data:", "connect-src 'self'",
		"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
	}, "; ")
})

// hash is that of the content of the only element of a name.
func hash(name string) string {
	_, rest, _ := bytes.Cut(document, []byte("<"+name+">"))
	content, _, _ := bytes.Cut(rest, []byte("</"+name+">"))
	sum := sha256.Sum256(content)
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// Write answers with the page. 401: whoever asks has no right to anything else yet, and the page
// asks for the token.
func Write(w http.ResponseWriter, status int) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", policy())
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	w.WriteHeader(status)
	_, _ = w.Write(document) // who has gone away reads nothing
}
