#!/bin/bash
# Compares image trees with umoci's, and runs images that umoci, skopeo, buildah and podman have written: TestImageTools.
# The programs are Debian's, in a temporary directory. As root it also runs the tests as an ordinary user, and installs
# packages into an image of Debian.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD
work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-images.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
mkdir -p "$work"/{debs,tools,debian}
export SBXRUN_BIN="${SBXRUN_BIN:-$root/bin/sbxrun}" SBXRUN_IMAGE_PACKAGES=$work/packages SBXRUN_IMAGE_DEBIAN=

# fetch DIR PACKAGE...: downloads packages.
fetch() {
    mkdir -p "$1"
    (cd "$1" && shift && apt-get -qq -o APT::Sandbox::User=root download "$@")
}

# Real layers, with links, deep directories and setuid programs.
fetch "$work/packages" base-files bash coreutils dash findutils libc-bin libc6 libpython3.11-minimal login passwd perl-base \
    python3-minimal python3.11-minimal tzdata util-linux zlib1g
needed=$(apt-get --simulate --no-install-recommends install umoci skopeo buildah podman | awk '/^Inst / { print $2 }')
if [ -n "$needed" ]; then # with the libraries that this machine lacks
    # shellcheck disable=SC2086 # a list of words
    fetch "$work/debs" $needed
    for archive in "$work"/debs/*.deb; do dpkg-deb --extract "$archive" "$work/tools"; done
fi
export PATH=$work/tools/usr/bin:$PATH:/usr/sbin:/sbin
LD_LIBRARY_PATH=$work/tools/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
export LD_LIBRARY_PATH

run() { go test -vet=off -tags imagetools -count=1 -timeout 30m -run '^TestImageTools' "$@" ./tests; }

if [ "$(id -u)" = 0 ]; then
    if ! command -v debootstrap >/dev/null; then
        fetch "$work/debs" debootstrap
        dpkg-deb --extract "$work"/debs/debootstrap_*.deb "$work/tools"
        export DEBOOTSTRAP_DIR=$work/tools/usr/share/debootstrap PATH=$PATH:$work/tools/usr/sbin
    fi
    env -u LD_LIBRARY_PATH unshare --mount --propagation private debootstrap --variant=minbase bookworm "$work/debian" http://deb.debian.org/debian >"$work/log" 2>&1 ||
        { tail -n 30 "$work/log" && exit 1; }
    tar -C "$work/debian" -cf "$work/debian.tar" .
    SBXRUN_IMAGE_DEBIAN=$work/debian.tar run
    . internal/setup/other.sh
    run -exec "$root/internal/setup/as.sh"
else
    run
fi
