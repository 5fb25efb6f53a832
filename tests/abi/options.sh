#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# options.sh SOURCE-DIR CUDA MESON...: a build with every option off can be configured; jax_headers, which is for
# wheels, is an error without python_linker; with CUDA `enabled`, a build that calls nvcc through ccache can be
# configured.
set -eu
source=$1 cuda=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$@" setup "$folder/least" "$source" -Dauto_features=disabled >"$folder/log" 2>&1 ||
    { echo "all off: rejected"; tail -n 20 "$folder/log"; exit 1; }

! "$@" setup "$folder/headers" "$source" -Dauto_features=disabled -Dpython=enabled -Djax_headers=/nothing \
    >"$folder/log" 2>&1 &&
    grep -q 'jax_headers is for wheels: it needs python_linker' "$folder/log" ||
    { echo "headers of JAX without a linker: accepted"; tail -n 20 "$folder/log"; exit 1; }

[ "$cuda" = enabled ] || exit 0
mkdir "$folder/bin"
printf '#!/bin/sh\n[ "$1" = --version ] || exec "$@"\n' >"$folder/bin/ccache" # Meson uses a ccache in PATH
chmod +x "$folder/bin/ccache"
PATH=$folder/bin:$PATH
"$@" setup "$folder/ccache" "$source" -Dauto_features=disabled -Dcuda=enabled >"$folder/log" 2>&1 ||
    { echo "with ccache and CUDA: rejected"; tail -n 20 "$folder/log"; exit 1; }
grep -q 'Cuda compiler.*: ccache ' "$folder/log" ||
    { echo "with ccache and CUDA: nvcc is not called through ccache"; exit 1; }
