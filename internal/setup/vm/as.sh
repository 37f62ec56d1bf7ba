#!/bin/bash
# Runs inside the machine: runs a command as a user, in the cgroup that systemd would use.
#
# usage: as.sh UID delegated|session|root COMMAND...
set -eu
uid=$1 mode=$2
shift 2
export HOME=/tmp/home-$uid XDG_RUNTIME_DIR=/run/user/$uid
install -d -o "$uid" -g "$uid" -m 700 "$HOME" "$XDG_RUNTIME_DIR"

enable() { # enables the controllers for the children of a cgroup
    for controller in cpu memory pids; do
        ! grep -qw "$controller" "$1/cgroup.controllers" || echo "+$controller" >"$1/cgroup.subtree_control"
    done
}
cgroup=/sys/fs/cgroup
if [ "$mode" != root ]; then
    slice=$cgroup/user.slice/user-$uid.slice
    mkdir -p "$slice"
    enable $cgroup
    enable $cgroup/user.slice
    enable "$slice"
    cgroup=$slice/session-$$.scope
    if [ "$mode" = delegated ]; then
        service=$slice/user@$uid.service
        cgroup=$service/app.slice/run-$$.scope
        mkdir -p "$cgroup"
        enable "$service"
        enable "$service/app.slice"
        # In the top cgroup, the user owns only the files that a delegation includes.
        chown "$uid:$uid" "$service" "$service"/cgroup.{procs,subtree_control,threads}
        chown -R "$uid:$uid" "$service/app.slice"
    fi
    mkdir -p "$cgroup"
fi
echo $$ >"$cgroup/cgroup.procs"
cd /
# Processes started in the background ignore some signals.
exec setsid --wait setpriv --reuid "$uid" --regid "$uid" --clear-groups --reset-env -- \
    env --default-signal=HUP,INT,QUIT,TERM,PIPE,CHLD PATH="$PATH" HOME="$HOME" XDG_RUNTIME_DIR="$XDG_RUNTIME_DIR" LANG=C.UTF-8 AS="$AS" "$@"
