#!/bin/sh
# Runs every fuzz target for a time, one after the other: go test takes only one.
#
# usage: fuzz.sh [TIME]    10s if there is none
set -eu
cd "$(dirname "$0")/../.."

find . -name '*_test.go' -exec grep -H -o '^func Fuzz[A-Za-z0-9_]*' {} + | sort | {
    failed=
    while IFS=: read -r file declared; do
        target=${declared#func }
        more=
        # An environment file grows large, and go test would minimize each for a minute.
        [ "$target" != FuzzParseVars ] || more='-fuzzminimizetime 10x'
        echo "fuzz: ${file%/*} $target"
        # shellcheck disable=SC2086 # two words
        go test "${file%/*}" -run '^$' -fuzz "^$target\$" -fuzztime "${1:-10s}" $more </dev/null || failed="$failed $target"
    done
    [ -z "$failed" ] || { echo "fuzz: FAILED:$failed" && exit 1; }
}
