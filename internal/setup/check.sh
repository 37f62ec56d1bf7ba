#!/bin/sh
# Everything that must be right before a commit, but for test.sh: lint, man pages and
# completions, and what takes long. tests/README.md lists that. All of it is run, and
# the last lines say what failed, and what could not be run here; before them stands
# again what failed steps printed last, as who reads a log may have only its end.
#
# SBXRUN_TESTS_NO_SKIP=1, which CI sets, makes a failure of every skipped test, and
# of what could not be run.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
export SBXRUN_BIN="$root/bin/sbxrun"

work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-check.XXXXXX")
vm= # the process that has the virtual machine
# shellcheck disable=SC2317,SC2329 # called by the trap
clean() {
    [ -z "$vm" ] || kill "$vm" 2>/dev/null || :
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
: >"$work/last"
status=0
summary=

note() { summary="$summary
check: $*"; }

# left_out WHAT: says that something cannot be run here.
left_out() {
    note "NOT RUN: $*"
    [ "${SBXRUN_TESTS_NO_SKIP-}" != 1 ] || status=1
}

# step NAME COMMAND...
step() {
    name=$1
    shift
    echo
    echo "check: $name"
    begin=$(date +%s)
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

suite=internal/setup/suite.sh
units=$(go list ./... | grep -v '/tests$\|/tests/')
compiler=$(go env CC)
race=
if [ "$(go env CGO_ENABLED)" = 1 ] && command -v "${compiler%% *}" >/dev/null; then
    race=-race
else
    left_out "the race detector, there is no C compiler"
fi
# As build.sh and test.sh build: to compile all libraries once more takes minutes.
export CGO_ENABLED=0 GOFLAGS=-trimpath
quick="-ldflags=-s -vet=off -tags=check" # lint.sh has the whole of go vet

# The user you are has run all tests of the command with test.sh, so here those that it leaves out or tries
# seldom. On a slow machine all of it would take three hours. There tests of rare events make a tenth of
# the tries, as in test.sh; the other user has what test.sh has, and the virtual machine the tests of some
# rows, of which its ordinary user has no more anywhere.
. internal/setup/speed.sh
. internal/setup/later.sh
rows='L0|P0|Limit' machine_rows=.
if [ "$slow" != 1 ]; then
    machine_rows=$rows
    note "NOT ALL: this machine is $slow times slower than usual"
fi
# Upper bounds of times are twice as far away as they need be, and those of whole commands six times, as
# three packages run at once, with four tests each, most of which wait; on a slow machine all are.
near=2
[ "$slow" = 1 ] || near=6
bounds="env SBXRUN_TESTS_SLOW=${SBXRUN_TESTS_SLOW:-$((near * slow))}"
wide="env SBXRUN_TESTS_SLOW=${SBXRUN_TESTS_SLOW:-$((6 * slow))}"

# user NAME [FLAG...]: the tests as one user, with FLAG all of them. The race detector is for those
# beside the code, as the user you are; those in tests run the built command.
# shellcheck disable=SC2086 # lists of words
user() {
    who=$1 soak=50 run=$units some="-run $later|$rare" detector=$race
    shift
    if [ $# != 0 ]; then
        some= detector=
        # Object code is the same for everybody, and to build it as somebody else would
        # need another cache of modules.
        run=$(echo "$units" | grep -v '/internal/barefork$')
    fi
    if [ "$slow" != 1 ]; then
        soak=10
        some="-run $later"
        [ $# = 0 ] || some="-skip $later"
    fi
    step "unit tests as $who" $bounds CGO_ENABLED=$((${#detector} > 0)) "$suite" "as $who" $detector $quick "$@" $run
    step "tests of the command as $who" $wide SBXRUN_SOAK="${SBXRUN_SOAK:-$soak}" "$suite" "as $who" $quick -p 3 -parallel 4 $some "$@" ./tests/faults ./tests/...
}

# The virtual machine takes what the others leave of the processors, as most of their tests wait. Alone it would
# take a quarter of the time of all.
machine=$(dpkg --print-architecture 2>/dev/null || :)
if [ "$machine" = amd64 ]; then
    nice -n 19 internal/setup/vm/test.sh --as-user "$rows" "$machine_rows" </dev/null >"$work/vm" 2>&1 &
    vm=$!
fi
# shellcheck disable=SC2317,SC2329 # called by step
of_the_machine() {
    cat "$work/vm"
    return "$result"
}

step lint internal/setup/lint.sh
step "other architectures" env SBXRUN_SOAK=1 go test -count=1 ./internal/arch
step "man pages" ./setup.sh man
step completions ./setup.sh completions
step "manifests of the examples" go -C tests/manifests test -count=1 $quick ./...
# shellcheck disable=SC2086 # two words
step "a cluster" $bounds go -C tests/cluster test -count=1 $quick -timeout 30m ./...
user "uid $(id -u)"
if [ "$slow" != 1 ]; then # these are never fewer
    step "500 signals" $bounds SBXRUN_SOAK=100 "$suite" "500 signals" $quick -run '^TestSoak$' ./tests/faults
fi

# The other user.
. internal/setup/other.sh
if [ -n "$SBXRUN_TEST_AS" ]; then
    user "uid $SBXRUN_TEST_AS" -exec "$root/internal/setup/as.sh"
else
    left_out "the tests as root: sudo is not here, or asks for a password"
fi
if [ "$(id -u)" = 0 ]; then
    left=$(grep -l "^Uid:[[:blank:]]*$SBXRUN_TEST_AS[[:blank:]]" /proc/[0-9]*/status 2>/dev/null || :)
    if [ -n "$left" ]; then
        note "FAILED: processes of uid $SBXRUN_TEST_AS are left"
        status=1
        # shellcheck disable=SC2086 # a list of files
        grep -H -E '^(Name|State)' $left || :
    fi
fi

step fuzzing internal/setup/fuzz.sh 5000x
if [ -n "$machine" ] && [ -n "$race" ]; then
    step "other versions of bubblewrap" $wide internal/setup/bwraps/test.sh --some
else
    left_out "other versions of bubblewrap, which a C compiler and Debian's apt are needed for"
fi
if [ -z "$machine" ]; then
    left_out "packages, which Debian's own programs install"
elif [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
    step packages internal/setup/dist/test.sh
else
    left_out "packages, which root installs: sudo is not here, or asks for a password"
fi
if [ -n "$vm" ]; then
    begin=$(date +%s) result=0
    wait "$vm" || result=$?
    vm=
    echo "check: waited for the virtual machine for $(($(date +%s) - begin)) s"
    step "the virtual machine" of_the_machine
else
    left_out "the virtual machine, which comes from Debian for amd64"
fi

cat "$work/last"
echo "$summary"
exit "$status"
