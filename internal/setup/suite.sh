#!/bin/sh
# Runs go test, and prints the result of each package, the output of failed tests, and last
# the numbers of tests that passed, failed and were skipped.
#
# usage: suite.sh NAME ARG...    NAME is for the last line, ARGs are passed to go test
#
# With SBXRUN_TESTS_NO_SKIP=1, which CI sets, a skipped test is a failure.
set -eu
cd "$(dirname "$0")/../.."
name=$1
shift
log=$(mktemp "${TMPDIR:-/tmp}/sbxrun-suite.XXXXXX")
trap 'rm -f "$log" "$log.result"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Verbose, because otherwise go test does not report skipped tests. The longest package takes ten
# minutes on a slow machine.
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
