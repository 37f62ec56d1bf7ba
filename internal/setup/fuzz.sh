#!/bin/sh
# Runs every fuzz target, one after another, because go test accepts only one.
#
# usage: fuzz.sh [COUNT]    inputs per target, 50000x by default
#
# A count, because until Go 1.27 a target that reaches its time limit may fail with "context deadline exceeded" and no
# input (go.dev/issue/75804).
set -eu
cd "$(dirname "$0")/../.."

find . -name '*_test.go' -exec grep -H -o '^func Fuzz[A-Za-z0-9_]*' {} + | sort | {
    failed=
    while IFS=: read -r file declared; do
        target=${declared#func }
        echo "fuzz: ${file%/*} $target"
        # By default go test spends up to a minute on minimizing each new input.
        go test "${file%/*}" -run '^$' -fuzz "^$target\$" -fuzztime "${1:-50000x}" -fuzzminimizetime 10x </dev/null || failed="$failed $target"
    done
    [ -z "$failed" ] || { echo "fuzz: FAILED:$failed" && exit 1; }
}
