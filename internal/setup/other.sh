# shellcheck shell=sh
# Sets up the other user, whom as.sh runs tests as: root, or one that nobody has. To be
# sourced, in the source tree $root, with a directory $work that everybody can enter.
# SBXRUN_TEST_AS stays empty if there is none.
export SBXRUN_TEST_AS=
: "${root:?}" "${work:?}" # the caller's: without, it would be /tmp and /home that are given away below
if [ "$(id -u)" = 0 ]; then
    # With a copy that it can read: a checkout may be below /root.
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
