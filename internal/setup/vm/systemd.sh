#!/bin/bash
# Runs inside the machine, as root in the root cgroup: boots the distribution's systemd in new namespaces, and runs a
# command in a login session of an ordinary user, whose own systemd also runs.
#
# usage: systemd.sh COMMAND      a shell command; its exit code is returned
#
# It creates the user, without a password. The machine's / is an overlay.
set -eu
name=login uid=61001
files=/run/vm/systemd # visible to both sides

# PID 1 of the namespaces: executes systemd.
if [ "${1-}" = --boot ]; then
    umount -l /sys/fs/cgroup
    mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 /sys/fs/cgroup
    mount -t tmpfs -o nosuid,nodev,mode=755 tmpfs /run/lock
    # As in distributions that do not delegate the cpu controller to users. Before the session, root runs the script
    # that fixes this.
    mkdir -p /run/systemd/system/user@.service.d
    printf '[Service]\nDelegate=\nDelegate=memory pids\n' >/run/systemd/system/user@.service.d/less.conf
    cat >/run/systemd/system/session.service <<EOF
[Unit]
Requires=user@$uid.service systemd-logind.service dbus.socket
After=user@$uid.service systemd-logind.service dbus.socket
[Service]
Type=oneshot
User=$name
PAMName=login
ExecStartPre=+/bin/bash -c '! grep cpu /sys/fs/cgroup/user.slice/user-$uid.slice/user@$uid.service/cgroup.controllers'
ExecStartPre=+/bin/bash -c '/opt/bin/sbxrun doctor --script | sed "s/^uid=0 /uid=$uid /" | sh'
StandardOutput=append:$files/out
StandardError=append:$files/out
ExecStart=/bin/bash $files/session
EOF
    cat >/run/systemd/system/session.target <<EOF
[Unit]
Requires=session.service
EOF
    export container=vm
    exec /lib/systemd/systemd --system --unit=session.target --log-target=console
fi

for need in /lib/systemd/systemd /lib/systemd/systemd-logind /usr/bin/dbus-daemon; do
    if ! [ -x "$need" ]; then
        echo "vm: error: $need is missing: apt-get install systemd libpam-systemd dbus-user-session" >&2
        exit 125
    fi
done
grep -q "^$name:" /etc/passwd || echo "$name:*:$uid:$uid::/tmp:/bin/bash" >>/etc/passwd
grep -q "^$name:" /etc/group || echo "$name:*:$uid:" >>/etc/group
mkdir -p "$files"
: >"$files/out"
chmod 666 "$files/out"
printf '%s\n' "( $1 )" "echo \$? >$files/code" >"$files/session"
: >"$files/code"
chmod 666 "$files/code"

# The cgroup that is systemd's root must contain no other processes.
cgroup=/sys/fs/cgroup
mkdir $cgroup/machine
echo '+cpu +memory +pids' >$cgroup/cgroup.subtree_control
bash -c "echo \$\$ >$cgroup/machine/cgroup.procs; exec unshare --pid --fork --cgroup --mount --mount-proc bash '$0' --boot" </dev/null >"$files/console" 2>&1 &
machine=$!
children=/proc/$machine/task/$machine/children
until init=$(cat $children 2>/dev/null) && [ -n "$init" ] || ! [ -e /proc/$machine ]; do sleep 0.1; done
[ -z "$init" ] || echo $machine >$cgroup/init.scope/cgroup.procs
end=$((SECONDS + 240))
until [ -s "$files/code" ] || [ $SECONDS -ge $end ] || ! [ -e /proc/$machine ]; do sleep 0.5; done
[ -z "$init" ] || kill -KILL "$init" # PID 1 of the namespace, and with it all its processes
wait $machine 2>/dev/null || :
cat "$files/out"
code=$(cat "$files/code")
if [ -z "$code" ]; then
    echo 'vm: error: there was no session' >&2
    tail -n 30 "$files/console" >&2
    exit 125
fi
exit "$code"
