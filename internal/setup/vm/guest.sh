#!/bin/bash
# The machine's second program: sets the machine up as systemd would, and runs the command.
export PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
uid=0 mode=root share=
# shellcheck disable=SC1091
. /run/vm/settings # settings of this run
exec </dev/null
box=/run/vm/busybox

for dir in /dev/pts /dev/shm /tmp /run/lock /run/user; do mkdir -p $dir; done
mount -t devpts -o nosuid,noexec,mode=620,gid=5,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777 shm /dev/shm
mount -t tmpfs -o nosuid,nodev,mode=1777 tmp /tmp
if ! { mkfs.ext4 -q -F -O ^has_journal /dev/vda && mount -o nosuid /dev/vda /var/tmp && chmod 1777 /var/tmp; }; then
    echo 'vm: /var/tmp is no disk' >/dev/console # and tests that need one fail
fi
ln -sfT /proc/self/fd /dev/fd
for i in 0:stdin 1:stdout 2:stderr; do ln -sf /proc/self/fd/${i%:*} /dev/${i#*:}; done
mount --make-rshared /
$box hostname vm
$box ip link set lo up
ulimit -Hn 524288
ulimit -Sn 1024
for i in kernel/pid_max=4194304 fs/protected_{hardlinks,symlinks,fifos}=1 fs/protected_regular=2; do
    echo "${i#*=}" >"/proc/sys/${i%=*}"
done

cgroup=/sys/fs/cgroup
mount -t cgroup2 -o nosuid,nodev,noexec,nsdelegate,memory_recursiveprot cgroup2 $cgroup
mkdir $cgroup/init.scope $cgroup/user.slice
echo $$ >$cgroup/init.scope/cgroup.procs
# Keep one group with a quota of CPU time. With the first and the last one the kernel patches its own code (the static
# key of cfs_bandwidth_used), and qemu (7.2, two threads) may miss the end of that: a processor then hits the
# breakpoint forever.
echo +cpu >$cgroup/cgroup.subtree_control
mkdir $cgroup/quota.slice
echo '50000 100000' >$cgroup/quota.slice/cpu.max

for name in /sys/class/virtio-ports/*/name; do
    ln -s "/dev/$(basename "$(dirname "$name")")" "/run/vm/$(cat "$name")"
done
if [ -n "$share" ]; then
    mkdir -p /share
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,access=user,cache=none share /share
fi

# Processes that the command leaves behind may hold its output open, so do not wait for them.
exec {out}> >(exec cat >/run/vm/out)
copies=$!
exec {err}> >(exec cat >/run/vm/err)
copies+=" $!"
chmod 755 /run/vm/as.sh
AS=/run/vm/as.sh /run/vm/as.sh "$uid" "$mode" /bin/bash /run/vm/command 1>&"$out" 2>&"$err"
code=$?
exec {out}>&- {err}>&-
for ((i = 0; i < 20; i++)); do
    # shellcheck disable=SC2086 # two numbers
    kill -0 $copies 2>/dev/null || break
    sleep 0.1
done
echo $code >/run/vm/code
$box poweroff -f
