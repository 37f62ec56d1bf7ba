#!/bin/sh
# Installs, builds and tests sbxrun, for README, Taskfile.yml and CI.
#
# usage: ./setup.sh COMMAND [ARG...]
#
#   demo          install what is missing, build, and show the main purpose
#   test          install what is missing, build, and run the tests as the current user
#   check         run what CI runs in addition to test: lint, man pages, completions, the other
#                 user, and slow tests
#   nightly       run what takes too long for CI: other versions of bubblewrap, packages, a
#                 virtual machine, 10,000 random signals, fuzzing
#
#   install       install what is missing, with the distribution's package manager
#   build         build bin/sbxrun and bin/sbxrund
#   lint          run gofmt, go vet and staticcheck
#   man           make the man pages, below bin/share/man/man1
#   reference     make docs/reference/commands.md
#   completions   make the completions for bash, zsh and fish, below bin/share/completions
#   dist [DIR]    make archives and packages, in bin/dist
#   fuzz [COUNT]  give every fuzz target COUNT inputs (50000x)
#   test-vm       run the tests in a machine with cgroup v2 alone (ARG: tests/README.md)
#   bwraps        build older and newer versions of bubblewrap, and run tests with each (ARG: tests/README.md)
#   test-arm64    try the package for arm64 in an emulated machine
#   bench         measure against plain bwrap, a bare kill and an older build (ARG: tests/README.md)
#   bench-cluster measure what NATS and a gateway cost (ARG: tests/README.md)
#   bench-vm      measure what limits cost in a machine with cgroup v2 alone
set -eu
command=${1-}
[ $# = 0 ] || shift
case $command:${1-} in
dist:[!/]* | man:[!/]* | completions:[!/]*) # relative to the caller's directory
    dir=$PWD/$1
    shift
    set -- "$dir" "$@"
    ;;
esac
cd "$(dirname "$0")"
setup=internal/setup

case $command in
demo)
    "$setup/ready.sh"
    "$setup/install.sh"
    "$setup/build.sh" bin sbxrun # the server takes twice as long, because it has many modules
    exec "$setup/demo.sh"
    ;;
test | check | nightly)
    "$setup/ready.sh"
    case $command in
    test) "$setup/install.sh" --test ;;
    *) "$setup/install.sh" --check ;;
    esac
    "$setup/build.sh"
    exec "$setup/$command.sh"
    ;;
install | build | lint | fuzz) exec "$setup/$command.sh" "$@" ;;
man) exec go run ./internal/clidoc . man "${1:-bin/share/man/man1}" ;;
reference) exec go run ./internal/clidoc . reference "${1:-docs/reference}" ;;
completions)
    dir=${1:-bin/share/completions}
    mkdir -p "$dir"
    exec cp internal/clidoc/completions/* "$dir"
    ;;
test-arm64) exec "$setup/dist/arm64.sh" ;;
dist) exec "$setup/dist/make.sh" "$@" ;;
bwraps)
    "$setup/build.sh"
    exec "$setup/bwraps/test.sh" "$@"
    ;;
test-vm | bench-vm)
    "$setup/build.sh"
    command=${command%-vm}
    exec "$setup/vm/$command.sh" "$@"
    ;;
bench)
    "$setup/build.sh"
    CGO_ENABLED=0 go build -C tests/bench -o ../../bin/ . ./around
    exec bin/bench "$@"
    ;;
bench-cluster)
    "$setup/build.sh"
    CGO_ENABLED=0 go build -C tests/cluster -o ../../bin/bench-cluster ./bench
    exec bin/bench-cluster "$@"
    ;;
*)
    sed -n '/^# usage/,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
