#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# test_debs.sh FOLDER: in a clean Debian, as root: installs the .deb files of FOLDER, builds and runs FOLDER/fp32.c
# against them, runs dsopt-info and reads manual pages, and removes the packages again. No file of them may remain.
set -eu
cd "$1"
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
fail() { echo "test_debs: $*"; exit 1; }
quietly() { "$@" >log 2>&1 || { cat log; fail "$*"; }; }
# Paths that the packages may change. Triggers of other packages create and remove caches of the linker and of man.
files() {
    find /usr /etc /var/lib -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/lib/apt/*' ! -name ld.so.cache | sort
}

# Manual pages too, which minimal systems omit.
rm -f /etc/dpkg/dpkg.cfg.d/*
files >before
# First only the library: it must not need the development package.
quietly apt-get install -y --no-install-recommends ./libdsopt2_*.deb
[ -e /usr/lib/*/libdsopt.so.2 ] || fail "no libdsopt.so.2"
[ ! -e /usr/include/dsopt.h ] || fail "libdsopt2 has the header"
quietly apt-get install -y --no-install-recommends ./*.deb

strict="-std=c99 -pedantic -Wall -Wextra -Werror"
gcc $strict fp32.c -o shared $(pkg-config --cflags --libs dsopt)
gcc $strict fp32.c -o archive $(pkg-config --static --cflags --libs dsopt | sed 's/-ldsopt/-l:libdsopt.a/')
gcc $strict fp32.c -o static -static $(pkg-config --static --cflags --libs dsopt)
ldd shared | grep -q 'libdsopt.so.2 => /' || fail "shared: not linked to libdsopt.so.2"
! ldd archive | grep libdsopt || fail "archive: linked to the shared library"
for program in shared archive static; do sh ./caller.sh ./$program || fail "$program"; done
for package in libdsopt2 libdsopt-dev dsopt-tools; do
    grep -q '"spdxVersion"' "/usr/share/doc/$package/sbom.spdx.json" || fail "$package has no bill of materials"
    for holder in 'Milo Yip' 'Yann Collet'; do
        grep -q "$holder" "/usr/share/doc/$package/copyright" || fail "$package does not name $holder"
    done
done
grep -q '"abi_version"' "$(pkg-config --variable=abi_json dsopt)" || fail "no dsopt.json"

version=$(pkg-config --modversion dsopt)
[ "$(dsopt-info --version)" = "dsopt $version" ] || fail "dsopt-info is not of $version"
dsopt-info | grep -q '^device cpu:0 *usable$' || fail "dsopt-info finds no CPU"
for page in dsopt-info.1 dsopt.3 dsopt_optimizer_step.3 dsopt_step.3 dsopt_status_code.3; do
    man "$page" >page 2>&1 && [ "$(wc -l <page)" -gt 15 ] || { cat page; fail "man $page"; }
done
man -f dsopt_optimizer_step | grep -q 'Update every parameter' || fail "whatis does not know dsopt_optimizer_step"

quietly apt-get purge -y libdsopt2 libdsopt-dev dsopt-tools
files >after
! grep -i warning log || fail "removing warned"
# Files that apt installed for the packages remain, files of the packages must not.
left=$(comm -13 before after | grep dsopt || :)
[ -z "$left" ] || fail "left behind: $left"
echo "test_debs: installed, built against, run, and removed"
