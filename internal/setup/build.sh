#!/bin/sh
# Builds bin/sbxrun, and bin/sbxrund, which sbxrun serve executes: static files that are
# identical wherever the same Go builds them.
#
# usage: build.sh [DIR [COMMAND]]    another directory than bin; only one command of cmd
#
# GOARCH selects the processor, as for go build. SBXRUN_VERSION is the version if there is
# no git.
set -eu
cd "$(dirname "$0")/../.."
internal/setup/ready.sh
version=${SBXRUN_VERSION-$(git describe --tags --always --dirty 2>/dev/null || :)}
# Without -buildvcs, so that a copy of the sources without .git builds the same file.
to=${1:-bin}
mkdir -p "$to"
made=$(mktemp -d "$to/.made.XXXXXX")
trap 'rm -rf "$made"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags "-s -w -E=sbxrun_entry -X github.com/sbxrun/sbxrun/internal/version.stamp=$version" -o "$made/" "./cmd/${2:-...}"
# The linker writes a file page by page, and cp in large blocks, which the kernel then caches in
# large folios (ext4 since Linux 6.16). A page fault maps more of it, and sbxrun true takes 3 % less.
for program in "$made"/*; do
    cp "$program" "$program.copy"
    mv "$program.copy" "$to/${program##*/}"
done
