#!/bin/sh
# Runs gofmt, go vet and staticcheck in each module, and go vet also for arm64.
set -eu
cd "$(dirname "$0")/../.."
# The flags of build.sh, to use its build cache.
export CGO_ENABLED=0 GOFLAGS=-trimpath
changed=$(gofmt -l .)
if [ -n "$changed" ]; then
    printf 'lint: error: not formatted; run gofmt -w on:\n%s\n' "$changed" >&2
    exit 1
fi
go vet -tags systemd,check,distribution,imagetools,mcpclients,agents ./...
GOARCH=arm64 go vet -tags systemd,check,distribution,imagetools,mcpclients,agents ./...
go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 -tags systemd,check,distribution,imagetools,mcpclients,agents ./...
for module in internal/setup/dist tests/manifests tests/bench tests/cluster; do
    (cd "$module" && go vet ./... && go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...)
done
