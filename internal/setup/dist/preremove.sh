#!/bin/sh
# Before the package is removed; dpkg says remove, rpm how many are left. At an upgrade the
# server stays: it is the old program until it is restarted.
case ${1-} in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
    systemctl disable --now --quiet sbxrund.socket sbxrund.service || :
fi
profile=/etc/apparmor.d/sbxrun-bwrap
if cmp -s /usr/share/sbxrun/sbxrun-bwrap $profile; then # not another's, and not changed
    ! aa-enabled --quiet 2>/dev/null || apparmor_parser --remove $profile || :
    rm $profile
fi
