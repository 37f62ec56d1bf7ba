#!/bin/sh
# Runs the tests of all packages as the current user, in less than four minutes on a usual machine, with few
# repetitions (SBXRUN_SOAK) and without the slow tests that check.sh adds.
set -eu
cd "$(dirname "$0")/../.."
# root's PATH may lack the directories of setpriv and others.
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
export SBXRUN_BIN="$PWD/bin/sbxrun"
# Packages run in parallel and the machine may be busy, so upper bounds of times are multiplied.
. internal/setup/speed.sh
export SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW:-$((6 * slow))}"
. internal/setup/later.sh
# The flags of build.sh, to use its build cache and link without debug information: with an empty
# cache this halves the time.
export CGO_ENABLED=0
set -- -trimpath -ldflags=-s\ -w -vet=off # lint.sh runs all of go vet
# The longest packages start first, so that the others run in parallel. Tests mostly wait, so six run at once. A slow
# machine runs fewer packages, because processes would wait for a CPU for seconds.
packages=3
[ "$slow" = 1 ] || packages=2
exec internal/setup/suite.sh "as uid $(id -u)" "$@" -p $packages -parallel 6 -short -skip "$later" ./tests/faults ./tests ./...
