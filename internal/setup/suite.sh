#!/bin/sh
# Runs go test once, and prints how each package ended, all that failed tests have
# printed, and last one line: how many passed, failed and were skipped.
#
# usage: suite.sh NAME ARG...    NAME is for that line, ARG are those of go test
#
# SBXRUN_TESTS_NO_SKIP=1, which CI sets, makes a failure of every skipped test.
set -eu
cd "$(dirname "$0")/../.."
name=$1
shift
log=$(mktemp "${TMPDIR:-/tmp}/sbxrun-suite.XXXXXX")
trap 'rm -f "$log" "$log.result"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Verbose, because only then go test tells which tests it skipped. A package of tests hangs if it
# takes half an hour: on a slow machine the longest takes a third of that.
{
    result=0
    go test -v -count=1 -timeout 30m "$@" 2>&1 || result=$?
    echo "$result" >"$log.result"
} | tee "$log" | awk '/^(ok|FAIL)[ \t]/ { print; fflush() }' # busybox has no grep --line-buffered

count() { grep -c "^ *--- $1: " "$log" || :; }
awk -f internal/setup/failures.awk "$log"
grep -E -B 3 '^ *--- SKIP' "$log" | grep -v '^===' || :
verdict=ok
[ "$(cat "$log.result")" = 0 ] || verdict=FAILED
[ "$(count SKIP)" = 0 ] || [ "${SBXRUN_TESTS_NO_SKIP-}" != 1 ] || verdict=FAILED
echo "test: $verdict $name: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
[ "$verdict" = ok ]
