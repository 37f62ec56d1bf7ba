#!/bin/sh
# Builds bin/sbxrun, and bin/sbxrund, which sbxrun serve executes: static files, the same
# wherever they are built by the same Go, which show nothing of that place.
#
# usage: build.sh [DIR [COMMAND]]    another directory than bin; one command of cmd alone
#
# GOARCH is the processor it is for, as of go build. SBXRUN_VERSION is the version where
# there is no git to ask.
set -eu
cd "$(dirname "$0")/../.."
internal/setup/ready.sh
version=${SBXRUN_VERSION-$(git describe --tags --always --dirty 2>/dev/null || :)}
# Without -buildvcs: a copy of the sources without .git gives the same file.
CGO_ENABLED=0 exec go build -trimpath -buildvcs=false -ldflags "-s -w -X github.com/sbxrun/sbxrun/internal/version.stamp=$version" -o "${1:-bin}/" "./cmd/${2:-...}"
