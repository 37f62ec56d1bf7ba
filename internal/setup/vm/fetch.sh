#!/bin/bash
# Downloads qemu, a Debian kernel and busybox with apt, and unpacks them in the cache directory. It installs nothing.
# Existing files stay; remove the directory to renew them.
#
# usage: fetch.sh DIRECTORY KERNEL [ARCH]    a version such as 6.1, or "default", the distribution's
#
# With arm64 as ARCH it also downloads the packages of a root file system, and all files for the machine have -arm64
# in their names.
set -euo pipefail
cache=$1 kernel=$2 arch=${3:-amd64}
of=
[ "$arch" = amd64 ] || of=-$arch

die() {
    printf 'vm: error: %s\n' "$1" >&2
    exit 1
}

[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || die 'the kernel and qemu come from Debian for amd64, and this is not it'
mkdir -p "$cache/debs"
exec 9>"$cache/lock"
flock 9

apt=(-o APT::Sandbox::User=root) # not _apt, which may not write here

# shellcheck disable=SC1091
codename=$(. /etc/os-release && echo "${VERSION_CODENAME-}")

# others SUITE [NAME]: makes apt use the packages of another suite as well, with lists in a separate directory.
others() {
    local place=$cache/others-${2:-$1} mirror suites=("$codename") key='[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]'
    # shellcheck disable=SC2016 # apt's placeholders
    mirror=$(apt-get indextargets --format '$(SITE) $(REPO_URI)' 'Created-By: Packages' | awk '!/security/ { print $2; exit }')
    mkdir -p "$place"/{state/lists/partial,archives/partial}
    [ "$1" = "$codename" ] || suites+=("$1")
    printf "deb $key $mirror %s main\n" "${suites[@]}" >"$place/sources.list"
    apt+=(-o Dir::State="$place/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$place"
        -o Dir::Etc::sourcelist="$place/sources.list" -o Dir::Etc::sourceparts=/dev/null -o APT::Default-Release="$1")
    apt-get "${apt[@]}" --quiet update >&2
}

# foreign: does the same for packages of another architecture, as if nothing were installed.
foreign() {
    apt+=(-o APT::Architecture="$arch" -o APT::Architectures="$arch")
    others "$codename" "$arch"
    : >"$cache/nothing"
    apt+=(-o Dir::State::status="$cache/nothing")
}

update() {
    local sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    $sudo apt-get --quiet update >&2
}

# unpack DIRECTORY PACKAGE...: downloads and unpacks packages, in the versions that apt would install.
unpack() {
    local into=$1 package place
    shift
    mkdir -p "$into"
    for package; do
        place=$cache/debs/${into##*/}/$package
        mkdir -p "$place"
        (cd "$place" && apt-get "${apt[@]}" --quiet download "$package" >&2) || return 1
        # new calls this in a condition, where set -e has no effect.
        dpkg-deb --extract "$place"/*.deb "$into" || return 1
        rm -r "$place"
    done
}

# new DIRECTORY COMMAND...: creates a directory, which the command fills completely or which does not appear. If the
# command fails, new fetches the package lists and tries again.
new() {
    local into=$1
    shift
    [ ! -d "$into" ] || return 0
    rm -rf "$into.new"
    mkdir "$into.new"
    if ! "$@" "$into.new"; then
        update
        rm -rf "$into.new"
        mkdir "$into.new"
        "$@" "$into.new"
    fi || die "$into cannot be made"
    mv "$into.new" "$into"
}

# qemu: unpacks qemu with the dependencies that this machine lacks, from the backports if there are any: qemu 10 takes
# two thirds of the time of 7.2.
qemu() {
    local packages usual=("${apt[@]}") apt=("${apt[@]}")
    others "$codename-backports" || apt=("${usual[@]}")
    packages=$(apt-get "${apt[@]}" install --simulate --no-install-recommends "$emulator" | awk '$1 == "Inst" { print $2 }') &&
        [ -n "$packages" ] || return 1
    # shellcheck disable=SC2086 # words
    unpack "$1" $packages
}

tools() { unpack "$1" busybox-static xz-utils; }

# root: makes the root directory of a machine that cannot use this one's, with the packages that sbxrun and its tests
# need. It does not run maintainer scripts; /bin and similar directories are links to /usr, as in base-files.
root() {
    local into=$1 packages dir
    packages=$(apt-get "${apt[@]}" install --simulate --no-install-recommends usr-is-merged \
        base-passwd bash bubblewrap coreutils dash diffutils dpkg findutils grep libc-bin mount procps python3-minimal sed tar util-linux |
        awk '$1 == "Inst" { print $2 }') && [ -n "$packages" ] || return 1
    # shellcheck disable=SC2086 # words
    unpack "$into" $packages || return 1
    for dir in bin lib sbin; do
        cp -a "$into/$dir" "$into/usr" || return 1
        rm -r "${into:?}/$dir"
        ln -s "usr/$dir" "$into/$dir"
    done
    cp "$into/usr/share/base-passwd/passwd.master" "$into/etc/passwd"
    cp "$into/usr/share/base-passwd/group.master" "$into/etc/group"
    : >"$into/var/lib/dpkg/status"
    mkdir -p "$into"/{dev,proc,run,sys,tmp}
}

modules='virtio_pci virtio_console virtio_blk 9pnet_virtio 9p overlay crc32c_generic ext4 veth'

# linux: unpacks the kernel, and the modules for the root file system and a disk.
linux() {
    local into=$1 package offset module
    local xz=$cache/tools/usr/bin/xz
    package=$(apt-cache "${apt[@]}" show "linux-image-$arch" | sed -n 's/^Depends: \(linux-image-[^ ,]*\).*/\1/p' |
        awk -v v="linux-image-$kernel" 'v == "linux-image-default" || index($0, v ".") == 1 { print; exit }')
    [ -n "$package" ] && unpack "$into" "$package" || return 1
    # The kernel's own loader takes seconds to decompress it under emulation. So find the compressed data and
    # decompress it here. shellcheck disable=SC2013 # numbers
    for offset in $(LC_ALL=C grep -a -b -o -P '\xfd7zXZ\x00' "$into"/boot/vmlinuz-* | cut -d: -f1); do
        tail -c "+$((offset + 1))" "$into"/boot/vmlinuz-* | "$xz" -dc >"$into/vmlinux" 2>/dev/null || : # more follows
        [ "$(head -c 4 "$into/vmlinux" | tail -c 3)" != ELF ] || break
    done
    [ "$(head -c 4 "$into/vmlinux" | tail -c 3)" = ELF ] || mv "$into"/boot/vmlinuz-* "$into/vmlinux" || return 1
    mkdir "$into/modules"
    for module in $modules; do load "$module" || return 1; done
    rm -r "${into:?}"/{boot,lib,usr}
}

# load MODULE: appends a module to the list of modules to load, after its dependencies. A module without a file is
# built into the kernel.
load() {
    local name=${1//-/_} file needed
    if [ -e "$into/modules/$name.ko" ]; then return; fi
    file=$(find "$into/lib/modules" -name "${name//_/[_-]}.ko*")
    case $file in
    '') return ;;
    *.xz) "$xz" -dc <"$file" >"$into/modules/$name.ko" || return 1 ;;
    *) cp "$file" "$into/modules/$name.ko" || return 1 ;;
    esac
    needed=$(tr '\0' '\n' <"$into/modules/$name.ko" | sed -n 's/^depends=//p' | tr , ' ')
    for needed in $needed; do load "$needed" || return 1; done
    echo "$name" >>"$into/modules/order"
}

[ -e "$cache/linux$of-$kernel/modules/veth.ko" ] || rm -rf "${cache:?}/linux$of-$kernel" # made before the machine had a network
case $arch in
amd64) emulator=qemu-system-x86 program=qemu-system-x86_64 ;;
arm64) emulator=qemu-system-arm program=qemu-system-aarch64 ;;
*) die "no machine for $arch" ;;
esac
command -v $program >/dev/null || new "$cache/qemu$of" qemu
new "$cache/tools" tools
if [ -n "$of" ] && { [ ! -d "$cache/root$of" ] || [ ! -d "$cache/tools$of" ] || [ ! -d "$cache/linux$of-$kernel" ]; }; then
    [ "$kernel" = default ] || die "for $arch there is only the distribution's kernel"
    foreign
    new "$cache/root$of" root
    new "$cache/tools$of" tools
fi
if [ "$kernel" != default ] && [ -z "$of" ] && [ ! -d "$cache/linux-$kernel" ] &&
    ! apt-cache show linux-image-amd64 2>/dev/null | grep -q "^Depends: linux-image-$kernel\."; then
    case $kernel in
    5.10) others bullseye ;;
    *) others "$codename-backports" ;;
    esac
fi
new "$cache/linux$of-$kernel" linux
