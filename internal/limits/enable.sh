
# Lets user $uid set limits with sbxrun on memory, tasks, CPUs and CPU time, as far as this machine supports them, in
# the shell $shell and its descendants. Run as root:
#
#   cgroup v2 with systemd   the user's own systemd gets the controllers, and runs from boot
#                            on, so later sessions can set limits, too
#   cgroup v2 without        the user gets a cgroup, and the shell goes there
#   cgroup v1, or both       the same in each hierarchy
#
# The cgroups made here last until the next boot.
set -eu

fail() {
    echo "sbxrun: error: $1" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail 'this is for root: sbxrun doctor --script | sudo sh'
[ -d "/proc/$shell" ] || fail "process $shell has ended; in the shell that is to set limits: sbxrun doctor --script | sudo sh"

# place OF: prints the mount point of a hierarchy, v2 or a v1 controller's, and the shell's cgroup in it. Prints
# nothing if that is not visible.
place() {
    awk -v of="$1" '
    function among(list) { return index("," list ",", "," of ",") }
    FILENAME ~ /mountinfo$/ {
        for (i = 7; i < NF && $i != "-"; i++);
        # The user of the shell may have mounted more there. Only mounts that exist here, too, count.
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

# give FILE...: makes the user the owner.
give() { chown "$uid" "$@"; }

# enable DIR: enables all controllers for the children of DIR and of the directories above it.
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

# v2, if it has the controllers. A cgroup with processes cannot enable controllers for its children, so the user's
# cgroup is a sibling of the shell's.
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
        # A systemd that is already running gets the controllers now, and detects them when it is executed again.
        enable "$top/user.slice/user-$uid.slice"
        XDG_RUNTIME_DIR=/run/user/$uid setpriv --reuid "$uid" --clear-groups systemctl --user daemon-reexec
    elif [ "$(stat -c %u "${own%/*}")" != "$uid" ]; then
        beside=${own%/*}
        if [ "$own" = "$top" ]; then
            beside=$top
            # In a container the topmost cgroup can enable controllers only if it is empty. The machine's root cgroup,
            # which has no cgroup.type, always can.
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
echo "sbxrun: user $uid may set limits in process $shell and its descendants"
