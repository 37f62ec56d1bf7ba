#!/bin/sh
# Builds the helper for both architectures, with Debian's gcc and gcc-aarch64-linux-gnu. The results are committed, so that
# go build needs no C compiler; `setup.sh check` builds them again and compares.
set -eu
cd "$(dirname "$0")"
out=${1:-..}
flags='-std=gnu11 -Os -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-pie -fno-stack-protector
	-fno-asynchronous-unwind-tables -fno-unwind-tables -fno-ident -fomit-frame-pointer -ffunction-sections -fdata-sections'
link='-nostdlib -static -no-pie -Wl,--build-id=none,--gc-sections,-z,noexecstack,-z,noseparate-code,-z,norelro,--strip-all'
build() { # COMPILER PAGE-SIZE ARCHITECTURE
	"$1" $flags $link -Wl,-z,max-page-size="$2" arch.c main.c script.c keeper.c enter.c init.c -o "$out/helper_$3"
	"$1" $flags $link -Wl,-z,max-page-size="$2" arch.c hold.c -o "$out/hold_$3"
}
mkdir -p "$out"
out=$(cd "$out" && pwd)
build x86_64-linux-gnu-gcc 4096 amd64
build aarch64-linux-gnu-gcc 65536 arm64
cd "$out"
chmod 644 helper_* hold_*
sha256sum helper_amd64 helper_arm64 hold_amd64 hold_arm64 >SHA256SUMS
