#!/bin/bash
# Builds bubblewrap of several versions into the cache directory, as DIRECTORY/VERSION/bwrap, from the sources of
# Debian's and Ubuntu's packages. It keeps existing builds and installs nothing. It prints the available versions, and
# fails if one is missing.
#
# usage: make.sh DIRECTORY
#
# Needs a C compiler, python3 and apt. It downloads from apt's archives and SBXRUN_MIRRORS: 0.4.0 and 0.6.1 are in
# Ubuntu's, the others in Debian's.
set -euo pipefail
cache=$1
mirrors="${SBXRUN_MIRRORS-} $(apt-get indextargets --format '$(REPO_URI)' | sed 's,/*$,,' | sort -u)"

# Versions and checksums of the sources. docs/guides/deploy.md lists the systems that have them.
versions='
0.4.0 e5fe7d2f74bd7029b5306b0b70587cec31f74357739295e5276b4a3718712023
0.4.1 b9c69b9b1c61a608f34325c8e1a495229bacf6e4a07cbb0c80cf7a814d7ccc03
0.6.1 9609c7dc162bc68abc29abfab566934fdca37520a15ed01b675adcf3a4303282
0.8.0 957ad1149db9033db88e988b12bcebe349a445e1efc8a9b59ad2939a113d333a
0.11.0 988fd6b232dafa04b8b8198723efeaccdb3c6aa9c1c7936219d5791a8b7a8646
0.12.0 9760d007363e3abba7c747489910f9f82d9fca53ba3bd3282e396fa3c97a3314
'

die() {
    printf 'bwraps: error: %s\n' "$1" >&2
    exit 1
}

compiler=$(command -v cc || command -v gcc) || die 'there is no C compiler'
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
apt=(-o APT::Sandbox::User=root) # not _apt, which may not write here

# fetch VERSION SHA256 FILE: downloads a source; apt verifies the checksum.
fetch() {
    local mirror
    for mirror in $mirrors; do
        /usr/lib/apt/apt-helper "${apt[@]}" download-file "$mirror/pool/main/b/bubblewrap/bubblewrap_$1.orig.tar.xz" "$3" "SHA256:$2" >"$cache/log" 2>&1 && return
    done
    cat "$cache/log" >&2
    return 1
}

# capabilities: downloads libcap, which bwrap needs, with its header.
capabilities() {
    local into=$cache/libcap update=(apt-get --quiet update)
    [ ! -d "$into" ] || return 0
    rm -rf "$into.new"
    mkdir "$into.new"
    [ "$(id -u)" = 0 ] || update=(sudo "${update[@]}")
    (
        cd "$into.new"
        apt-get "${apt[@]}" --quiet download libcap-dev || { "${update[@]}" && apt-get "${apt[@]}" --quiet download libcap-dev; }
        dpkg-deb --extract ./*.deb .
    ) >&2 || { echo 'bwraps: cannot download libcap-dev' >&2 && return 1; }
    mv "$into.new" "$into"
}

# build VERSION SHA256: builds without meson, which older versions do not support.
build() {
    local new=$cache/$1.new source=$cache/$1.new/bubblewrap-$1
    rm -rf "$new"
    mkdir "$new"
    fetch "$1" "$2" "$new/source.tar.xz" &&
        python3 -m tarfile -e "$new/source.tar.xz" "$new" &&
        printf '#define PACKAGE_STRING "bubblewrap %s"\n' "$1" >"$source/config.h" &&
        "$compiler" -O2 -w -D_GNU_SOURCE -include "$source/config.h" -I"$cache/libcap/usr/include" \
            -o "$new/bwrap" "$source"/*.c "$cache"/libcap/usr/lib/*/libcap.a &&
        rm -r "$source" "$new/source.tar.xz" &&
        mv "$new" "$cache/$1"
}

missing=
while read -r version sum; do
    [ -n "$version" ] || continue
    if [ -d "$cache/$version" ] || { capabilities && build "$version" "$sum" >&2; }; then
        echo "$version"
    else
        missing+=" $version"
    fi
done <<<"$versions"
[ -z "$missing" ] || die "these cannot be built here:$missing"
