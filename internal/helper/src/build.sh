#!/bin/sh
# Builds the helper for both architectures, with Debian's gcc and gcc-aarch64-linux-gnu. The results are committed, so that
# go build needs no C compiler; `setup.sh check` builds them again and compares.
set -eu
cd "$(dirname "$0")"
out=${1:-..}
flags='-std=gnu11 -Os -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-pie -fno-stack-protector
	-fno-asynchronous-unwind-tables -fno-unwind-tables -fno-ident -fomit-frame-pointer -ffunction-sections -fdata-sections'
link='-nostdlib -static -no-pie -Wl,--build-id=none,--gc-sections,-z,noexecstack,-z,noseparate-code,-z,norelro,--strip-all'
sources='arch.c main.c script.c keeper.c enter.c init.c hold.c'
build() { "$1" $flags $link "$2" $sources -o "$3"; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
build x86_64-linux-gnu-gcc -Wl,-z,max-page-size=4096 "$out/helper_amd64"
build aarch64-linux-gnu-gcc -Wl,-z,max-page-size=65536 "$out/helper_arm64"
(cd "$out" && sha256sum helper_amd64 helper_arm64 >SHA256SUMS)
