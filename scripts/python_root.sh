#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# python_root.sh ARCH FOLDER: unpacks only a Python and its C library into FOLDER: no libstdc++, libgcc_s or libgomp.
# They are from the oldest Debian on the mirror, for ARCH (amd64, arm64), and need no root. Writes FOLDER/run, a command
# that runs the Python.
set -eu
arch=$1 folder=$2
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    { echo "python_root.sh: apt-get and dpkg-deb of Debian are needed"; exit 1; }
case $arch in
amd64) triplet=x86_64-linux-gnu loader=ld-linux-x86-64.so.2 emulator= ;;
arm64) triplet=aarch64-linux-gnu loader=ld-linux-aarch64.so.1 emulator=qemu-aarch64 ;;
esac
[ "$(dpkg --print-architecture)" != "$arch" ] || emulator=
rm -rf "$folder"
mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/apt/debs"
: >"$folder/apt/status"

# The mirror that this system uses.
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -vE -m 1 'security|^file:') || mirror=
[ -n "$mirror" ] || { echo "python_root.sh: apt has no mirror; run apt-get update"; exit 1; }

unpack() { # SUITE PYTHON PACKAGE...
    suite=$1 python=$2
    shift 2
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$folder/apt/sources"
    options="-o Dir::Etc::sourcelist=$folder/apt/sources -o Dir::Etc::sourceparts=- -o Dir::Cache=$folder/apt/cache
        -o Dir::State=$folder/apt -o Dir::State::lists=$folder/apt/lists -o Dir::State::status=$folder/apt/status
        -o APT::Architecture=$arch -o APT::Architectures=$arch -o Acquire::Languages=none -o APT::Sandbox::User=root
        -o Acquire::Retries=3 -q"
    # shellcheck disable=SC2086 # options without spaces
    apt-get $options update --error-on=any >"$folder/apt/log" 2>&1 || return 1
    # shellcheck disable=SC2086
    (cd "$folder/apt/debs" && apt-get $options download "$python-minimal" "lib$python-minimal" "lib$python-stdlib" \
        libc6 zlib1g libexpat1 \
        libcrypt1 "$@") >>"$folder/apt/log" 2>&1 || return 1
    for package in "$folder"/apt/debs/*.deb; do
        dpkg-deb -x "$package" "$folder"
    done
    # Without the system's library cache. The loader searches its default folders after these.
    libraries=$folder/lib/$triplet:$folder/usr/lib/$triplet
    cat >"$folder/run" <<END
#!/bin/sh
exec env PYTHONHOME=$folder/usr $emulator $folder/lib/$triplet/$loader --inhibit-cache --library-path $libraries \\
    $folder/usr/bin/$python "\$@"
END
    chmod +x "$folder/run"
}

unpack bullseye python3.9 libffi7 || unpack bookworm python3.11 libffi8 || { cat "$folder/apt/log"; exit 1; }
rm -rf "$folder/apt"
