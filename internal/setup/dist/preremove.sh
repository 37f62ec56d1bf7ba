#!/bin/sh
# Runs before the package is removed: dpkg passes "remove", rpm the number of remaining versions. During an upgrade
# the server keeps running the old program until it is restarted.
case ${1-} in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
    systemctl disable --now --quiet sbxrund.socket sbxrund.service || :
fi
profile=/etc/apparmor.d/sbxrun-bwrap
if cmp -s /usr/share/sbxrun/sbxrun-bwrap $profile; then # installed by this package, and unchanged
    ! aa-enabled --quiet 2>/dev/null || apparmor_parser --remove $profile || :
    rm $profile
fi
