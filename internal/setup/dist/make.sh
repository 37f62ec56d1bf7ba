#!/bin/sh
# Makes the files of a release, for amd64 and arm64: archives, packages for Debian, Fedora and Alpine, a list of the
# modules in each program, and checksums. The same sources and the same Go produce identical files.
#
# usage: make.sh [DIR]    a new or empty directory; otherwise bin/dist, made anew
#
# SBXRUN_VERSION and SOURCE_DATE_EPOCH are the version and the time if there is no git.
set -eu
cd "$(dirname "$0")/../../.."
here=$PWD/internal/setup/dist
umask 022

die() {
    echo "dist: error: $1" >&2
    exit 1
}

: "${SBXRUN_VERSION:=$(git describe --tags --always --dirty 2>/dev/null || :)}"
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct 2>/dev/null || :)}"
[ -n "$SBXRUN_VERSION" ] && [ -n "$SOURCE_DATE_EPOCH" ] ||
    die "without git, set SBXRUN_VERSION and SOURCE_DATE_EPOCH"
export SBXRUN_VERSION SOURCE_DATE_EPOCH
tar --version 2>/dev/null | grep -q GNU || die "only GNU tar makes the same archive twice"

# The version in the form of packages: 1.2.3 is a release, 1.2.3+4.gCOMMIT is four commits later, 1.3.0~rc1 comes
# before 1.3.0. Before the first release it consists of the next one's number, the date and the commit.
case $SBXRUN_VERSION in
v[0-9]*) version=${SBXRUN_VERSION#v} ;;
*) version=$(sed -n 's/^const Number = "\(.*\)"$/\1/p' internal/version/version.go)-$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y%m%d)-g$SBXRUN_VERSION ;;
esac
version=$(echo "$version" | sed 's/-dirty$/+dirty/; s/-\([0-9]*\)-\(g[0-9a-f]*\)/+\1.\2/; s/-/~/')
# apk-tools has its own suffixes for these, and none for a commit.
alpine=$(echo "$version" | sed 's/+dirty$//; s/+\([0-9]*\).*/_p\1/; s/~\([a-z]*\)[.-]*/_\1/')

[ $# -gt 0 ] || rm -rf bin/dist
out=${1:-bin/dist}
mkdir -p "$out"
[ -z "$(ls -A "$out")" ] || die "$out is not empty"
out=$(cd "$out" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-dist.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

./setup.sh man "$work/man"
./setup.sh completions "$work/completions"
gzip -9n "$work"/man/*
go run ./cmd/sbxrund openapi >"$work/openapi.json"
go run ./cmd/sbxrund openapi 3.0 >"$work/openapi-3.0.json"
(cd "$here" && CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$work/" . github.com/goreleaser/nfpm/v2/cmd/nfpm)

# place USR ZSH: copies everything below /usr except the programs. Each distribution has its own directory for zsh.
place() {
    mkdir -p "$1/share/bash-completion/completions" "$1/share/fish/vendor_completions.d" "$1/share/$2" "$1/share/man/man1" "$1/share/doc/sbxrun/docs" "$1/lib/systemd/system" "$1/share/sbxrun" "$1/lib/sysusers.d"
    cp "$here/sysusers.conf" "$1/lib/sysusers.d/sbxrun.conf"
    cp "$work"/man/* "$1/share/man/man1"
    for file in "$work"/completions/*.bash; do
        completed=${file##*/}
        cp "$file" "$1/share/bash-completion/completions/${completed%.bash}"
    done
    cp "$work"/completions/*.fish "$1/share/fish/vendor_completions.d"
    cp "$work"/completions/_* "$1/share/$2"
    cp ./*.md "$1/share/doc/sbxrun"
    cp -r docs/*.md docs/*.json docs/concepts docs/guides docs/images docs/reference "$1/share/doc/sbxrun/docs"
    # The files that the documents link to. Copy only sources, because the checkout may contain build outputs.
    for part in examples examples/cluster python python/sbxrun node go; do
        mkdir -p "$1/share/doc/sbxrun/clients/$part"
        find "clients/$part" -maxdepth 1 -type f ! -name '*_test.go' -exec cp -t "$1/share/doc/sbxrun/clients/$part" {} +
    done
    cp LICENSE "$1/share/doc/sbxrun/copyright" # Debian's name for it
    cp internal/doctor/sbxrun-bwrap "$work"/openapi*.json "$1/share/sbxrun"
    cp "$here"/sbxrund.service "$here"/sbxrund.socket "$1/lib/systemd/system"
}

# settle ROOT: makes modes and times independent of this checkout.
settle() {
    find "$1" -type d -exec chmod 755 {} + -o -path '*/bin/*' -exec chmod 755 {} + -o -exec chmod 644 {} +
    find "$1" -exec touch -d "@$SOURCE_DATE_EPOCH" {} +
}

for arch in amd64 arm64; do
    echo "dist: $version for $arch"
    GOARCH=$arch GOAMD64=v1 GOARM64=v8.0 internal/setup/build.sh "$work/$arch"

    for program in "$work/$arch"/*; do
        "$work/dist" -version "$SBXRUN_VERSION" "$program" >"$out/${program##*/}-$version-linux-$arch.cdx.json"
    done

    name=sbxrun-$version-linux-$arch
    place "$work/archive/$name" zsh/site-functions
    mkdir -p "$work/archive/$name/bin" "$work/archive/$name/share/doc/sbxrun/examples"
    cp "$here/serve.toml" "$work/archive/$name/share/doc/sbxrun/examples"
    cp "$work/$arch"/* "$work/archive/$name/bin"
    sed -i 's|=/usr/bin/|=/usr/local/bin/|' "$work/archive/$name/lib/systemd/system/sbxrund.service" # where archives are unpacked
    settle "$work/archive"
    tar -c -C "$work/archive" --sort=name --format=ustar --owner=0 --group=0 --numeric-owner "$name" | gzip -9n >"$out/$name.tar.gz"
    rm -r "$work/archive"

    for format in deb rpm apk; do
        zsh=zsh/site-functions
        [ $format != deb ] || zsh=zsh/vendor-completions
        root=$work/root
        place "$root/usr" $zsh
        mkdir -p "$root/usr/bin" "$root/etc/sbxrun" "$root/scripts"
        cp "$here/serve.toml" "$root/etc/sbxrun"
        cp "$here/postinstall.sh" "$here/preremove.sh" "$root/scripts"
        cp "$work/$arch"/* "$root/usr/bin"
        settle "$root"
        case $format in
        deb) export VERSION="$version" RELEASE= ;;
        rpm) export VERSION="$version" RELEASE=1 ;;
        apk) export VERSION="$alpine" RELEASE=0 ;;
        esac
        (cd "$root" && ARCH=$arch "$work/nfpm" package --config "$here/nfpm.yaml" --packager $format --target "$out/" >"$work/log") || {
            cat "$work/log" >&2
            die "no $format for $arch"
        }
        rm -r "$root"
    done
done

(cd "$out" && sha256sum -- * >"$work/SHA256SUMS")
mv "$work/SHA256SUMS" "$out"
ls -l "$out"
