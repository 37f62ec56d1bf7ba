#!/bin/sh
# Tests the tools for agents with coding agents whose model is a stub: Codex, Gemini CLI, opencode and Claude Code,
# which npm installs into a temporary directory. They have their own homes, and no network except loopback.
set -eu
cd "$(dirname "$0")/../.."
agents=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-agents.XXXXXX")
trap 'rm -rf "$agents"' EXIT
npm install --prefix "$agents" --no-audit --no-fund --loglevel error \
    @openai/codex@0.171.0 @google/gemini-cli@0.61.0 opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.332
go test -c -vet=off -tags agents -o "$agents/agents.test" ./tests/agents
as=
[ "$(id -u)" = 0 ] || as='--map-current-user --keep-caps'
cd tests/agents
# shellcheck disable=SC2016,SC2086 # for the other shell; a list of words
SBXRUN_AGENTS=$agents unshare --net $as sh -c 'ip link set lo up && exec setpriv --inh-caps -all --ambient-caps -all "$0" -test.v' "$agents/agents.test"
