#!/bin/bash
# Runs the tests that depend on bubblewrap with each of the versions that make.sh builds, as the current user and as
# the other one.
#
# usage: test.sh [--some | VERSION...]    --some: the versions whose sources can still be downloaded, except the
#                                         installed one, which all other tests use
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../../.." && pwd)
cd "$root"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/sbxrun-bwraps
export PATH="$PATH:/usr/sbin:/sbin:/usr/bin:/bin" SBXRUN_BIN="$root/bin/sbxrun" SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW:-4}"

# Tests of the room and its end, but not of code that is the same for every bubblewrap.
packages='./internal/room ./internal/enter ./internal/doctor ./tests'
tests='Scripts|Trees|OlderBwrap|Start.*|Prepare.*|Plan.*|Find.*|Exec(End|Privileges)|Signal.*|Diagnose.*|Examine.*'
tests+='|PayloadTakesOverNothing|SignalsEverybody|NestedSandboxes|Descriptors.*|Secret.*|CleanEnvironment|NoNetwork|CurrentDirectory.*|ExecTrees|Lifetime|IdleRoomKilled'
tests+='|LimitMemory|LimitForkBomb|Seccomp.*|Timeout(Words|Signaled)|Litter|MountRace|CurrentDirectoryExchanged'
tests+='|ImageDisks|Rootfs.*|Devices.*|SelfExe|PlantedProgramsInPath|NamedBwrapExposed|PlanningHasNoEffects'
# With the newest version, also tests of things that sbxrun itself makes in a room.
newest='|Reached|Refused|NothingElse|Publish|Connect|GetHostile|CpHostile'
export SBXRUN_SOAK=2

status=0
built=$("$here/make.sh" "$cache") || status=1
if [ "${1-}" = --some ]; then
    shift
    status=0
    built=$(grep -vxF "$(bwrap --version | cut -d ' ' -f 2)" <<<"$built" || :)
fi
[ -n "${*:-$built}" ] || {
    echo 'bwraps: error: no other version of bubblewrap could be built' >&2
    exit 1
}
# Only root may be able to change the directories of a bwrap. Outside user namespaces, /var/tmp is accepted as well.
place=/opt
[ -w "$place" ] || place=/var/tmp
work=$(mktemp -d "$place/sbxrun-bwraps.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
[ -n "${SBXRUN_TEST_AS-}" ] || . internal/setup/other.sh

usual=$PATH
for version in ${*:-$built}; do
    # A place that root's unprivileged uid can reach.
    install -D -m 755 "$cache/$version/bwrap" "$work/$version/bwrap"
    chmod 755 "$work/$version"
    export PATH="$work/$version:$usual" SBXRUN_BWRAP="$work/$version/bwrap"
    if [ "$version" = "${built##*$'\n'}" ]; then
        tests+=$newest packages+=' ./tests/network'
    fi
    # shellcheck disable=SC2086 # a list
    internal/setup/suite.sh "bubblewrap $version as uid $(id -u)" -parallel 12 -run "^Test($tests)\$" $packages || status=1
    [ -n "$SBXRUN_TEST_AS" ] || continue
    # shellcheck disable=SC2086 # a list
    internal/setup/suite.sh "bubblewrap $version as uid $SBXRUN_TEST_AS" -exec "$root/internal/setup/as.sh" -parallel 12 -run "^Test($tests)\$" $packages || status=1
done
exit "$status"
