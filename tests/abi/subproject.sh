#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# subproject.sh SOURCE-DIR BUILD-DIR CC CXX MESON...: a Meson project with dsopt as a subproject builds programs with
# the shared and with the static library, in C and in C++, and runs them. dsopt's tests, benches and examples must not
# be built, even if the project enables all automatic features. Objects of the library are copied from BUILD-DIR if they
# are there, because compiling the same sources again takes minutes; everything is linked again.
set -eu
source=$1 build=$2 cc=$3 cxx=$4
shift 4
here=$(dirname "$(realpath "$0")")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { echo "subproject: $*"; exit 1; }
logged() { "$@" >"$folder/log" 2>&1 || { tail -n 40 "$folder/log"; fail "$1 $2 failed"; }; }

compiler() { # NAME COMMAND
    cat >"$folder/$1" <<END
#!/bin/sh
output= previous=
for word; do
    [ "\$previous" != -o ] || output=\$word
    previous=\$word
done
made=$build/\${output#subprojects/dsopt/}
case \$output in
subprojects/dsopt/*.o | subprojects/dsopt/*.gch) [ ! -f "\$made" ] || exec cp "\$made" "\$output" ;;
esac
exec $2 "\$@"
END
    chmod +x "$folder/$1"
}
compiler cc "$cc"
compiler cxx "$cxx"

mkdir -p "$folder/user/subprojects"
ln -s "$source" "$folder/user/subprojects/dsopt"
cp "$source/examples/fp32.c" "$here/subproject.cc" "$folder/user"
cat >"$folder/user/meson.build" <<'END'
project('user', 'c', 'cpp', default_options: ['c_std=c99', 'cpp_std=c++20'])
dsopt = dependency('dsopt', version: '>=0.3', fallback: ['dsopt', 'dsopt_dep'])
static = dependency('dsopt', static: true)
fs = import('fs')
if not fs.is_file(dsopt.get_variable('abi_json')) or not fs.is_file(static.get_variable('abi_json'))
  error('abi_json is no file')
endif
executable('shared', 'fp32.c', dependencies: dsopt)
executable('static', 'fp32.c', dependencies: static)
executable('shared-cpp', 'subproject.cc', dependencies: dsopt)
executable('static-cpp', 'subproject.cc', dependencies: static)
END
unset CFLAGS CXXFLAGS CPPFLAGS LDFLAGS
export CC="$folder/cc" CXX="$folder/cxx"
logged "$@" setup "$folder/out" "$folder/user" --wrap-mode=forcefallback -Dauto_features=enabled -Ddsopt:cuda=disabled
! "$@" introspect --buildoptions "$folder/out" | grep -q '"name": "dsopt:werror", "value": true' ||
    fail "warnings are errors"
tests=$("$@" introspect --tests "$folder/out")
[ "$tests" = '[]' ] || fail "there are tests: $tests"
"$@" introspect --targets "$folder/out" >"$folder/targets"
! grep -oE '"name": "[^"]*(test|bench|fuzz|demo|train|replay)[^"]*"' "$folder/targets" ||
    fail "these targets must not be built"
logged ninja -C "$folder/out" shared static shared-cpp static-cpp
for program in shared static; do
    "$here/caller.sh" "$folder/out/$program" || fail "$program does not run"
    "$folder/out/$program-cpp" || fail "$program-cpp does not run"
done
readelf -dW "$folder/out/shared" | grep -q 'NEEDED.*libdsopt' || fail "shared is not linked to the shared library"
! readelf -dW "$folder/out/static" | grep -q 'NEEDED.*libdsopt' || fail "static is linked to the shared library"
