#!/bin/bash
# Tests the files that make.sh makes: they are reproducible, go install has a version, and each package can be
# installed, used and removed. The last part runs as root, in a mount namespace with an overlay over this machine's /,
# so that the machine does not change.
#
# usage: test.sh    on Debian or Ubuntu, as root or where sudo asks nothing
set -euo pipefail
shopt -s nullglob

say() { printf 'dist: %s\n' "$*"; }
die() {
    printf 'dist: error: %s\n' "$*" >&2
    exit 1
}

# outside runs the parts that need the sources and Go, but no privileges.
outside() {
    cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
    work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-packages.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    chmod 755 "$work"
    version=$(git describe --tags --always --dirty)
    number=$(sed -n 's/^const Number = "\(.*\)"$/\1/p' internal/version/version.go)

    ./setup.sh dist "$work/packages" >/dev/null
    (cd "$work/packages" && sha256sum --check --quiet SHA256SUMS)

    say 'once more, in another directory, and without git'
    mkdir -p "$work/another/place"
    tar -c --exclude=./.git --exclude=./bin . | tar -x -C "$work/another/place"
    date=$(git log -1 --format=%ct)
    (umask 077 && cd "$work/another/place" && TZ=Asia/Tokyo SBXRUN_VERSION=$version SOURCE_DATE_EPOCH=$date ./setup.sh dist "$work/again" >/dev/null)
    diff "$work/packages/SHA256SUMS" "$work/again/SHA256SUMS" || die 'the files differ'
    # Compile again, without the cache.
    (cd "$work/another/place" && GOCACHE=$work/cache SBXRUN_VERSION=$version internal/setup/build.sh "$work/compiled")

    for arch in amd64 arm64; do
        mkdir "$work/$arch"
        tar -x -z -C "$work/$arch" --strip-components=1 -f "$work/packages"/*-linux-$arch.tar.gz
        for program in "$work/$arch/bin"/*; do
            sbom=("$work/packages/${program##*/}"-*-linux-$arch.cdx.json)
            go version -m "$program" | awk '$1 == "dep" { gsub("[+]", "%2B"); print "pkg:golang/" $2 "@" $3 }' | sort >"$work/recorded"
            [ -s "$work/recorded" ] || die "$program has no list of modules"
            sed -n 's/^      "purl": "\(.*\)".*/\1/p' "$sbom" | grep -v '/std@\|/sbxrun@' | sort | diff "$work/recorded" - || die "$sbom lacks modules"
        done
    done

    diff --recursive "$work/$(go env GOARCH)/bin" "$work/compiled" || die 'the programs differ'

    say 'go install'
    # A module proxy with a single release, this one.
    release=v$number proxy=$work/proxy/github.com/sbxrun/sbxrun/@v
    mkdir -p "$proxy" "$work/module/github.com/sbxrun"
    cp -r "$work/another/place" "$work/module/github.com/sbxrun/sbxrun@$release"
    # Without nested modules.
    find "$work/module/github.com/sbxrun/sbxrun@$release" -mindepth 2 -name go.mod -printf '%h\n' | xargs -r rm -r
    # Only files, because the go command rejects directories.
    (cd "$work/module" && find github.com -type f | python3 -c 'import sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as z:
    for name in sys.stdin.read().splitlines():
        z.write(name)' "$proxy/$release.zip")
    cp go.mod "$proxy/$release.mod"
    echo "$release" >"$proxy/list"
    printf '{"Version": "%s"}\n' "$release" >"$proxy/$release.info"
    downloaded=$(go env GOMODCACHE)/cache/download
    GOBIN=$work/installed GOMODCACHE=$work/modules GOFLAGS=-modcacherw CGO_ENABLED=0 GOSUMDB=off \
        GOPROXY="file://$work/proxy,file://$downloaded" \
        go install github.com/sbxrun/sbxrun/cmd/sbxrun@latest 2>"$work/log" || { cat "$work/log" >&2 && die 'go install fails'; }
    [ "$("$work/installed/sbxrun" --version)" = "sbxrun $number" ] || die "$("$work/installed/sbxrun" --version)"

    cp internal/setup/dist/{test,smoke}.sh "$work"
    case $version in
    v"$number") echo "$number" ;;
    *) echo "$number+${version#v"$number"-}" ;;
    esac >"$work/version"
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo -n)
    "${as_root[@]}" unshare --mount --propagation private bash "$work/test.sh" overlay "$work"
}

# overlay makes the root to install in, and enters it. It does not use chroot(1), in which no user namespace can be
# created.
overlay() {
    mount -t tmpfs -o mode=755 tmpfs /mnt
    mkdir /mnt/{upper,work,root,run}
    mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
    for dir in proc sys dev; do mount --rbind /$dir /mnt/root/$dir; done
    mount -t tmpfs -o mode=755 tmpfs /mnt/root/run
    mount -t tmpfs -o mode=1777 tmpfs /mnt/root/tmp
    # For apt: the file may be a link to /run.
    cat /etc/resolv.conf >/mnt/run/resolv.conf
    rm -f /mnt/root/etc/resolv.conf
    cp /mnt/run/resolv.conf /mnt/root/etc/resolv.conf
    mkdir -p /mnt/root/tests # a machine may have one
    mount --bind "$1" /mnt/root/tests
    cd /mnt/root
    pivot_root . mnt
    cd /
    umount --lazy /mnt
    exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive bash /tests/test.sh installed
}

# quietly COMMAND...: shows the output only if the command fails, because Debian's rpm prints warnings about itself.
quietly() {
    "$@" >/tmp/log 2>&1 || { cat /tmp/log >&2 && die "$*"; }
}

# apt NAME...: installs packages. If that fails, it fetches the package lists first.
apt() {
    local install=(apt-get --yes --no-install-recommends install "$@")
    "${install[@]}" >/dev/null 2>&1 || { quietly apt-get update && quietly "${install[@]}"; }
}

# smoke DIR: tries the sbxrun there, as root and as an ordinary user.
smoke() {
    [ "$("$1/sbxrun" --version)" = "sbxrun $(cat version)" ] || die "$1/sbxrun: $("$1/sbxrun" --version)"
    PATH=$1:$PATH bash smoke.sh
    PATH=$1:$PATH setpriv --reuid 61000 --regid 61000 --clear-groups env HOME=/tmp bash smoke.sh
}

# everyday tries what a new user does first: three programs that write files, as root and as an ordinary user. If
# root's file system cannot be idmapped, the error must name a remedy.
everyday() {
    for uid in 0 61000; do
        place=/tmp/everyday-$uid
        mkdir $place
        echo 'open("squares", "w").write("".join(f"{n * n}\n" for n in range(4)))' >$place/job.py
        chown -R $uid:$uid $place
        (
            cd $place
            as=(setpriv --reuid $uid --regid $uid --clear-groups env HOME=/home sbxrun --timeout 60)
            if [ $uid = 0 ] && ! "${as[@]}" -w true 2>/tmp/log; then
                grep -q 'idmapped.*; ' /tmp/log || die "root cannot write, and no remedy is named: $(cat /tmp/log)"
                exit 0
            fi
            "${as[@]}" -w python3 job.py
            "${as[@]}" -w tar -czf squares.tar.gz squares
            "${as[@]}" -w git -c init.defaultBranch=main init --quiet repository
            [ "$(tr '\n' ' ' <squares)" = '0 1 4 9 ' ] || die "python3 has written $(cat squares)"
            [ "$(tar -tzf squares.tar.gz)" = squares ] || die 'tar has not written its archive'
            [ -e repository/.git/HEAD ] || die 'git has made no repository'
            [ -z "$(find . ! -uid $uid)" ] || die "not all files are uid $uid's: $(find . ! -uid $uid -ls)"
        )
    done
}

# parsed PROFILE: checks that AppArmor 4 can parse it. Debian 12 has version 3, so there it uses Debian 13's parser,
# with its C library, if an archive has it.
parsed() {
    local at parser options archive libraries
    apt apparmor
    parser=(apparmor_parser)
    if [ ! -e /etc/apparmor.d/abi/4.0 ]; then
        at=/tmp/trixie
        mkdir -p $at/lists/partial $at/archives/partial $at/root
        # shellcheck disable=SC2016 # for apt
        apt-get indextargets --format 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(REPO_URI) trixie main' "Codename: $(. /etc/os-release && echo "$VERSION_CODENAME")" | sort -u >$at/list
        options=(-o "Dir::Etc::sourcelist=$at/list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$at/lists" -o "Dir::Cache=$at" -o APT::Sandbox::User=root -o Acquire::Languages=none)
        if ! (cd $at && apt-get "${options[@]}" update && apt-get "${options[@]}" download apparmor libc6 libstdc++6 libgcc-s1) >/tmp/log 2>&1; then
            say "not parsed: $1, because no archive here has AppArmor 4" # versions of bubblewrap may be missing, too
            return
        fi
        for archive in $at/*.deb; do dpkg-deb --extract "$archive" $at/root; done
        libraries=($at/root/usr/lib/*-linux-gnu)
        parser=("$(echo "${libraries[0]}"/ld-linux-*)" --library-path "${libraries[0]}" "$(find $at/root -name apparmor_parser -type f)" --base $at/root/etc/apparmor.d)
    fi
    quietly "${parser[@]}" --skip-kernel-load --skip-cache "$1"
}

# leftovers DIR...
leftovers() { find "$@" -xdev -name '*sbxrun*'; }

installed() {
    cd /tests
    machine=$(dpkg --print-architecture)
    before=$(leftovers /usr /etc)
    [ -z "$before" ] || die "sbxrun is installed here already: $before"

    say 'deb'
    deb=(packages/*_"$machine".deb)
    quietly apt-get --yes remove bubblewrap
    if dpkg --install "$deb" >/tmp/log 2>&1 || ! grep -q 'depends on bubblewrap' /tmp/log; then
        cat /tmp/log
        die 'it is installed without bubblewrap'
    fi
    quietly dpkg --purge sbxrun
    apt git
    SECONDS=0
    apt "./$deb"
    [ "$(sbxrun --timeout 60 echo first)" = first ] || die 'it runs nothing'
    [ $SECONDS -lt 60 ] || die "the first result came $SECONDS s after the installation began"
    say "deb: the first result after $SECONDS s"
    [ "$(dpkg-query --show --showformat '${Status}' sbxrun bubblewrap)" = 'install ok installedinstall ok installed' ] || die 'apt has not installed both'
    [ -z "$(dpkg --verify sbxrun)" ] || die "$(dpkg --verify sbxrun)"
    smoke /usr/bin
    everyday
    apt systemd
    systemd-analyze verify /usr/lib/systemd/system/sbxrund.{socket,service} 2>&1 |
        grep -v "'DelegateSubgroup'" >/tmp/log && die "$(cat /tmp/log)" # systemd 252 does not support it
    sbxrun serve --check-config --config /etc/sbxrun/serve.toml --listen unix:/run/sbxrund.sock >/dev/null
    # systemd creates the socket's directory, open to others. The directory of root's sandboxes must not be that one.
    mkdir -p -m 755 "$(dirname "$(sed -n 's/^ListenStream=//p' /usr/lib/systemd/system/sbxrund.socket)")"
    sbxrun ps >/dev/null
    systemd-sysusers /usr/lib/sysusers.d/sbxrun.conf
    getent passwd sbxrun >/dev/null || die 'the server has no user'
    parsed /usr/share/sbxrun/sbxrun-bwrap
    profile=/etc/apparmor.d/sbxrun-bwrap
    [ ! -e $profile ] || [ -e /etc/apparmor.d/abi/4.0 ] || die "$profile, which this AppArmor cannot read"
    rm -f $profile /etc/apparmor.d/bwrap-userns-restrict
    mkdir -p /etc/apparmor.d/abi
    : >/etc/apparmor.d/abi/4.0
    quietly dpkg --install "$deb"
    cmp $profile /usr/share/sbxrun/sbxrun-bwrap || die 'no profile for AppArmor 4'
    quietly dpkg --purge sbxrun
    [ -z "$(leftovers /usr /etc)" ] || die "purged, but there are $(leftovers /usr /etc)"

    say 'rpm'
    apt rpm
    package=(packages/*."$(uname -m)".rpm)
    # Install it here, to run its scripts. Debian's bubblewrap is not in rpm's database.
    here=(rpm --force-debian --nodeps)
    rm -f $profile
    quietly "${here[@]}" --install "$PWD/$package"
    cmp $profile /usr/share/sbxrun/sbxrun-bwrap || die 'the rpm brings no profile for AppArmor 4'
    smoke /usr/bin
    quietly "${here[@]}" --upgrade --replacepkgs "$PWD/$package"
    [ -e $profile ] || die 'an upgrade of the rpm removes the profile'
    quietly "${here[@]}" --erase sbxrun
    [ -z "$(leftovers /usr /etc)" ] || die "erased, but there are $(leftovers /usr /etc)"

    root=/tmp/rpm # only this package's files
    mkdir -p $root
    if rpm --root $root --install "$PWD/$package" >/tmp/log 2>&1 || [ "$(grep -c 'is needed by' /tmp/log)" != 1 ] || ! grep -q 'bubblewrap >= .* is needed by' /tmp/log; then
        cat /tmp/log
        die 'it needs something other than bubblewrap'
    fi
    quietly rpm --root $root --install --nodeps --noscripts "$PWD/$package"
    quietly rpm --root $root --verify --nodeps sbxrun
    smoke $root/usr/bin

    say 'apk, archive and deb: the same files'
    mkdir /tmp/{apk,deb,archive}
    # Debian has no apk-tools. An apk consists of concatenated archives.
    apk=(packages/*_"$(uname -m)".apk)
    tar -x -z --ignore-zeros --warning=no-unknown-keyword -C /tmp/apk -f "$apk"
    grep -q '^depend = bubblewrap>=' /tmp/apk/.PKGINFO || die 'the apk does not need bubblewrap'
    rm /tmp/apk/.PKGINFO
    tar -x -z --strip-components=1 -C /tmp/archive -f packages/*-linux-"$machine".tar.gz
    dpkg-deb --extract "$deb" /tmp/deb
    mv /tmp/deb/usr/share/zsh/{vendor-completions,site-functions}
    list() { (cd "$1" && find . -type f -printf '%M %U:%G %P %T@\n' | sort); }
    rm -r /tmp/archive/share/doc/sbxrun/examples # the packages have it in /etc
    unit=/tmp/archive/lib/systemd/system/sbxrund.service
    grep -q '^ExecStart=/usr/local/bin/sbxrun ' $unit || die 'the unit of the archive starts another program'
    sed -i 's|=/usr/local/bin/|=/usr/bin/|' $unit
    touch -r /tmp/archive/bin/sbxrun $unit
    for other in apk/usr deb/usr archive; do
        diff --recursive --no-dereference $root/usr /tmp/$other || die "rpm and $other differ"
        diff <(list $root/usr) <(list /tmp/$other) || die "rpm and $other differ in modes, owners or times"
    done
    smoke /tmp/archive/bin

    quietly rpm --root $root --erase --nodeps --noscripts sbxrun
    [ -z "$(leftovers $root/usr)" ] || die "erased, but there are $(leftovers $root/usr)"
    say 'all packages were installed, tried and removed'
}

case ${1-} in
'') outside ;;
overlay | installed) "$@" ;;
*) die 'usage: test.sh' ;;
esac
