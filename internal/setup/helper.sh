#!/bin/sh
# Builds the helper again for both processors and compares the results with those in the repository.
set -eu
cd "$(dirname "$0")/../helper"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
src/build.sh "$made"
for name in helper_amd64 helper_arm64 hold_amd64 hold_arm64 SHA256SUMS; do
    cmp "$name" "$made/$name"
done
