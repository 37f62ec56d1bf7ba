#!/bin/bash
# Runs the tests of the built command, and of the packages that deal with cgroups, namespaces, file systems and
# sockets, in a machine with only cgroup v2: as root and as an ordinary user, in parallel, and then those for a
# session under systemd.
#
# usage: test.sh [OPTION...] [PATTERN]    options of run.sh; PATTERN as for go test -run
#
#   --as-user PATTERN   the ordinary user runs only these of the command's tests
#
# without.txt lists the tests that are left out, and the reasons. A skipped test is a failure, and so is a package
# without tests. A failed test is run once more, alone, which the output mentions.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."
packages='./bwrap ./nsenter ./internal/enter ./internal/supervise ./cleanup ./internal/room ./internal/limits ./internal/admission'
packages+=' ./internal/overlay ./internal/layers ./internal/tree ./internal/workspace ./internal/volumes ./internal/proxy ./tests/network ./tests'

if go version -m bin/sbxrun | grep -q 'CGO_ENABLED=1'; then
    echo 'vm: error: bin/sbxrun was not built by setup.sh build: a C library would expose more of its memory' >&2
    exit 1
fi

options=() as_user=
while [ $# -gt 1 ]; do
    case $1 in
    --as-user) as_user=$2 ;;
    *) options+=("$1" "$2") ;;
    esac
    shift 2
done
pattern=${1:-.}

work=$(mktemp -d)
machine=
clean() {
    [ -z "$machine" ] || kill "$machine" 2>/dev/null || :
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"

# The tests, the source tree that they read, and the tests to leave out.
mkdir "$work/bin" "$work/log"
chmod 777 "$work/log"
for package in $packages; do
    name=${package##*/}
    CGO_ENABLED=0 go test -c -o "$work/bin/$name.test" "$package"
    (cd "$package" && "$work/bin/$name.test" -test.list .) | grep '^[A-Z]' >"$work/$name.list" || :
    skip=
    while read -r of test _; do
        [ "$of" = "$package" ] || continue
        if ! grep -qxE "${test%%/*}" "$work/$name.list"; then
            echo "vm: error: without.txt has $test, which is not in $package" >&2
            exit 1
        fi
        skip+="${skip:+|}^${test//\//\$\/^}\$"
    done < <(grep -v '^#' "$here/without.txt")
    printf '%s %s\n' "${package#./}" "$skip" >>"$work/packages"
done
CGO_ENABLED=0 go test -c -tags systemd -o "$work/bin/systemd.test" ./tests/systemd
cp bin/sbxrun bin/sbxrund "$work/bin"
cp "$here"/{suite,systemd}.sh "$work"
printf '%s\n' "$pattern" >"$work/pattern"
printf '%s\n' "${as_user:-$pattern}" >"$work/pattern-as-user"
tar -c --exclude=./.git --exclude=./bin --exclude=./.task . >"$work/tree.tar"

# In the background, because the shell handles a signal only after a command in the foreground has ended.
status=0
"$here/run.sh" --memory 3072 --timeout 7200 "${options[@]}" --user root --cgroup root --share "$work" -- \
    'exec bash /share/suite.sh' &
machine=$!
wait "$machine" || status=$?
machine=

grep '^#' "$here/without.txt" | sed 's/^#/vm:/'
grep -v '^#' "$here/without.txt" | sed 's/^/vm: left out: /'
[ -z "$as_user" ] || echo "vm: left out: as uid 61000 of ./tests all but $as_user"
for uid in 0 61000 session; do
    log=$work/$uid
    cat "$work/log/$uid" "$work/log/$uid".* >"$log" 2>/dev/null || :
    awk -f internal/setup/failures.awk "$log"
    count() { grep -c "^ *--- $1: " "$log" || :; }
    verdict=ok
    # Each package has printed PASS, and there were tests.
    said='^vm: [^ ]* passed in ' packages=$(wc -l <"$work/packages")
    [ "$uid" != session ] || said='^PASS$' packages=1
    if [ "$(grep -c "$said" "$log")" != "$packages" ] || [ "$(count PASS)" = 0 ] || [ "$(count SKIP)" != 0 ]; then
        verdict=FAILED
        status=1
        grep -E -B 3 '^ *--- SKIP' "$log" | grep -v '^===' || :
    fi
    echo "vm: $verdict as $uid: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
done
exit "$status"
