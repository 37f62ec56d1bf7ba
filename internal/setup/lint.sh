#!/bin/sh
# Runs go vet and staticcheck, in each module. vet also reads what is compiled on arm64 alone.
set -eu
cd "$(dirname "$0")/../.."
# As build.sh builds: what it has compiled is not compiled again.
export CGO_ENABLED=0 GOFLAGS=-trimpath
go vet -tags systemd,check ./...
GOARCH=arm64 go vet -tags systemd,check ./...
go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 -tags systemd,check ./...
for module in internal/setup/dist tests/manifests tests/bench tests/cluster; do
    (cd "$module" && go vet ./... && go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 ./...)
done
