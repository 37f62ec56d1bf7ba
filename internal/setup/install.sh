#!/bin/sh
# Installs what sbxrun, its fixtures and its tests need and this machine lacks.
#
# usage: install.sh [--dry-run] [--test | --check]
#
#   --dry-run   only print the commands that would be run
#   --test      also what test.sh needs
#   --check     also what check.sh needs: shells to test completions, tools to build packages
#               of the clients, and on Debian a browser and the compilers of the helper
#
# It looks for programs in /usr/bin and similar directories, as sbxrun and the fixtures do,
# and not in PATH: a python3 in a home directory is not visible in the sandbox. The tests set
# SETUP_ROOT to another root directory.
set -eu

root=${SETUP_ROOT:-}
dry=
tests=
debian_tests=
for flag; do
    case $flag in
    --dry-run) dry=1 ;;
    --test) tests='curl npm' ;;
    --check) tests='curl npm pip3 zsh fish bash-completion' debian_tests='chromium-headless-shell gcc aarch64-linux-gnu-gcc' ;;
    *) echo "usage: install.sh [--dry-run] [--test | --check]" >&2; exit 2 ;;
    esac
done

die() {
    echo "setup: error: $1" >&2
    [ $# -lt 2 ] || echo "setup: hint: $2" >&2
    exit 1
}

# has NAME: whether a program of the system, or the file bash-completion, exists. An applet
# of busybox does not count, because its setpriv and unshare lack most options.
has() {
    if [ "$1" = bash-completion ]; then
        [ -e "$root/usr/share/$1/bash_completion" ]
        return
    fi
    for dir in /usr/bin /bin /usr/sbin /sbin; do
        if [ -x "$root$dir/$1" ]; then
            case $(readlink -f "$root$dir/$1") in
            */busybox) ;;
            *) return 0 ;;
            esac
        fi
    done
    return 1
}

# Prints the distribution, or the one that it is based on.
family() {
    [ -r "$root/etc/os-release" ] || return 0
    ids=$(. "$root/etc/os-release" && echo "${ID-} ${ID_LIKE-}")
    for id in $ids; do
        case $id in
        debian | ubuntu) echo debian; return ;;
        fedora | rhel) echo fedora; return ;;
        alpine) echo alpine; return ;;
        esac
    done
}

# package PROGRAM: prints the package that contains it.
package() {
    case $family/$1 in
    */bwrap) echo bubblewrap ;;
    */python3) echo python3 ;;
    */node) echo nodejs ;;
    */bash) echo bash ;;
    */gcc) echo gcc libc6-dev ;;
    */aarch64-linux-gnu-gcc) echo gcc-aarch64-linux-gnu libc6-dev-arm64-cross ;;
    */jq | */curl | */zsh | */fish | */bash-completion | */chromium-headless-shell) echo "$1" ;;
    fedora/npm) echo nodejs-npm ;;
    */npm) echo npm ;;
    alpine/pip3) echo py3-pip py3-setuptools py3-wheel ;;
    */pip3) echo python3-pip python3-setuptools python3-wheel ;; # to build without an index
    fedora/pgrep) echo procps-ng ;;
    */pgrep) echo procps ;;
    alpine/setpriv) echo setpriv ;;
    */setpriv | */unshare | */setsid) echo util-linux ;;
    esac
}

run() {
    echo "setup: $*"
    [ -n "$dry" ] || "$@"
}

family=$(family)
# The headless browser is a package of Debian 12 and later. Elsewhere its tests are skipped.
if [ -n "$debian_tests" ] && grep -q '^ID=debian$' "$root/etc/os-release" 2>/dev/null && ! grep -q '^VERSION_ID="\(9\|10\|11\)"' "$root/etc/os-release"; then
    tests="$tests $debian_tests"
fi
missing=
for program in bwrap python3 node bash setpriv unshare setsid jq pgrep $tests; do
    has "$program" && continue
    name=$(package "$program")
    case " $missing " in
    *" $name "*) ;;
    *) missing="$missing $name" ;;
    esac
done
missing=${missing# }
if [ -z "$missing" ]; then
    echo "setup: nothing is missing"
    exit 0
fi

case $family in
debian) manager=apt-get ;;
fedora) manager=dnf ;;
alpine) manager=apk ;;
*) die "this distribution is none of Debian, Ubuntu, Fedora and Alpine, nor made from one" \
    "install with its package manager: $missing" ;;
esac
command -v "$manager" >/dev/null || die "no $manager here" "install: $missing"

as_root=
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null; then
        as_root=sudo
    elif command -v doas >/dev/null; then
        as_root=doas
    else
        die "only root can install packages, and neither sudo nor doas is here" "as root, let $manager install: $missing"
    fi
fi

# $missing, $as_root: package names and at most one word, split on purpose.
case $family in
debian)
    # Fresh machines have no package lists, and old lists name packages that are gone. So fetch the lists if there are
    # none, or if the installation fails.
    set -- $as_root env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $missing
    if ! ls "$root"/var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then
        run $as_root apt-get update
        run "$@"
    elif ! run "$@"; then
        run $as_root apt-get update
        run "$@"
    fi
    ;;
fedora) run $as_root dnf install --assumeyes --setopt=install_weak_deps=False $missing ;;
alpine) run $as_root apk add --no-cache $missing ;;
esac
