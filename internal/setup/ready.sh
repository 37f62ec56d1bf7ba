#!/bin/sh
# Checks that go works before anything is installed, and otherwise prints a remedy.
set -eu

die() {
    echo "setup: error: $1" >&2
    echo "setup: hint: $2" >&2
    exit 1
}

command -v go >/dev/null || die "no go in PATH" "install Go 1.26 or later, https://go.dev/doc/install"
case $(go version 2>&1) in
*" go1."[0-9][" ".]* | *" go1.1"[0-9][" ".]* | *" go1.20"[" ".]*) # cannot download a later one
    die "$(go version) is too old" "install Go 1.26 or later, https://go.dev/doc/install" ;;
esac
# Fails if go.mod requires a later Go and GOTOOLCHAIN=local forbids downloading it.
go list -m >/dev/null || die "$(go version) cannot build this" "install Go 1.26 or later, https://go.dev/doc/install, or let it fetch one: GOTOOLCHAIN=auto"
tmp=${TMPDIR:-/tmp}
[ -d "$tmp" ] && [ -w "$tmp" ] || die "cannot write to the directory for temporary files, $tmp" "set TMPDIR to a directory that you can write to"
cache=$(go env GOCACHE)
case $cache in
/*) mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || die "cannot write to the directory for go's cache, $cache" "set GOCACHE to a directory that you can write to" ;;
*) die "there is no place for go's cache, because HOME is not set" "export HOME=DIR, a directory that you can write to" ;;
esac
