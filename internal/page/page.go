// Package page is the server's page for browsers: one static document without private data. Its script calls
// the HTTP interface with a token that the user enters. A browser sends nothing by itself, such as a cookie,
// that would grant access.
//
// The page shows output of untrusted commands, which could steal the token if it were interpreted as markup
// or script. The script creates only text nodes, and the policy below makes the browser enforce that.
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

// policy is the Content-Security-Policy. It allows the document's own style and script by hash, images that
// the script has fetched, and requests to this server; no frames.
var policy = sync.OnceValue(func() string {
	return strings.Join([]string{
		"default-src 'none'", "style-src " + hash("style"), "script-src " + hash("script"), "img-src blob: data:", "connect-src 'self'",
		"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
	}, "; ")
})

// hash returns the CSP hash of the content of the only element with this tag.
func hash(name string) string {
	_, rest, _ := bytes.Cut(document, []byte("<"+name+">"))
	content, _, _ := bytes.Cut(rest, []byte("</"+name+">"))
	sum := sha256.Sum256(content)
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// Write sends the page. With status 401 it asks for the token, because the caller is not authenticated yet.
func Write(w http.ResponseWriter, status int) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", policy())
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	w.WriteHeader(status)
	_, _ = w.Write(document) // the client may have disconnected
}
