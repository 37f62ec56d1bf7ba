#!/bin/sh
# Runs a test binary as another user, for go test -exec. other.sh sets
#   SBXRUN_TEST_AS     the UID: 0 by sudo, any other from root
#   SBXRUN_TEST_ROOT   the source tree in which go test runs
#   SBXRUN_TEST_COPY   a copy of it that the user can read, with home and tmp next to it
set -eu
program=$1
shift
if [ "$SBXRUN_TEST_AS" = 0 ]; then
    exec sudo -n env PATH="$PATH" HOME=/root SBXRUN_BIN="$SBXRUN_BIN" SBXRUN_TESTS_NO_SKIP="${SBXRUN_TESTS_NO_SKIP-}" \
        SBXRUN_SOAK="${SBXRUN_SOAK-}" SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW-}" SBXRUN_BWRAP="${SBXRUN_BWRAP-}" "$program" "$@"
fi
# Only root can read the directory in which go test builds the binary.
place=${SBXRUN_TEST_COPY%/tree}
: "${place:?}" # otherwise it would be /tests
mkdir -p "$place/tests"
own=$place/tests/${program##*/}.$$
cp "$program" "$own"
chmod 755 "$own"
cd "$SBXRUN_TEST_COPY${PWD#"$SBXRUN_TEST_ROOT"}"
exec setpriv --reuid "$SBXRUN_TEST_AS" --regid "$SBXRUN_TEST_AS" --clear-groups \
    env -u GOCACHE HOME="$place/home" TMPDIR="$place/tmp" SBXRUN_BIN="$SBXRUN_TEST_COPY/bin/sbxrun" "$own" "$@"
