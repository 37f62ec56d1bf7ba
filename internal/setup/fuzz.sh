#!/bin/sh
# Runs every fuzz target for a time, one after the other: go test takes only one.
#
# usage: fuzz.sh [COUNT]    50000x inputs each if there is none
#
# A count and not a time: until Go 1.27 a target whose time ends may fail with "context deadline exceeded" and no input
# (go.dev/issue/75804).
set -eu
cd "$(dirname "$0")/../.."

find . -name '*_test.go' -exec grep -H -o '^func Fuzz[A-Za-z0-9_]*' {} + | sort | {
    failed=
    while IFS=: read -r file declared; do
        target=${declared#func }
        echo "fuzz: ${file%/*} $target"
        # Of each input that is new go test would try for a minute to make it smaller, in place of trying others.
        go test "${file%/*}" -run '^$' -fuzz "^$target\$" -fuzztime "${1:-50000x}" -fuzzminimizetime 10x </dev/null || failed="$failed $target"
    done
    [ -z "$failed" ] || { echo "fuzz: FAILED:$failed" && exit 1; }
}
