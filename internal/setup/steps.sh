# shellcheck shell=sh
# Sourced by check.sh and nightly.sh: runs steps, collects what failed, and prints a summary.
# With SBXRUN_TESTS_NO_SKIP=1, which CI sets, a step that cannot run here is a failure.
root=$PWD
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
export SBXRUN_BIN="$root/bin/sbxrun"

work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
: >"$work/last"
status=0
summary=

note() { summary="$summary
check: $*"; }

# left_out WHAT: reports a step that cannot run here.
left_out() {
    note "NOT RUN: $*"
    [ "${SBXRUN_TESTS_NO_SKIP-}" != 1 ] || status=1
}

# step NAME COMMAND...: runs a step.
step() {
    name=$1
    shift
    echo
    echo "check: $name"
    begin=${since:-$(date +%s)}
    since=
    verdict=ok
    rm -f "$work/failed"
    { "$@" </dev/null || : >"$work/failed"; } 2>&1 | tee "$work/output"
    if [ -e "$work/failed" ]; then
        verdict=FAILED
        status=1
        { echo && echo "check: $name printed last:" && grep -v '^ok' "$work/output" | tail -n 30 | cut -c 1-300; } >>"$work/last" || :
    fi
    note "$verdict: $name, $(($(date +%s) - begin)) s"
}

# beside NAME COMMAND...: runs a step in parallel with the next ones, until joined.
beside() {
    beside=$1
    shift
    started=$(date +%s)
    { rm -f "$work/beside.ok" && "$@" </dev/null && : >"$work/beside.ok"; } >"$work/beside" 2>&1 &
}

joined() {
    wait || :
    since=$started
    # shellcheck disable=SC2016 # for the other shell
    step "$beside" sh -c 'cat "$1" && [ -e "$1.ok" ]' - "$work/beside"
}

# finish: repeats the last lines of each failed step, for readers who see only the end of the log, prints the summary
# and exits.
finish() {
    cat "$work/last"
    echo "$summary"
    exit "$status"
}

suite=internal/setup/suite.sh
machine=$(dpkg --print-architecture 2>/dev/null || :) # empty except on Debian
compiler=$(go env CC)
race=
if [ "$(go env CGO_ENABLED)" = 1 ] && command -v "${compiler%% *}" >/dev/null; then
    race=-race
fi
# The flags of build.sh and test.sh, so that no library is compiled twice.
export CGO_ENABLED=0 GOFLAGS=-trimpath
quick="-ldflags=-s -vet=off -tags=check" # lint.sh runs go vet

. internal/setup/speed.sh
# Factors for upper bounds of times. Tests of the command get more, because three packages run at once with six
# tests each.
near=2
[ "$slow" = 1 ] || near=6
bounds="env SBXRUN_TESTS_SLOW=${SBXRUN_TESTS_SLOW:-$((near * slow))}"
wide="env SBXRUN_TESTS_SLOW=${SBXRUN_TESTS_SLOW:-$((6 * slow))}"
