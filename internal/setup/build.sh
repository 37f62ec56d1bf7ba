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
to=${1:-bin}
mkdir -p "$to"
made=$(mktemp -d "$to/.made.XXXXXX")
trap 'rm -rf "$made"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -E=sbxrun_entry -X github.com/sbxrun/sbxrun/internal/version.stamp=$version" -o "$made/" "./cmd/${2:-...}"
# The linker writes a file page by page, and cp in large pieces; and as it was written the kernel
# keeps it in memory (ext4 in large folios since Linux 6.16). Then a start maps more of it with one
# fault, and sbxrun true takes 3 % less.
for program in "$made"/*; do
    cp "$program" "$program.copy"
    mv "$program.copy" "$to/${program##*/}"
done
