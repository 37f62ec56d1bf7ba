#!/bin/bash
# Runs the benchmark in a machine with only cgroup v2. The machine is emulated, so only the ratios are meaningful.
#
# usage: bench.sh [OPTION...] [-- BENCHMARK-OPTION...]    options of run.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."

options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
shift || :

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
chmod 755 "$work"
cp bin/sbxrun "$work"
CGO_ENABLED=0 go build -C tests/bench -o "$work/bench" .
[ $# -gt 0 ] || set -- --only limits -n 15
printf '%q ' "$@" >"$work/words"
# shellcheck disable=SC2016 # expanded inside the machine
"$here/run.sh" --timeout 600 "${options[@]}" --share "$work" -- \
    'cp /share/sbxrun /share/bench /tmp && eval "exec /tmp/bench --sbxrun /tmp/sbxrun $(cat /share/words)"'
