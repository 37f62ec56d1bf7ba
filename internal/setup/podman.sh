#!/bin/bash
# Tries the flags for files and images in a container that Debian's podman starts with the options in
# docs/guides/deploy.md: as root and as an ordinary user. podman and the container each get an overlay in memory over this
# machine's root directory, so nothing stays installed.
#
# usage: podman.sh    as root or where sudo asks nothing
set -eEuo pipefail

# The runtime is runc, because crun does not start where a machine has both versions of cgroups. The limits are those
# that root may set without CAP_SYS_RESOURCE.
packages='podman conmon runc catatonit libyajl2 libgpgme11 libsubid4 golang-github-containers-common golang-github-containers-image'
options='--runtime runc --ulimit nofile=1024:1024 --ulimit nproc=1000:1000 --network none'

# outside prepares everything as root of this machine.
outside() {
    [ "$(id -u)" = 0 ] || exec sudo -n env SBXRUN_BIN="${SBXRUN_BIN-}" bash "${BASH_SOURCE[0]}"
    cd "$(dirname "${BASH_SOURCE[0]}")/../.."
    work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-podman.XXXXXX")
    trap 'rm -rf --one-file-system "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    mkdir "$work/debs" "$work/engine"
    # shellcheck disable=SC2086 # a list of words
    (cd "$work/debs" && apt-get -qq -o APT::Sandbox::User=root download $packages)
    for archive in "$work"/debs/*.deb; do dpkg-deb --extract "$archive" "$work/engine"; done
    for dir in bin lib sbin; do # links to directories in /usr
        [ ! -d "$work/engine/$dir" ] || { mkdir -p "$work/engine/usr/$dir" && cp -a "$work/engine/$dir/." "$work/engine/usr/$dir" && rm -r "${work:?}/engine/$dir"; }
    done
    documented=$(sed -n 's/^    podman run \(.*\) IMAGE$/\1/p' docs/guides/deploy.md)
    [ -n "$documented" ]
    image
    cp "${SBXRUN_BIN:-bin/sbxrun}" "$work/sbxrun"
    cp "$(dirname "${SBXRUN_BIN:-bin/sbxrun}")/sbxrund" "$work/sbxrund"
    cp "${BASH_SOURCE[0]}" "$work/podman.sh"
    chmod 755 "$work" "$work"/sbxrun* "$work/podman.sh"
    unshare --mount --propagation private bash "$work/podman.sh" --engine "$work" "$documented"
}

# image writes an image with a shell and cat, in OCI layout.
image() {
    blobs=$work/image/blobs/sha256
    mkdir -p "$work/files" "$blobs"
    for program in /bin/sh /bin/cat; do
        # shellcheck disable=SC2046 # a list of words
        cp --parents -L $program $(ldd $program | grep -o '/[^ ]*') "$work/files"
    done
    echo 'of the image' >"$work/files/marker"
    tar -C "$work/files" --owner 0 --group 0 -cf "$work/blob" .
    layer=$(blob)
    printf '{"architecture": "%s", "os": "linux", "config": {"Cmd": ["cat", "/marker"]}, "rootfs": {"type": "layers", "diff_ids": ["%s"]}}' \
        "$(dpkg --print-architecture)" "$layer" >"$work/blob"
    config=$(blob)
    printf '{"schemaVersion": 2, "config": %s, "layers": [%s]}' "$(descriptor config.v1+json "$config")" "$(descriptor layer.v1.tar "$layer")" >"$work/blob"
    printf '{"schemaVersion": 2, "manifests": [%s]}' "$(descriptor manifest.v1+json "$(blob)")" >"$work/image/index.json"
    echo '{"imageLayoutVersion": "1.0.0"}' >"$work/image/oci-layout"
}

# blob adds a file to the image and prints its digest.
blob() {
    digest=$(sha256sum <"$work/blob" | cut -d' ' -f1)
    mv "$work/blob" "$blobs/$digest"
    echo "sha256:$digest"
}

# descriptor TYPE DIGEST: prints the descriptor of a blob.
descriptor() {
    printf '{"mediaType": "application/vnd.oci.image.%s", "digest": "%s", "size": %s}' "$1" "$2" "$(stat -c %s "$blobs/${2#*:}")"
}

# engine makes a root directory with podman, and runs a container in another one.
engine() {
    work=$1 documented=$2
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/{upper,work,root,container,tree} /mnt/container.{upper,work} /mnt/tree.{upper,work}
    cp -a "$work/engine/." /mnt/upper
    for place in container tree; do
        mount -t overlay -o lowerdir=/,upperdir=/mnt/$place.upper,workdir=/mnt/$place.work overlay /mnt/$place
    done
    chown 65534:65534 /mnt/tree
    mkdir -p /mnt/container/opt/try
    cp -r "$work"/sbxrun* "$work/podman.sh" "$work/image" /mnt/container/opt/try
    mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
    cd /mnt/root
    mkdir -p srv/container srv/tree var/lib/containers
    mount --rbind . .
    cd /mnt/root
    for dir in proc sys dev; do mount --rbind /$dir $dir; done
    for dir in run tmp var/lib/containers; do mount -t tmpfs -o mode=1777 tmpfs $dir; done
    mount --bind /mnt/container srv/container
    mount --bind /mnt/tree srv/tree
    pivot_root . .
    umount --lazy .
    cd /
    # shellcheck disable=SC2086 # lists of words
    exec podman --log-level error run --rm $documented $options --volume /srv/tree:/opt/tree:ro --rootfs /srv/container bash /opt/try/podman.sh --container
}

# container tries everything as root of the container, and as an ordinary user.
container() {
    export SBXRUN_STATE_DIR=/tmp/state SBXRUN_DATA_DIR=/tmp/data
    for owner in 65534:65534 1000:1000 0:0; do
        dir=/srv/of-${owner%:*}
        mkdir -p "$dir/b"
        chown -R "$owner" "$dir"
        cd "$dir"
        as=()
        if [ "$owner" = 1000:1000 ]; then
            refused '--user 1000:1000 runs the sandbox as the owner' -w true
            as=(--user 1000:1000)
        elif [ "$owner" = 0:0 ]; then
            refused "give it to the sandbox: chown 65534:65534 $dir" -w true
            refused "give it to the sandbox: chown 65534:65534 $dir/b" --bind "$dir/b" true
            chown -R 65534:65534 "$dir"
        fi
        files "${as[@]}"
        [ ${#as[@]} != 0 ] || sbxrun --rootfs /opt/tree test ! -e /opt/try
    done
    refused 'run sbxrun as an ordinary user' --volume v:/v true
    refused 'run sbxrun as an ordinary user' --image oci:/opt/try/image cat /marker
    mkdir -p /srv/own/b
    chown -R 1000:1000 /srv/own
    setpriv --reuid 1000 --regid 1000 --clear-groups env HOME=/nonexistent SBXRUN_STATE_DIR=/tmp/state-1000 SBXRUN_DATA_DIR=/tmp/data-1000 bash /opt/try/podman.sh --user
    echo "podman: every flag works"
}

# user is an ordinary user of the container.
user() {
    cd /srv/own
    files
    sbxrun --rootfs /opt/tree test ! -e /opt/try
    sbxrun --volume v:/v sh -c 'echo text >/v/f'
    [ "$(sbxrun --volume v:/v cat /v/f)" = text ]
    [ "$(sbxrun --cwd none --image oci:/opt/try/image)" = 'of the image' ]
    sbxrun image import oci:/opt/try/image --name small >/dev/null
    files --image small
    sbxrun start --name build --image small --overlay / --cwd none >/dev/null
    sbxrun exec build sh -c 'echo committed >/more'
    sbxrun image commit build more >/dev/null
    sbxrun kill --grace 0 build >/dev/null
    [ "$(sbxrun --cwd none --image more cat /more /marker)" = "$(printf 'committed\nof the image')" ]
}

# files tries the flags for files in the current directory, in sandboxes with these flags.
files() {
    sbxrun "$@" -w sh -c 'echo in >in; echo text >b/f'
    [ "$(sbxrun "$@" cat in)" = in ]
    [ "$(sbxrun "$@" --ro-bind "$PWD/b:/x" cat /x/f)" = text ]
    sbxrun "$@" --bind "$PWD/b" sh -c "echo more >>'$PWD/b/f'"
    [ "$(sbxrun "$@" --overlay "$PWD/b" sh -c "echo not >'$PWD/b/f'; cat '$PWD/b/f'")" = not ]
    [ "$(cat b/f)" = "$(printf 'text\nmore')" ]
    sbxrun start "$@" --name agent --cwd overlay >/dev/null
    sbxrun exec agent sh -c 'echo changed >in'
    sbxrun apply --quiet agent in
    sbxrun kill agent >/dev/null
    [ "$(cat in)" = changed ]
    [ "$(sbxrun "$@" --cwd none --put in:given --get given:got cat given)" = changed ]
    cmp got/given in
}

# refused HINT ARG...: asserts that sbxrun refuses to start, with this hint.
refused() {
    want=$1 code=0
    shift
    text=$(sbxrun "$@" 2>&1) || code=$?
    [ $code = 125 ] && [[ $text == *"$want"* ]] || { echo "sbxrun $*: exit code $code, $text; want $want" >&2 && return 1; }
}

export PATH=/opt/try:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
trap 'echo "podman: error: line $LINENO: $BASH_COMMAND" >&2' ERR
case ${1-} in
--engine) engine "$2" "$3" ;;
--container) container ;;
--user) user ;;
*) outside ;;
esac
