#!/bin/sh
# Runs all packages' tests as the user you are, in two minutes or so: with few
# repetitions of what repeats (SBXRUN_SOAK), and without what check.sh adds.
set -eu
cd "$(dirname "$0")/../.."
# Root without the usual places in PATH does not find setpriv and others.
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin"
export SBXRUN_BIN="$PWD/bin/sbxrun"
# Packages run side by side, maybe on a machine that is busy: upper bounds of times are
# four times what they are in check.sh.
export SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW:-4}"
# -short leaves out what takes other builds of everything (internal/barefork).
# The longest first, so that the others fill the time beside them.
exec internal/setup/suite.sh "as uid $(id -u)" -p 2 -short ./tests/faults ./tests ./...
