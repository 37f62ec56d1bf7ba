#!/bin/bash
# Runs the test suites of other projects in a sandbox and outside, with the recipes of docs/guides/cookbook.md, and
# compares the result of each test. Started by root, it runs them as an ordinary user, and in a sandbox that root starts
# in the user's directories. The sources come from the Go module proxy, npm and Debian.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$PWD/bin
work=$(mktemp -d "${TMPDIR:-/tmp}/sbxrun-projects.XXXXXX")
trap 'chmod -R u+w "$work" && rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
mkdir "$work/bin" "$work/home" "$work/sources"
cp "$bin/sbxrun" "$work/bin"
user=() status=0
places='outside inside'
if [ "$(id -u)" = 0 ]; then
    user=(setpriv --reuid 61000 --regid 61000 --clear-groups)
    chown 61000:61000 "$work/home"
    places='outside inside root'
fi
goproxy=$(go env GOPROXY)
goroot=$(go env GOROOT)
environment=(env -i PATH="$work/bin:$goroot/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" HOME="$work/home" LANG=C.UTF-8 TMPDIR=/tmp GOPROXY="$goproxy" GOTOOLCHAIN=local SBXRUN_STATE_DIR="$work/home/state")

# module PATH@VERSION: downloads the source of a Go module.
module() {
    local dir
    dir=$(GOFLAGS=-modcacherw go mod download -json "$1" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    cp -r "$dir" "$work/sources/${dir##*/}"
    chmod -R u+w "$work/sources/${dir##*/}"
    source=$work/sources/${dir##*/}
}

# package NAME@VERSION: downloads a package of npm.
package() {
    source=$work/sources/$1
    mkdir -p "$source"
    (cd "$source" && npm pack --silent "$1" >/dev/null && tar -xz --strip-components 1 -f ./*.tgz && rm ./*.tgz)
}

# debian NAME: downloads and unpacks a source package of Debian.
debian() {
    local apt=(-o Dir::Etc::sourcelist="$work/apt/list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt" -o APT::Sandbox::User=root)
    if [ ! -e "$work/apt/list" ]; then
        mkdir -p "$work/apt/lists/partial" "$work/apt/archives/partial"
        echo 'deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main' >"$work/apt/list"
        apt-get "${apt[@]}" -qq update
    fi
    mkdir "$work/sources/$1"
    (cd "$work/sources/$1" && apt-get "${apt[@]}" -qq source --download-only "$1" && tar -x --strip-components 1 -f "$(find . -name '*.orig.tar.*' ! -name '*.asc')") >/dev/null
    source=$work/sources/$1
}

# suite FLAGS COMMAND: runs COMMAND in copies of the source: outside, in a sandbox with these flags, and in one that root
# starts. It prints the number of tests.
suite() {
    local name=${source##*/} place dir before code
    for place in $places; do
        dir=$work/home/$place/$name
        mkdir -p "${dir%/*}"
        cp -a "$source" "$dir"
        [ ${#user[@]} = 0 ] || chown -R 61000:61000 "$work/home"
        case $place in
        outside) before=("${user[@]}" "${environment[@]}" timeout 900) ;;
        inside) before=("${user[@]}" "${environment[@]}" sbxrun --timeout 900) ;;
        root) before=("${environment[@]}" SBXRUN_STATE_DIR="$work/state" sbxrun --timeout 900) ;;
        esac
        # shellcheck disable=SC2206 # a list of words
        [ "$place" = outside ] || before+=($1)
        code=0
        (cd "$dir" && exec "${before[@]}" sh -c "$2") >"$work/output" 2>&1 </dev/null || code=$?
        {
            grep -aE '^[[:space:]]*(--- |ok|not ok|PASS|FAIL|XFAIL|SKIP|\*\*\*|# (tests|pass|fail))' "$work/output" | sed -E 's/\(?[0-9.]+ ?m?s\)?//g; s/(ok +[0-9]+).*time=.*/\1/' | sort
            echo "exit code $code"
        } >"$work/$place" || :
        if [ "$place" = outside ]; then
            [ "$(wc -l <"$work/outside")" -gt 1 ] || { tail -n 30 "$work/output" && status=1; }
            printf 'projects: %s: %d results, exit code %d\n' "$name" "$(($(wc -l <"$work/outside") - 1))" "$code"
        elif ! diff "$work/outside" "$work/$place" >"$work/diff"; then
            printf 'projects: FAILED: %s differs (< outside, > %s)\n' "$name" "$place"
            head -n 40 "$work/diff"
            grep -aE -A 20 '^ *--- FAIL|^not ok|^panic|sbxrun: ' "$work/output" | head -n 60 || :
            status=1
        fi
    done
}

for path in golang.org/x/sys@v0.50.0 github.com/creack/pty@v1.1.24 github.com/fsnotify/fsnotify@v1.10.1 github.com/gorilla/websocket@v1.5.3; do
    module "$path"
    # shellcheck disable=SC2016 # for the other shell
    suite "-w --net host --env GOPROXY --env GOMODCACHE=./.modcache --tools" 'export GOMODCACHE=$PWD/.modcache GOFLAGS=-modcacherw; go mod download && go test -count=1 -skip "^TestOpenat2\$" -v ./...' # openat2(2) is refused
done
package minimist@1.2.8
suite "-w --net host" 'npm install --silent --no-audit --no-fund --no-save --ignore-scripts tape@5 >/dev/null 2>&1; npx tape "test/*.js"'
debian zlib
suite "-w" './configure >/dev/null && make -j4 >/dev/null && make check'
exit $status
