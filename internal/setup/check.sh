#!/bin/sh
# Runs the checks that every commit must pass in addition to test.sh: lint, man pages and completions, the
# other user, and the tests that take long. All steps run; the last lines name those that failed.
# tests/README.md lists what check and nightly add to test.
set -eu
cd "$(dirname "$0")/../.."
. internal/setup/steps.sh
[ -n "$race" ] || left_out "the race detector, there is no C compiler"
units=$(go list ./... | grep -v '/tests$\|/tests/')
. internal/setup/later.sh
# The current user has run the tests of the command with test.sh, so this runs only those that test.sh leaves out or
# repeats less. On a slow machine everything would take three hours: rare events get a tenth of the tries, and
# the other user only the tests that test.sh has.
[ "$slow" = 1 ] || note "NOT ALL: this machine is $slow times slower than usual"

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

step fuzzing internal/setup/fuzz.sh 1000x
finish
