
# Lets user $uid set limits with sbxrun on memory, tasks, CPUs and CPU time, in the shell
# $shell and what that starts, whichever of these this machine has; for root:
#
#   cgroup v2 with systemd   the user's own systemd gets the controllers, and runs from boot
#                            on: so sessions to come can set limits, too
#   cgroup v2 without        the user gets a cgroup, and the shell goes there
#   cgroup v1, or both       the same in each hierarchy
#
# Cgroups that are made here are there until the machine is booted anew.
set -eu

fail() {
    echo "sbxrun: error: $1" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail 'this is for root: sbxrun doctor --script | sudo sh'
[ -d "/proc/$shell" ] || fail "process $shell has ended; in the shell that is to set limits: sbxrun doctor --script | sudo sh"

# place OF: the shell's cgroup, of v2 or of a controller of v1, and before it where the
# hierarchy is mounted. Nothing, if that cannot be seen.
place() {
    awk -v of="$1" '
    function among(list) { return index("," list ",", "," of ",") }
    FILENAME ~ /mountinfo$/ {
        for (i = 7; i < NF && $i != "-"; i++);
        # Whoever has the shell may have mounted more there. Only what is mounted here, too, counts.
        if (NR == FNR) { here[$5] = $(i + 1); next }
        if (point == "" && here[$5] == $(i + 1) && (of == "v2" ? $(i + 1) == "cgroup2" : $(i + 1) == "cgroup" && among($(i + 3)))) {
            root = $4 == "/" ? "" : $4
            point = $5
        }
        next
    }
    {
        split($0, part, ":")
        if (of == "v2" ? /^0::/ : among(part[2])) own = substr($0, length(part[1] part[2]) + 3)
    }
    END {
        if (own == "/") own = ""
        if (point != "" && index(own "/", root "/") == 1) print point, point substr(own, length(root) + 1)
    }' /proc/self/mountinfo "/proc/$shell/mountinfo" "/proc/$shell/cgroup"
}

# give FILE...: to the user.
give() { chown "$uid" "$@"; }

# enable DIR: all controllers for the children of DIR, and of what is above it.
enable() {
    [ "$1" = "$top" ] || enable "${1%/*}"
    for controller in cpu memory pids; do
        grep -qw "$controller" "$1/cgroup.subtree_control" || echo "+$controller" >"$1/cgroup.subtree_control"
    done
}

# v1: below the shell's own.
for controller in memory pids cpu cpuacct; do
    found=$(place "$controller")
    own=${found#* }
    if [ -n "$found" ] && [ "$(stat -c %u "$own")" != "$uid" ]; then
        new=$own/user-$uid
        mkdir -p "$new"
        give "$new" "$new/cgroup.procs" "$new/tasks"
        echo "$shell" >"$new/cgroup.procs"
    fi
done

# v2, if the controllers are there. One that holds processes gives none to its children:
# so the user's is beside the shell's.
found=$(place v2)
top=${found% *}
own=${found#* }
if [ -n "$found" ] && grep -qw memory "$top/cgroup.controllers"; then
    if [ -d /run/systemd/system ]; then
        drop=/etc/systemd/system/user@$uid.service.d
        mkdir -p "$drop"
        printf '[Service]\nDelegate=cpu memory pids\n' >"$drop/sbxrun.conf"
        systemctl daemon-reload
        loginctl enable-linger "$uid"
        systemctl start "user@$uid.service"
        # One that ran before gets them now, and looks once more what it has.
        enable "$top/user.slice/user-$uid.slice"
        XDG_RUNTIME_DIR=/run/user/$uid setpriv --reuid "$uid" --clear-groups systemctl --user daemon-reexec
    elif [ "$(stat -c %u "${own%/*}")" != "$uid" ]; then
        beside=${own%/*}
        if [ "$own" = "$top" ]; then
            beside=$top
            # In a container the topmost one may give controllers only if it is empty; that
            # of the machine has no type.
            if [ -e "$top/cgroup.type" ]; then
                mkdir -p "$top/leaf"
                for pid in $(cat "$top/cgroup.procs"); do
                    echo "$pid" >"$top/leaf/cgroup.procs" || : # it has ended
                done
            fi
        fi
        enable "$beside"
        new=$beside/user-$uid
        mkdir -p "$new/leaf"
        enable "$new"
        give "$new" "$new/cgroup.procs" "$new/cgroup.subtree_control" "$new/leaf" "$new/leaf/cgroup.procs"
        echo "$shell" >"$new/leaf/cgroup.procs"
    fi
fi
echo "sbxrun: user $uid may set limits in process $shell, and in what that starts"
