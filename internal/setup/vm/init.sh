#!/bin/busybox sh
# shellcheck shell=dash The machine's first program: switches from the initial file system to the real one.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount -t devtmpfs -o nosuid dev /dev
mount -t tmpfs -o nosuid,nodev,mode=755 run /run
exec >/dev/console 2>&1

fail() {
    echo "vm: $*"
    dmesg | tail -n 20
    poweroff -f
}
while read -r name; do
    insmod "/modules/$name.ko" || fail "module $name"
done </modules/order

options=trans=virtio,version=9p2000.L,msize=512000
# The cache is loose, because nothing that the tests use changes in the meantime.
mount -t 9p -o "$options,ro,cache=loose" host /lower || fail 'no root of the host'
mount -t tmpfs -o mode=755 upper /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new || fail 'no overlay'
umount /lower /upper
cp -r /vm /run/vm
cp /bin/busybox /run/vm/
for dir in proc sys dev run; do
    mkdir -p "/new/$dir"
    mount --move "/$dir" "/new/$dir"
done
# Not chroot, in which no user namespace can be created.
exec switch_root /new /bin/bash /run/vm/guest.sh
