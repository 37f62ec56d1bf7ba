#!/bin/sh
# Shows the main purpose: runs three process trees that survive kill(1) and timeout(1)
# under bin/sbxrun with a deadline of one second, and prints the reports.
set -eu
cd "$(dirname "$0")/../.."

# Root's sandboxes run as uid 65534, which can enter a closed checkout only with -w.
write=
[ "$(id -u)" != 0 ] || [ -n "$(find . -maxdepth 0 -perm -005)" ] || write='-w '

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

failed=0
for tree in tree-sleep tree-python tree-node; do
    echo
    echo "\$ sbxrun --timeout 1 $write--report report.json fixtures/$tree"
    report=$work/$tree.json
    code=0
    bin/sbxrun --timeout 1 $write--report "$report" "fixtures/$tree" || code=$?
    sed -n '/^# Does:/,/^# Beats:/{/^# Beats:/d;s/^# Does://;s/^# *//;s/^ */  /;p;}' "fixtures/$tree"
    echo "  exit code $code; of the report:"
    for member in cause timed_out exit_code duration_ms teardown_ms teardown; do
        grep -o "\"$member\":\({[^}]*}\|[^,}]*\)" "$report" | sed 's/^/    /'
    done
    if [ "$code" != 124 ] || ! grep -q '"verdict":"proven"' "$report"; then
        echo "  want exit code 124 and verdict proven"
        cat "$report"
        failed=1
    fi
done
[ "$failed" = 0 ] || exit 1
echo
echo "It works here. Next:  export PATH=\"$PWD/bin:\$PATH\"; sbxrun --timeout 5 COMMAND"
echo "The server, sbxrun serve, is built by  ./setup.sh build"
