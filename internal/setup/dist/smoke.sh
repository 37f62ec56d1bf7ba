#!/bin/bash
# Tries the sbxrun in PATH like a new user: the main purpose, files, and a sandbox that keeps running.
set -euo pipefail

# expect WANT GOT WHAT
expect() {
    [ "$1" = "$2" ] || {
        printf 'smoke: error: %s, as uid %s: %q, want %q\n' "$3" "$(id -u)" "$2" "$1" >&2
        exit 1
    }
}

place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
chmod 755 "$place" # root's sandboxes run as another user
cd "$place"
export SBXRUN_STATE_DIR=$place/state

expect '42 /' "$(sbxrun --cwd none --timeout 60 sh -c 'cd /; echo $((6 * 7)) "$PWD"')" 'a command'
code=0
sbxrun --timeout 60 sh -c 'exit 7' || code=$?
expect 7 "$code" 'exit code'

# A process in another session that ignores SIGTERM, which timeout(1) would leave behind.
code=0
# shellcheck disable=SC2016 # for the inner shell
sbxrun --timeout 1 --report report -- sh -c 'trap "" TERM; setsid sh -c "sleep 300" & sleep 300' 2>/dev/null || code=$?
expect 124 "$code" 'exit code at the deadline'
expect '"verdict":"proven"' "$(grep -o '"verdict":"[a-z]*"' report)" 'verdict'

# As root this requires a file system that can be idmapped; not all can be.
if [ "$(id -u)" != 0 ]; then
    sbxrun -w --timeout 60 sh -c 'echo written >file'
    expect "written $(id -u)" "$(cat file) $(stat -c %u file)" 'a file and its owner'
fi

box=$(sbxrun start --timeout 300)
expect hello "$(sbxrun exec --timeout 60 "$box" echo hello)" 'an exec'
sbxrun kill "$box" >/dev/null
expect '' "$(sbxrun ps -q)" 'sandboxes after kill'
