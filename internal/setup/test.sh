#!/bin/sh
# Runs all packages' tests as the user you are, in four minutes on a usual machine: with few
# repetitions of what repeats (SBXRUN_SOAK), and without what check.sh adds.
set -eu
cd "$(dirname "$0")/../.."
# Root without the usual places in PATH does not find setpriv and others.
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
export SBXRUN_BIN="$PWD/bin/sbxrun"
# Packages run side by side, maybe on a machine that is busy: upper bounds of times are
# six times as far away.
. internal/setup/speed.sh
export SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW:-$((6 * slow))}"
# check.sh alone has what takes long.
. internal/setup/later.sh
# As build.sh builds: what it has compiled is not compiled again, and nothing is linked
# with tables for a debugger. From an empty cache this takes half of the time.
export CGO_ENABLED=0
set -- -trimpath -ldflags=-s\ -w -vet=off # lint.sh has the whole of go vet
# The longest first, so that the others fill the time beside them; and most tests wait more than
# they compute, so four at once. Of fewer packages on a slow machine, where a process would wait for a
# CPU for seconds.
packages=3
[ "$slow" = 1 ] || packages=2
exec internal/setup/suite.sh "as uid $(id -u)" "$@" -p $packages -parallel 4 -short -skip "$later" ./tests/faults ./tests ./...
