#!/bin/sh
# Runs all tests twice: as root, and as an ordinary user.
#
# Started by root, the second half runs under a user id that nobody has. Started
# by somebody else, the half of root needs a sudo that does not ask; where there
# is none, that half is not run, and the last lines say so.
#
# The race detector is for the tests beside the code, those in tests/ run the
# built binary. It needs a C compiler. SBXRUN_TESTS_NO_SKIP=1, which CI sets,
# makes a failure of every skipped test, and of what this script would leave out.
# shellcheck disable=SC2086 # lists of words are split on purpose
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
strict=${SBXRUN_TESTS_NO_SKIP-}
export SBXRUN_BIN="$root/bin/sbxrun"
# Root without the usual places in PATH does not find setpriv and others.
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"

work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-check.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
status=0
summary=

note() { summary="$summary
test: $*"; }

# left_out WHAT: what cannot be done here is said, and in CI it is a failure.
left_out() {
    note "NOT RUN: $*"
    [ "$strict" != 1 ] || status=1
}

compiler=$(go env CC)
race=
if [ "$(go env CGO_ENABLED)" = 1 ] && command -v "${compiler%% *}" >/dev/null; then
    race=-race
else
    left_out "the race detector, there is no C compiler"
fi

units=$(go list ./... | grep -v '/tests$\|/tests/')

# Whoever started us in the background may have made us ignore signals that the
# tests send to themselves. A shell cannot undo that, GNU env can.
signals=
if env --default-signal=INT,QUIT true 2>/dev/null; then
    signals='env --default-signal=HUP,INT,QUIT,TERM,PIPE,CHLD'
fi

# go_test LOG ARG...: verbose, because only then it tells which tests it skipped;
# what it has to say is in the log, and of that only the packages are shown.
go_test() {
    log=$1
    shift
    {
        result=0
        $signals go test -v -count=1 "$@" 2>&1 || result=$?
        echo "$result" >"$log.result"
    } | tee "$log" | grep --line-buffered -E '^(ok|FAIL)[[:blank:]]' || :
    return "$(cat "$log.result")"
}

# half NAME [FLAG...]: all tests once, with more flags for go test.
half() {
    name=$1
    shift
    echo "test: as $name"
    verdict=ok
    run=$units
    # Object code is the same for everybody, and to build it as somebody else would
    # need another cache of modules.
    [ $# = 0 ] || run=$(echo "$units" | grep -v '/internal/barefork$')
    go_test "$work/$name.unit" $race "$@" $run || verdict=FAILED
    # One package after the other: they measure times.
    go_test "$work/$name.e2e" -p 1 -timeout 5m "$@" ./tests/... || verdict=FAILED
    cat "$work/$name.unit" "$work/$name.e2e" >"$work/$name"
    awk -f internal/setup/failures.awk "$work/$name"
    grep -E -B 3 '^ *--- SKIP' "$work/$name" | grep -v '^===' || :
    count() { grep -c "^ *--- $1: " "$work/$name" || :; }
    skipped=$(count SKIP)
    if [ "$skipped" != 0 ] && [ "$strict" = 1 ]; then
        verdict=FAILED
    fi
    [ "$verdict" = ok ] || status=1
    note "$verdict as $name: $(count PASS) passed, $(count FAIL) failed, $skipped skipped"
}

if [ "$(id -u)" = 0 ]; then
    half root

    # A copy that everybody can read, because a checkout may be below /root.
    uid=61000
    while getent passwd "$uid" >/dev/null; do uid=$((uid + 1)); done
    mkdir "$work/tree" "$work/home" "$work/tmp"
    tar -c --exclude=./.git . | tar -x -C "$work/tree" --no-same-owner
    chmod -R a+rX "$work/tree"
    chown "$uid:$uid" "$work/home" "$work/tmp"
    export SBXRUN_TEST_AS="$uid" SBXRUN_TEST_ROOT="$root" SBXRUN_TEST_COPY="$work/tree"
    half "uid-$uid" -exec "$root/internal/setup/as.sh"
    left=$(grep -l "^Uid:[[:blank:]]*$uid[[:blank:]]" /proc/[0-9]*/status 2>/dev/null || :)
    if [ -n "$left" ]; then
        note "FAILED: processes of uid $uid are left"
        status=1
        grep -H -E '^(Name|State)' $left || :
    fi
else
    half "uid-$(id -u)"
    if sudo -n true 2>/dev/null; then
        export SBXRUN_TEST_AS=0
        half root -exec "$root/internal/setup/as.sh"
    else
        left_out "the half of root: sudo is not here, or asks for a password"
    fi
fi

echo "$summary"
exit "$status"
