#!/bin/bash
# Installs the package for arm64 in an arm64 machine emulated by qemu, and tries it there as root and as an ordinary
# user. Then it runs the tests of code that depends on the processor, mainly the helper, and a few tests of the built
# command.
#
# usage: arm64.sh    on Debian for amd64: ../vm/fetch.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
./setup.sh dist "$work/packages" >/dev/null
cp "$work"/packages/*_arm64.deb "$work/sbxrun.deb"
rm -r "$work/packages"
for package in ./internal/proc ./internal/seccomp ./tests; do
    CGO_ENABLED=0 GOARCH=arm64 go test -c -o "$work/${package##*/}.test" "$package"
done
cp "$here/smoke.sh" "$work"
tar -c --exclude=./.git --exclude=./bin . >"$work/tree.tar"

# Each line is a directory, and a pattern of tests there.
cat >"$work/tests" <<'LIST'
internal/proc Keeper|MakeThreads|AsUser|Process
internal/seccomp Judge|Size|Kernel
tests TestTrees/(sleep|setsid|daemon|term-immune)|TestScripts/exit-code
LIST

cat >"$work/guest.sh" <<'GUEST'
set -euo pipefail
cd /share
# dpkg knows no packages there, because the dependencies were only unpacked.
dpkg --force-depends --install sbxrun.deb >/tmp/log 2>&1 || { cat /tmp/log && exit 1; }
mkdir -p /opt/tree
tar -x --no-same-owner -C /opt/tree -f tree.tar
chmod -R a+rX /opt/tree
cp ./*.test smoke.sh /opt
cat >/opt/test.sh <<'TEST' # DIRECTORY PATTERN
cd "/opt/tree/$1" && SBXRUN_BIN=/usr/bin/sbxrun SBXRUN_TESTS_SLOW=60 SBXRUN_TESTS_NO_SKIP=1 SBXRUN_SOAK=3 TMPDIR=/tmp \
    exec "/opt/${1##*/}.test" -test.v -test.timeout 30m -test.run "$2" </dev/null
TEST
sbxrun --version
for uid in 0 61000; do
    "$AS" $uid delegated bash /opt/smoke.sh
    echo "arm64: the package works as uid $uid, $(cut -d ' ' -f 1 /proc/uptime) s after the machine's start"
    while read -r place pattern; do
        begin=$SECONDS
        if "$AS" $uid delegated bash /opt/test.sh "$place" "$pattern" >/tmp/log 2>&1; then
            echo "arm64: $place as uid $uid: $(grep -c '^ *--- PASS' /tmp/log) passed in $((SECONDS - begin)) s"
        else
            cat /tmp/log
            echo "arm64: $place as uid $uid FAILED"
            exit 1
        fi
    done </share/tests
done
GUEST
internal/setup/vm/run.sh --arch arm64 --timeout 900 --user root --cgroup root --share "$work" -- 'exec bash /share/guest.sh'
