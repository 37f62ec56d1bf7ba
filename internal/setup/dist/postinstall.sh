#!/bin/sh
# Runs after the package is installed or upgraded. Missing programs are skipped.
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers /usr/lib/sysusers.d/sbxrun.conf || :
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
# Ubuntu 24.04 allows user namespaces only to programs with a profile. AppArmor before 4 could not parse the profile,
# and two profiles for one program are worse than none.
profiles=/etc/apparmor.d
if [ -e $profiles/abi/4.0 ] && [ ! -e $profiles/bwrap-userns-restrict ] &&
    ! grep -Eqs '^([^#]*[[:space:]])?"?/(usr/)?bin/bwrap"?[[:space:]]([^#]*[[:space:]])?\{' $profiles/*; then
    cp /usr/share/sbxrun/sbxrun-bwrap $profiles
    ! aa-enabled --quiet 2>/dev/null || apparmor_parser --replace --write-cache $profiles/sbxrun-bwrap || :
fi
