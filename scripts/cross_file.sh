#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# cross_file.sh FOLDER [cuda]: writes FOLDER/cross.ini, with which Meson builds for aarch64 with Debian's cross compiler
# and runs programs under qemu-user. FOLDER/include has headers that the cross compiler lacks. With "cuda" the nvcc in
# PATH compiles the kernels; its toolkit needs a folder targets/sbsa-linux (cuda_toolkit.sh).
set -eu
folder=$1 prefix=aarch64-linux-gnu nvcc=
[ "${2-}" != cuda ] || nvcc="cuda = ['nvcc', '-target-dir', 'sbsa-linux', '-ccbin', '$prefix-g++']"
mkdir -p "$folder/include"
for header in rapidjson xxhash.h; do # unlike other files of /usr/include, the same for every processor
    [ -e "$folder/include/$header" ] || ln -s "/usr/include/$header" "$folder/include/$header"
done
cat >"$folder/cross.ini" <<END
[binaries]
c = '$prefix-gcc'
cpp = '$prefix-g++'
$nvcc
ar = '$prefix-ar'
strip = '$prefix-strip'
objcopy = '$prefix-objcopy'
ld = '$prefix-ld'
nm = '$prefix-nm'
pkgconfig = 'false'
exe_wrapper = ['qemu-aarch64', '-L', '/usr/$prefix']
[built-in options]
cpp_args = ['-isystem', '$folder/include']
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'cortex-a72'
endian = 'little'
END
