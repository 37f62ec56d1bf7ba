#!/bin/sh
# Builds bin/sbxrun: one static file, which shows nothing of where it was built.
set -eu
cd "$(dirname "$0")/../.."
if ! command -v go >/dev/null; then
    echo "setup: error: no go in PATH" >&2
    echo "setup: hint: install Go 1.26 or later, https://go.dev/doc/install" >&2
    exit 1
fi
version=$(git describe --tags --always --dirty 2>/dev/null || echo devel)
CGO_ENABLED=0 exec go build -trimpath -ldflags "-s -w -X main.version=$version" -o bin/sbxrun ./cmd/sbxrun
