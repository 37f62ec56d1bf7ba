#!/bin/bash
# Runs inside the machine: runs the tests of test.sh as root and as an ordinary user in parallel, and then those of a
# session under systemd.
set -u
cd /share || exit 1

# run.sh starts this script as root in the root cgroup; it starts itself again for each user.
if [ $# = 0 ]; then
    fail=0
    printf 'vm: Linux %s, after %s s\n' "$(uname -r)" "$(cut -d ' ' -f 1 /proc/uptime)"
    # Fail on any other machine.
    if [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ] || [ "$(grep -c ' - cgroup' /proc/self/mountinfo)" != 1 ]; then
        echo 'vm: error: cgroups are not v2 alone'
        exit 1
    fi
    # Few enough for a fixture to use them up (TestUserExhausted).
    echo 50000 >/proc/sys/fs/epoll/max_user_watches
    "$AS" 0 delegated bash /share/suite.sh root & root=$!
    "$AS" 61000 delegated bash /share/suite.sh user & user=$!
    wait "$root" || fail=1
    wait "$user" || fail=1
    # A session in which systemd assigns the cgroups. It comes last, because systemd enables auditing and accounting
    # in the kernel, which slows everything down.
    cp -r /share/bin /opt
    mkdir -p /opt/tests/systemd
    tar -x --no-same-owner -C /opt -f tree.tar ./fixtures
    chmod -R a+rX /opt
    begin=$SECONDS
    if bash systemd.sh 'cd /opt/tests/systemd && TMPDIR=/tmp SBXRUN_BIN=/opt/bin/sbxrun SBXRUN_TESTS_NO_SKIP=1 SBXRUN_TESTS_SLOW=60 exec /opt/bin/systemd.test -test.v -test.timeout 4m' >log/session 2>&1; then
        echo "vm: tests/systemd passed in $((SECONDS - begin)) s in a session"
    else
        echo "vm: tests/systemd FAILED in $((SECONDS - begin)) s in a session"
        fail=1
    fi
    exit "$fail"
fi

uid=$(id -u)
say() { printf 'vm: %s\n' "$*" | tee -a "/share/log/$uid"; }

# Check that a limit can be set here. Otherwise the tests would only test that limits are refused.
own=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
beside=${own%/*}/probe-$uid
if ! mkdir "$beside" || ! echo 10 >"$beside/pids.max" || ! echo 64M >"$beside/memory.max" || ! echo '50000 100000' >"$beside/cpu.max" || ! rmdir "$beside"; then
    say "error: no limit can be set in ${own%/*}"
    exit 1
fi

work=/var/tmp/tests-$uid # on a disk: files in memory can be idmapped only since Linux 6.3, and have layers since 6.6
mkdir -p "$work/tree" "$work/tmp"
tar -x --no-same-owner -C "$work/tree" -f tree.tar
cp -r bin "$work"
chmod -R a+rX "$work"
export TMPDIR=$work/tmp SBXRUN_BIN=$work/bin/sbxrun
export SBXRUN_TESTS_NO_SKIP=1 SBXRUN_TESTS_SLOW=60 SBXRUN_SOAK=8

# tests PACKAGE PATTERN SKIP: runs the tests of a package that match the pattern.
tests() {
    "$work/bin/${1##*/}.test" -test.v -test.timeout 80m -test.parallel 4 -test.run "$2" ${3:+-test.skip "$3"} 2>&1 </dev/null
}

failed=0
while read -r package skip; do
    begin=$SECONDS
    cd "$work/tree/$package" || exit 1
    pattern=$(cat /share/pattern)
    [ "$package" != tests ] || [ "$uid" = 0 ] || pattern=$(cat /share/pattern-as-user)
    verdict=FAILED
    log=/share/log/$uid.${package##*/}
    if tests "$package" "$pattern" "$skip" >"$log"; then
        verdict=passed
        # With a pattern, some packages may have no tests.
        ! grep -q '^testing: warning: no tests to run' "$log" || [ "$pattern" != . ] || verdict=EMPTY
    else
        # Run failed tests again, alone: the machine is emulated, and the host may be busy. The output mentions it.
        again=$(sed -n 's/^--- FAIL: \([^ ]*\) .*/\1/p' "$log" | sort -u | paste -sd '|')
        # But not after a panic, because then some tests did not run.
        if [ -n "$again" ] && ! grep -q '^panic: ' "$log" && tests "$package" "^($again)\$" "$skip" >"$log.again" && grep -q '^--- PASS: ' "$log.again"; then
            verdict=passed
            say "$package needed a second try as $uid: $again"
        fi
    fi
    [ "$verdict" = passed ] || failed=1
    say "$package $verdict in $((SECONDS - begin)) s as $uid"
done </share/packages
exit "$failed"
