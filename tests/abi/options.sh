#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# options.sh SOURCE-DIR MESON...: a build with every option off can be configured.
set -eu
source=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$@" setup "$folder/least" "$source" -Dauto_features=disabled >"$folder/log" 2>&1 ||
    { echo "all off: refused"; tail -n 20 "$folder/log"; exit 1; }
