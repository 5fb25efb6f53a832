#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# package.sh [deb|wheel|crate|test]...: makes packages of the last commit in packages/; default: deb, wheel and crate.
# `test` installs the .deb files in a clean Debian 12, builds programs against them, and removes them again; it
# needs root or user namespaces, and Debian's mirror. packaging/README.md
set -eu
cd "$(dirname "$0")/.."
packages=$PWD/packages
say() { echo "package: $*"; }
fail() { say "$*"; exit 1; }
needs() { # PACKAGE PROGRAM...
    package=$1
    shift
    for program; do command -v "$program" >/dev/null || fail "there is no $program: install $package"; done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$packages"
[ -z "$(git status --porcelain --untracked-files=no)" ] || say "uncommitted changes are not packaged"
version=$(sed -n "s/^project('dsopt'.* version: '\([0-9.]*\)'.*/\1/p" meson.build)
export_tree() { # sets $tree: a clean copy
    tree=$work/$1/dsopt-$version
    mkdir -p "$tree"
    git archive HEAD | tar -x -C "$tree"
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
    export SOURCE_DATE_EPOCH
}

deb() {
    needs "dpkg-dev and debhelper" dpkg-buildpackage dh
    export_tree deb
    [ "$(dpkg-parsechangelog -l packaging/debian/changelog -S Version)" = "$version-1" ] ||
        fail "packaging/debian/changelog does not have version $version"
    cp -r "$tree/packaging/debian" "$tree/debian"
    # Not the compilers of the caller's shell: packages are built with Debian's.
    (cd "$tree" && env -u CC -u CXX -u CFLAGS -u CXXFLAGS PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        DEB_BUILD_OPTIONS="${DEB_BUILD_OPTIONS-noautodbgsym parallel=$(nproc)}" \
        dpkg-buildpackage -b -us -uc) >"$work/log" 2>&1 ||
        { tail -n 60 "$work/log"; fail "dpkg-buildpackage"; }
    rm -f "$packages"/*.deb
    cp "$work"/deb/*.deb "$packages"
    if command -v lintian >/dev/null; then
        # These packages are not uploaded to Debian, so they close no bug.
        lintian --allow-root --suppress-tags initial-upload-closes-no-bugs --fail-on error,warning \
            "$work"/deb/*.changes || fail "lintian"
    else
        say "lintian is not installed: it does not check the packages"
    fi
}

wheel() {
    export_tree wheel
    grep -q "^  version: \"$version\"$" "$tree/packaging/conda/recipe.yaml" ||
        fail "packaging/conda/recipe.yaml does not have version $version"
    meson setup "$work/library" "$tree" --buildtype=release -Dcuda=disabled -Dtests=disabled -Dbench=disabled \
        -Dbindings=disabled >"$work/log" 2>&1 || { tail -n 40 "$work/log"; fail "meson setup"; }
    scripts/progress.py "library without CUDA" build ninja -C "$work/library" "libdsopt.so.$version" ||
        fail "the library without CUDA"
    scripts/wheel.sh "$tree" "$packages" "$work/library/libdsopt.so.$version" x86_64 aarch64 || fail "the wheels"
}

crate() {
    needs cargo cargo
    export_tree crate
    [ -f "$tree/bindings/rust/Cargo.toml" ] || fail "bindings/rust/Cargo.toml is missing: no crates"
    "$tree/scripts/sbom.py" crate --output "$tree/bindings/rust/dsopt/sbom.spdx.json" &&
        "$tree/scripts/sbom.py" crate-sys --output "$tree/bindings/rust/dsopt-sys/sbom.spdx.json" ||
            fail "the bill of materials is missing"
    # Not built again here, because the tests build them. One crate needs the other, which is in no registry.
    (cd "$tree/bindings/rust" && cargo package --quiet --offline --no-verify --workspace --target-dir "$work/target" \
        --config "patch.crates-io.dsopt-sys.path='$PWD/dsopt-sys'") || fail "cargo package"
    cp "$work"/target/package/*.crate "$packages"
}

test_debs() {
    needs mmdebstrap mmdebstrap
    ls "$packages"/*.deb >/dev/null 2>&1 || fail "no packages to test: package.sh deb"
    mkdir "$work/into"
    cp "$packages"/*.deb packaging/test_debs.sh examples/fp32.c tests/abi/caller.sh "$work/into"
    needed=gcc,libc6-dev,pkg-config,libstdc++-12-dev,man-db
    mmdebstrap --quiet --variant=apt --include=$needed \
        --customize-hook="copy-in $work/into /root" \
        --customize-hook='chroot "$1" sh /root/into/test_debs.sh /root/into' \
        bookworm /dev/null || fail "the test in a clean root"
}

[ $# != 0 ] || set -- deb wheel crate
for what; do
    case $what in
    deb | wheel | crate) say "$what" && $what ;;
    test) say "testing the .deb files" && test_debs ;;
    *) sed -n 's/^# \(package.sh.*\)/usage: \1/p' "$0"; exit 2 ;;
    esac
done
say "in $packages:"
ls "$packages"
