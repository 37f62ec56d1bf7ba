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
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"

# What the last lines say, and that something failed, is in files, as some steps run side by side, in
# processes of their own: each of these has a directory, own, and so has what is before and after them.
mkdir "$work/1" "$work/2" "$work/3" "$work/4"
own=$work/1
note() { echo "check: $*" >>"$own/summary"; }
fail() { : >"$work/failed"; }

# left_out WHAT: says that something cannot be run here.
left_out() {
    note "NOT RUN: $*"
    [ "${SBXRUN_TESTS_NO_SKIP-}" != 1 ] || fail
}

# step NAME COMMAND...
step() {
    name=$1
    shift
    echo
    echo "check: $name"
    begin=$(date +%s)
    verdict=ok
    rm -f "$own/failed"
    { "$@" </dev/null || : >"$own/failed"; } 2>&1 | tee "$own/output"
    if [ -e "$own/failed" ]; then
        verdict=FAILED
        fail
        { echo && echo "check: $name printed last:" && grep -v '^ok' "$own/output" | tail -n 30 | cut -c 1-300; } >>"$own/last" || :
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

# units NAME [FLAG...]: the tests beside the code as one user, without FLAG with the race detector.
# shellcheck disable=SC2086 # lists of words
units() {
    who=$1 run=$units detector=$race
    shift
    if [ $# != 0 ]; then
        detector=
        # Object code is the same for everybody, and to build it as somebody else would need another cache
        # of modules.
        run=$(echo "$units" | grep -v '/internal/barefork$')
    fi
    step "unit tests as $who" $bounds CGO_ENABLED=$((${#detector} > 0)) "$suite" "as $who" $detector $quick "$@" $run
}

# commands NAME [FLAG...]: those of the built command as one user, with FLAG all of them.
# shellcheck disable=SC2086
commands() {
    who=$1 soak=50 some="-run $later|$rare"
    shift
    [ $# = 0 ] || some=
    if [ "$slow" != 1 ]; then
        soak=10
        some="-run $later"
        [ $# = 0 ] || some="-skip $later"
    fi
    step "tests of the command as $who" $wide SBXRUN_SOAK="${SBXRUN_SOAK:-$soak}" "$suite" "as $who" $quick -p 3 -parallel 4 $some "$@" ./tests/faults ./tests/...
}

# both WHAT: units or commands, as each user.
both() {
    "$1" "uid $(id -u)"
    [ -z "$SBXRUN_TEST_AS" ] || "$1" "uid $SBXRUN_TEST_AS" -exec "$root/internal/setup/as.sh"
}

step lint internal/setup/lint.sh
step "other architectures" env SBXRUN_SOAK=1 go test -count=1 ./internal/arch
step "man pages" ./setup.sh man
step completions ./setup.sh completions
step "manifests of the examples" go -C tests/manifests test -count=1 $quick ./...
# shellcheck disable=SC2086 # two words
step "a cluster" $bounds go -C tests/cluster test -count=1 $quick -timeout 30m ./...

# Side by side, as units compute, and commands wait most of the time: in a pipeline, because Ctrl-C does not
# reach what a script has in the background.
. internal/setup/other.sh
{ own=$work/2 both units >&3 3>&- | own=$work/3 both commands 3>&-; } 3>&1
own=$work/4
[ -n "$SBXRUN_TEST_AS" ] || left_out "the tests as root: sudo is not here, or asks for a password"
if [ "$slow" != 1 ]; then # these are never fewer
    step "500 signals" $bounds SBXRUN_SOAK=100 "$suite" "500 signals" $quick -run '^TestSoak$' ./tests/faults
fi
if [ "$(id -u)" = 0 ]; then
    left=$(grep -l "^Uid:[[:blank:]]*$SBXRUN_TEST_AS[[:blank:]]" /proc/[0-9]*/status 2>/dev/null || :)
    if [ -n "$left" ]; then
        note "FAILED: processes of uid $SBXRUN_TEST_AS are left"
        fail
        # shellcheck disable=SC2086 # a list of files
        grep -H -E '^(Name|State)' $left || :
    fi
fi

step fuzzing internal/setup/fuzz.sh 5000x
machine=$(dpkg --print-architecture 2>/dev/null || :)
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
if [ "$machine" = amd64 ]; then
    step "the virtual machine" internal/setup/vm/test.sh --as-user "$rows" "$machine_rows"
else
    left_out "the virtual machine, which comes from Debian for amd64"
fi

cat "$work"/?/last 2>/dev/null || :
echo
cat "$work"/?/summary
[ ! -e "$work/failed" ]
