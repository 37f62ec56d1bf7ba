#!/bin/sh
# Runs the checks that take too long for every commit: other versions of bubblewrap, packages, programs of the
# distribution, a container of podman, test suites of other projects, images of other programs, a virtual machine with
# another kernel, 10,000 random signals, the longest tests, other architectures, and fuzzing.
set -eu
cd "$(dirname "$0")/../.."
. internal/setup/steps.sh
. internal/setup/later.sh

# On a slow machine the virtual machine runs only some tests, and so does the ordinary user anyway.
some='Exec(Trees|NothingLeft|Concurrent|Codes|StatusFromKernel|Stdin)|Names|Kill|Status|Limit|Pressure|NoTask' pattern=.
if [ "$slow" != 1 ]; then
    pattern=$some
    note "NOT ALL: this machine is $slow times slower than usual"
fi
if [ -n "$machine" ] && [ -n "$race" ]; then
    step "other versions of bubblewrap" $wide internal/setup/bwraps/test.sh --some
else
    left_out "other versions of bubblewrap, which a C compiler and Debian's apt are needed for"
fi
if [ -z "$machine" ]; then
    left_out "packages, programs of the distribution, and a container of podman, which Debian's own programs install"
elif [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
    step packages internal/setup/dist/test.sh
    step "programs of the distribution" $wide internal/setup/distribution.sh
    step "a container of podman" internal/setup/podman.sh
else
    left_out "packages, programs of the distribution, and a container of podman, which root installs: sudo is not here, or asks for a password"
fi
# shellcheck disable=SC2086 # lists of words
step "10,000 signals" $bounds SBXRUN_SOAK=2000 "$suite" "10,000 signals" $quick -run '^TestSoak$' ./tests/faults
step "the longest tests" $wide SBXRUN_SOAK=50 "$suite" "the longest tests" $quick -parallel 4 -run "^Test($longest)\$" ./tests/faults ./tests
. internal/setup/other.sh
if [ -n "$SBXRUN_TEST_AS" ]; then
    # shellcheck disable=SC2086 # lists of words
    step "rare events as uid $SBXRUN_TEST_AS" $wide SBXRUN_SOAK=50 "$suite" "rare events" $quick -parallel 4 -exec "$root/internal/setup/as.sh" \
        -run "$rare|^TestSoak\$" ./tests/faults ./tests ./tests/serve
else
    left_out "rare events as root: sudo is not here, or asks for a password"
fi
if [ -n "$machine" ] && command -v npm >/dev/null; then
    step "test suites of other projects" internal/setup/projects.sh
else
    left_out "test suites of other projects, which npm and Debian's apt fetch"
fi
if [ -n "$machine" ]; then
    step "images of other programs" $wide internal/setup/images.sh
else
    left_out "images of other programs, which Debian's apt fetches"
fi
step "other architectures" env SBXRUN_SOAK=1 go test -count=1 ./internal/arch
step fuzzing internal/setup/fuzz.sh 50000x
if [ "$machine" = amd64 ]; then
    step "the virtual machine" internal/setup/vm/test.sh --as-user "$some" "$pattern"
    step "the virtual machine with Linux 6.12" internal/setup/vm/test.sh --kernel 6.12 --as-user "$some" "$pattern"
else
    left_out "the virtual machine, which comes from Debian for amd64"
fi
finish
