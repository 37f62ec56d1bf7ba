#!/bin/sh
# Checks the OpenAPI documents with Redocly and Spectral, which npm installs into a temporary directory.
set -eu
cd "$(dirname "$0")/../.."
work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-openapi.XXXXXX")
trap 'rm -rf "$work"' EXIT
npm install --prefix "$work" --no-audit --no-fund --ignore-scripts @redocly/cli@2.77.0 @stoplight/spectral-cli@6.16.3
echo 'extends: ["spectral:oas"]' >"$work/spectral.yaml"
for version in 3.1 3.0; do
    go run ./cmd/sbxrund openapi $version >"$work/openapi-$version.json"
    "$work/node_modules/.bin/redocly" lint "$work/openapi-$version.json"
    "$work/node_modules/.bin/spectral" lint --ruleset "$work/spectral.yaml" "$work/openapi-$version.json"
done
