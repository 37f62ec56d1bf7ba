#!/bin/sh
# Tests the tools for agents with official clients of the Model Context Protocol, which npm installs into a
# temporary directory: the TypeScript SDK, and the Inspector's command line.
set -eu
cd "$(dirname "$0")/../.."
clients=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-mcp.XXXXXX")
trap 'rm -rf "$clients"' EXIT
npm install --prefix "$clients" --no-audit --no-fund --ignore-scripts \
    @modelcontextprotocol/sdk@1.32.2 @modelcontextprotocol/inspector@0.15.0
SBXRUN_MCP_CLIENTS=$clients go test -tags mcpclients -count=1 -run '^TestMCP(TypeScript|Inspector)$' ./tests/serve
