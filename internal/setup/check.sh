#!/bin/sh
# Runs the checks that every commit must pass in addition to test.sh: lint, man pages and completions, the race
# detector, the other user, and slow tests. All steps run; the last lines name those that failed.
set -eu
cd "$(dirname "$0")/../.."
. internal/setup/steps.sh
[ -n "$race" ] || left_out "the race detector, there is no C compiler"
units=$(go list ./... | grep -v '/tests$\|/tests/')
. internal/setup/later.sh
# The current user has run all tests with test.sh, so this runs the quick unit tests with the race detector, and
# otherwise only the tests that test.sh leaves out or repeats less. The other user runs all tests except those that do
# not depend on the user, with fewer tries of rare events. On a slow machine that would take three hours: there no
# user makes more tries, and the other user runs only the tests of test.sh.
[ "$slow" = 1 ] || note "NOT ALL: this machine is $slow times slower than usual"

# user NAME [FLAG...]: the tests as one user; with FLAG, the other one.
# shellcheck disable=SC2086 # lists of words
user() {
    who=$1 soak=10
    [ $# != 1 ] || [ "$slow" != 1 ] || soak=50
    shift
    if [ $# = 0 ]; then
        step "unit tests as $who" $bounds CGO_ENABLED=$((${#race} > 0)) "$suite" "as $who" $race $quick -skip "$later" $units
        rest=$later
        [ "$slow" != 1 ] || rest="$later|$rare"
        set -- -run "$rest" -skip "^Test($longest)\$" \
            ./internal/cells ./internal/cli ./internal/clidoc ./internal/helper ./internal/server ./internal/setup ./internal/state
    else
        step "unit tests as $who" $bounds "$suite" "as $who" $quick "$@" -skip "^Test($anyone)\$" $units
        rest=
        [ "$slow" = 1 ] || rest="$later|"
        set -- "$@" -skip "$rest^Test($longest|$anyone)\$"
    fi
    step "tests of the command as $who" $wide SBXRUN_SOAK="${SBXRUN_SOAK:-$soak}" "$suite" "as $who" $quick -p 3 -parallel 6 "$@" ./tests/faults ./tests/...
}

# shellcheck disable=SC2086 # lists of words
beside "a cluster" $wide go -C tests/cluster test -count=1 $quick -timeout 30m ./... # it mostly waits
step lint internal/setup/lint.sh
if command -v x86_64-linux-gnu-gcc aarch64-linux-gnu-gcc >/dev/null; then
    step "the helper, built again" internal/setup/helper.sh
else
    left_out "the comparison of the helper with a new build, which Debian's gcc and gcc-aarch64-linux-gnu are needed for"
fi
step "man pages" ./setup.sh man
step completions ./setup.sh completions
step "manifests of the examples" go -C tests/manifests test -count=1 $quick ./...
joined
user "uid $(id -u)"
if [ "$slow" != 1 ]; then # these are never fewer
    step "500 signals" $bounds SBXRUN_SOAK=100 "$suite" "500 signals" $quick -run '^TestSoak$' ./tests/faults
fi

if command -v npm >/dev/null; then
    step "official MCP clients" internal/setup/mcp.sh
    step "agents with a stub model" $bounds internal/setup/agents.sh
    step "OpenAPI documents" internal/setup/openapi.sh
else
    left_out "official MCP clients, agents, and linters of OpenAPI, which npm installs"
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

finish
