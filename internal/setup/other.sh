# shellcheck shell=sh
# Sets up the other user for as.sh: root, or an unused UID. To be sourced, in the source tree
# $root, with a directory $work that everybody can enter. SBXRUN_TEST_AS stays empty if there
# is no other user.
export SBXRUN_TEST_AS=
: "${root:?}" "${work:?}" # otherwise chown below would change /home and /tmp
if [ "$(id -u)" = 0 ]; then
    # It needs a copy that it can read, because the checkout may be below /root.
    SBXRUN_TEST_AS=61000
    while getent passwd "$SBXRUN_TEST_AS" >/dev/null; do SBXRUN_TEST_AS=$((SBXRUN_TEST_AS + 1)); done
    mkdir "$work/tree" "$work/home" "$work/tmp"
    tar -c --exclude=./.git . | tar -x -C "$work/tree" --no-same-owner
    chmod -R a+rX "$work/tree"
    chown "$SBXRUN_TEST_AS:$SBXRUN_TEST_AS" "$work/home" "$work/tmp"
    export SBXRUN_TEST_ROOT="$root" SBXRUN_TEST_COPY="$work/tree"
elif sudo -n true 2>/dev/null; then
    SBXRUN_TEST_AS=0
fi
