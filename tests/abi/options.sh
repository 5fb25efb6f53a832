#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# options.sh SOURCE-DIR CUDA MESON...: a build with every option off can be configured; jax_headers, which is for
# wheels, is an error without python_linker; a missing header is named with its packages; with the options of pip nvcc
# is called unless CUDA is left out, an nvcc that does not work is named with its error, and warnings are no errors;
# with CUDA `enabled`, a build that calls nvcc through ccache can be configured, and one for devices before capability
# 7.5 is refused.
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

cat >"$folder/cxx" <<'END'
#!/bin/sh
for word; do
    case $word in *.cpp) ! grep -q "$HIDDEN" "$word" || { echo "no $HIDDEN"; exit 1; } ;; esac
done
exec c++ "$@"
END
chmod +x "$folder/cxx"
for missing in 'xxhash.h libxxhash-dev xxhash-devel' 'rapidjson/document.h rapidjson-dev rapidjson-devel'; do
    header=${missing%% *}
    ! HIDDEN=$header CXX=$folder/cxx PKG_CONFIG=false CMAKE=false \
        "$@" setup "$folder/without-${header%%[./]*}" "$source" -Dauto_features=disabled >"$folder/log" 2>&1 ||
        { echo "without $header: accepted"; exit 1; }
    for word in $missing '(conda)'; do
        grep 'ERROR:.* the header' "$folder/log" | grep -qF "$word" ||
            { echo "without $header: no $word in the error"; tail -n 20 "$folder/log"; exit 1; }
    done
done

# pip's builds have the default of the option cuda.
pip=$(sed -n 's/^setup = \[\(.*\)\]$/\1/p' "$source/pyproject.toml" | tr -d '",')
[ -n "$pip" ] || { echo "pyproject.toml has no options"; exit 1; }
mkdir "$folder/broken"
cat >"$folder/broken/nvcc" <<END
#!/bin/sh
: >"$folder/called"
[ "\$1" != --version ] || { echo 'Cuda compilation tools, release 13.0, V13.0.88'; exit 0; }
echo 'crt/host_config.h:143:2: error: -- unsupported GNU version! "gcc" is too new' >&2
exit 1
END
chmod +x "$folder/broken/nvcc"
why='nvcc cannot compile a test program: crt/host_config.h:143:2: error: -- unsupported GNU version'
for option in '' enabled disabled; do
    rm -f "$folder/called"
    status=0
    # shellcheck disable=SC2086 # options
    PATH=$folder/broken:$PATH "$@" setup "$folder/pip$option" "$source" $pip ${option:+-Dcuda=$option} \
        >"$folder/log" 2>&1 || status=1
    case $option in
    '') [ $status = 0 ] && grep -q "$why" "$folder/log" && [ -e "$folder/called" ] ;;
    enabled) [ $status = 1 ] && grep -q "$why" "$folder/log" ;;
    disabled) [ $status = 0 ] && [ ! -e "$folder/called" ] ;;
    esac || { echo "nvcc that does not work, cuda=$option: status $status"; tail -n 20 "$folder/log"; exit 1; }
done
"$@" introspect "$folder/pip" --buildoptions | grep -q '"name": "werror", "value": false' ||
    { echo "pip: warnings are errors"; exit 1; }

[ "$cuda" = enabled ] || exit 0
! "$@" setup "$folder/old" "$source" -Dauto_features=disabled -Dcuda=enabled -Ddevice_archs=70,80 >"$folder/log" 2>&1 &&
    grep -q 'need compute capability 7.5 or later, not 70' "$folder/log" ||
    { echo "device_archs=70: accepted"; tail -n 20 "$folder/log"; exit 1; }
mkdir "$folder/bin"
printf '#!/bin/sh\n[ "$1" = --version ] || exec "$@"\n' >"$folder/bin/ccache" # Meson uses a ccache in PATH
chmod +x "$folder/bin/ccache"
PATH=$folder/bin:$PATH
"$@" setup "$folder/ccache" "$source" -Dauto_features=disabled -Dcuda=enabled >"$folder/log" 2>&1 ||
    { echo "with ccache and CUDA: rejected"; tail -n 20 "$folder/log"; exit 1; }
grep -q 'Cuda compiler.*: ccache ' "$folder/log" ||
    { echo "with ccache and CUDA: nvcc is not called through ccache"; exit 1; }
