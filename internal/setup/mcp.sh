#!/bin/sh
# Tests the tools for agents with official clients of the Model Context Protocol, which npm installs into a
# temporary directory: the TypeScript SDK, the Inspector's command line, and the conformance suite.
set -eu
cd "$(dirname "$0")/../.."
clients=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-mcp.XXXXXX")
trap 'rm -rf "$clients"' EXIT
npm install --prefix "$clients" --no-audit --no-fund --ignore-scripts \
    @modelcontextprotocol/sdk@1.32.2 @modelcontextprotocol/inspector@0.15.0 @modelcontextprotocol/conformance@0.1.13
SBXRUN_MCP_CLIENTS=$clients go test -tags mcpclients -count=1 -run '^TestMCP(TypeScript|Inspector|Conformance)$' ./tests/serve
