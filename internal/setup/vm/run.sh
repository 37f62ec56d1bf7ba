#!/bin/bash
# Boots a Debian kernel under qemu, in software, and runs one shell command in it.
#
# usage: run.sh [OPTION...] -- COMMAND
#   --kernel VERSION  for example 5.10, 6.1 or 6.12; by default the distribution's own
#   --user NAME|UID   user of the command (root)
#   --cgroup MODE     cgroup of the command (delegated):
#                       delegated   as under a user's systemd: in a scope below a subtree that the user owns
#                       session     as in a plain login: the user cannot create cgroups
#                       root        as root in the root cgroup
#   --arch ARCH       amd64 or arm64; the latter has its own small Debian as /
#   --share DIR       appears as /share inside, writable
#   --memory MIB      memory of the machine (2048)
#   --append WORDS    additions to the kernel's command line, for example cgroup_disable=memory
#   --timeout SECS    time limit for everything (300)
#
# Inside, / is this machine's, with an overlay whose writes go to memory; /tmp, /run and /dev/shm are empty, and
# /var/tmp is an empty disk (ext4). There is no network except lo, and only cgroup v2. With --user root and --cgroup
# root, "$AS UID MODE COMMAND..." runs a command as another user. The exit code is the command's, 124 at the time
# limit, or 125 if the machine failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    sed -n 's/^# \{0,1\}//; /^usage:/,/^$/p' "$here/run.sh" >&2
    exit 2
}
die() {
    printf 'vm: error: %s\n' "$1" >&2
    exit 125
}

kernel=default user=root mode=delegated share='' memory=2048 append='' timeout=300 arch=amd64
while [ $# -gt 0 ]; do
    [ "$1" = -- ] && break
    [ $# -gt 1 ] || usage
    case $1 in
    --kernel) kernel=$2 ;;
    --user) user=$2 ;;
    --cgroup) mode=$2 ;;
    --share) share=$2 ;;
    --memory) memory=$2 ;;
    --arch) arch=$2 ;;
    --append) append=$2 ;;
    --timeout) timeout=$2 ;;
    *) usage ;;
    esac
    shift 2
done
if [ $# != 2 ] || [ "$1" != -- ]; then usage; fi
case $mode in delegated | session | root) ;; *) usage ;; esac
uid=$(id -u -- "$user" 2>/dev/null) || uid=$user
case $uid in '' | *[!0-9]*) die "there is no user $user" ;; esac

cache=${XDG_CACHE_HOME:-$HOME/.cache}/sbxrun-vm
"$here/fetch.sh" "$cache" "$kernel" "$arch" || exit 125
of=
[ "$arch" = amd64 ] || of=-$arch
linux=$cache/linux$of-$kernel

work=$(mktemp -d)
qemu=
# shellcheck disable=SC2317,SC2329 # called by the trap
clean() {
    [ -z "$qemu" ] || kill "$qemu" 2>/dev/null || :
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# The initial file system: fixed files, and those of this run.
box=$(echo "$cache"/tools/*bin/busybox)
theirs=$(echo "$cache/tools$of"/*bin/busybox)
mkdir -p "$work"/root/{bin,modules,vm,proc,sys,dev,run,lower,upper,new}
cp "$theirs" "$work/root/bin/busybox"
cp "$linux/modules"/* "$work/root/modules"
cp "$here"/{init,guest,as}.sh "$work/root/vm"
mv "$work/root/vm/init.sh" "$work/root/init"
printf '%s\n' "$2" >"$work/root/vm/command"
printf 'uid=%s mode=%s share=%s\n' "$uid" "$mode" "${share:+yes}" >"$work/root/vm/settings"
chmod -R a+rX "$work/root"
(cd "$work/root" && find . | "$box" cpio -o -H newc 2>/dev/null) >"$work/initrd"

case $arch in
amd64)
    emulator=qemu-system-x86_64 root=/ console=ttyS0
    machine=(-machine pc -cpu 'Nehalem,+rdrand')
    ;;
arm64)
    emulator=qemu-system-aarch64 root=$cache/root$of console=ttyAMA0
    machine=(-machine virt -cpu max,pauth-impdef=on)
    ;;
esac
program=("$emulator")
qemu_files=$cache/qemu$of
if [ -d "$qemu_files" ]; then
    program=(env "LD_LIBRARY_PATH=$qemu_files/usr/lib/x86_64-linux-gnu:$qemu_files/lib/x86_64-linux-gnu"
        "$qemu_files/usr/bin/$emulator" -L "$qemu_files/usr/share/qemu" -L "$qemu_files/usr/share/seabios")
fi
shared() { # TAG DIRECTORY MORE
    program+=(-fsdev "local,id=$1,path=${2//,/,,},security_model=none,multidevs=remap$3" -device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}
port() { # NAME FILE
    program+=(-chardev "file,id=$1,path=$2,append=on" -device "virtserialport,chardev=$1,name=$1")
}
# shellcheck disable=SC2054 # the commas are qemu's
program+=(-nodefaults -no-user-config -no-reboot -display none -nic none "${machine[@]}" -accel tcg
    -smp 2 -m "$memory" -kernel "$linux/vmlinux" -initrd "$work/initrd"
    -append "console=$console quiet panic=-1 mitigations=off no_timer_check tsc=reliable random.trust_cpu=on rcupdate.rcu_expedited=1 $append"
    -serial "file:$work/console" -device virtio-serial-pci)
shared host "$root" ,readonly=on
[ -z "$share" ] || shared share "$(readlink -e -- "$share")" ''
: >"$work/code"
truncate -s 8G "$work/disk"
program+=(-drive "file=$work/disk,format=raw,if=virtio,cache=unsafe")
port out /proc/self/fd/1
port err /proc/self/fd/3
port code "$work/code"

# Use pipes, because qemu opens them by name, and a file would be overwritten from its beginning.
exec {out}> >(exec cat)
copies=($!)
exec {err}> >(exec cat >&2)
copies+=($!)
# shellcheck disable=SC2261 # three descriptors
timeout --foreground --kill-after 5 "$timeout" "${program[@]}" </dev/null >&"$out" 3>&"$err" 2>"$work/errors" &
qemu=$!
exec {out}>&- {err}>&-
ended=0
wait "$qemu" || ended=$?
qemu=
wait "${copies[@]}"
if [ -s "$work/code" ]; then
    exit "$(cat "$work/code")"
fi
case $ended in
124 | 137) printf 'vm: error: not ended after %s s\n' "$timeout" >&2 ;;
*) printf 'vm: error: the machine has ended with %s before the command did\n' "$ended" >&2 ;;
esac
tail -n 20 "$work/errors" "$work/console" >&2
[ "$ended" = 124 ] || [ "$ended" = 137 ] || exit 125
exit 124
