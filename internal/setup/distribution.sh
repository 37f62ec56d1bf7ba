#!/bin/bash
# Compares programs of Debian in a sandbox and outside, as root and as an ordinary user: TestDistribution. It installs
# them into a debootstrap tree, which is the root directory of the test. The machine stays as it was.
#
# usage: distribution.sh [DIR]    as root or where sudo asks nothing; DIR keeps the tree for the next time
set -euo pipefail

programs='bc bind9-dnsutils bison bubblewrap bzip2 ca-certificates chromium cmake curl dc docbook-xml docbook-xsl dpkg-dev
    erlang-base aspell aspell-en autoconf default-jdk-headless ffmpeg file fish flex fontconfig fonts-dejavu-core gawk g++
    gcc gdb gfortran ghostscript git gnupg gnuplot-nox golang-go graphviz groff guile-3.0 hunspell hunspell-en-us hwloc-nox
    imagemagick jq less libimage-exiftool-perl libmagickcore-6.q16-6-extra librsvg2-bin libxml2-utils locales lsb-release
    lua5.4 lynx m4 mailcap make man-db mariadb-client mc mediainfo nano netpbm nodejs ocaml-interp openssh-client openssl
    pandoc perl perl-doc php-cli php-sqlite3 php-xml pkg-config poppler-utils postgresql-client procps python3
    python3-yaml r-base-core redis-tools rsync ruby sbcl screen shared-mime-info sox sqlite3 tar tcl
    texlive-latex-base tidy tmux tzdata unzip util-linux vim-nox w3m wget xdg-utils xsltproc xz-utils zip zsh zstd'

die() {
    printf 'distribution: error: %s\n' "$*" >&2
    exit 1
}

# quietly COMMAND...: shows its output only if it fails.
quietly() {
    "$@" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2 && die "$*"; }
}

# outside builds everything as the current user.
outside() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-distribution.XXXXXX")
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    trap '"${as_root[@]}" rm -rf --one-file-system "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    chmod 755 "$work"
    mkdir -p "$work/sbxrun/bin" "${1:-$work/root}"
    cp -r tests fixtures "$work/sbxrun"
    cp "${SBXRUN_BIN:-bin/sbxrun}" "$work/sbxrun/bin"
    go test -c -vet=off -tags distribution -o "$work/sbxrun/tests/tests.test" ./tests
    cp "${BASH_SOURCE[0]}" "$work/distribution.sh"
    tree=$(cd "${1:-$work/root}" && pwd)
    "${as_root[@]}" env SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW-}" unshare --mount --propagation private bash "$work/distribution.sh" --inside "$work" "$tree"
}

# inside installs the programs as root, in a mount namespace, and tests them. The root directory of the tests is an overlay
# over the tree, so the tree itself can be another root directory there.
inside() {
    work=$1 tree=$2
    [ -e "$tree/ready" ] || install
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/{upper,work,root}
    mount -t overlay -o lowerdir="$tree",upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
    mkdir -p /mnt/root/mnt/{sbxrun,tree}
    mount --bind "$work/sbxrun" /mnt/root/mnt/sbxrun
    mount --bind "$tree" /mnt/root/mnt/tree
    echo "sandbox:x:61000:61000::/nonexistent:/bin/sh" >>/mnt/root/etc/passwd # ssh and others want a name
    status=0
    for uid in 0 61000; do
        # shellcheck disable=SC2016 # for the other shell
        enter /mnt/root setpriv --reuid $uid --regid $uid --clear-groups env -i PATH="$PATH" SBXRUN_BIN=/mnt/sbxrun/bin/sbxrun \
            SBXRUN_TESTS_SLOW="${SBXRUN_TESTS_SLOW-}" SBXRUN_DISTRIBUTION=/mnt/tree \
            sh -c 'cd /mnt/sbxrun/tests && exec ./tests.test -test.v -test.run "^TestDistribution$"' || status=1
    done
    return $status
}

# enter ROOT COMMAND...: runs a command with another root directory. Not by chroot(1), in which no user namespace can be
# created.
enter() {
    # shellcheck disable=SC2016 # for the other shell
    unshare --mount --propagation private sh -ec 'cd "$0"
mount --rbind . .
cd "$0"
for dir in proc sys dev; do mount --rbind /$dir $dir; done
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
pivot_root . .
umount --lazy .
cd /
exec "$@"' "$@"
}

install() {
    rm -rf --one-file-system "${tree:?}"/*
    mkdir "$work/debootstrap"
    if ! command -v debootstrap >/dev/null || [ ! -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        (cd "$work/debootstrap" && quietly apt-get download debootstrap debian-archive-keyring)
        for archive in "$work"/debootstrap/*.deb; do dpkg-deb --extract "$archive" "$work/debootstrap"; done
        export DEBOOTSTRAP_DIR=$work/debootstrap/usr/share/debootstrap PATH=$PATH:$work/debootstrap/usr/sbin
    fi
    keyring=$work/debootstrap/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e "$keyring" ] || keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    quietly debootstrap --variant=minbase --keyring="$keyring" bookworm "$tree" http://deb.debian.org/debian
    cp --remove-destination /etc/resolv.conf "$tree/etc/resolv.conf"
    apt=(env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get --yes --no-install-recommends)
    quietly enter "$tree" "${apt[@]}" update
    # shellcheck disable=SC2086 # a list of words
    quietly enter "$tree" "${apt[@]}" install $programs
    quietly enter "$tree" "${apt[@]}" clean
    # Configuration that differs from the defaults of the programs.
    quietly enter "$tree" sh -ec "echo 'de_DE.UTF-8 UTF-8' >/etc/locale.gen
locale-gen
ln -sf /usr/share/zoneinfo/Europe/Berlin /etc/localtime
echo Europe/Berlin >/etc/timezone
git config --system core.abbrev 12"
    : >"$tree/ready"
}

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH
case ${1-} in
--inside) inside "$2" "$3" ;;
*) outside "$@" ;;
esac
