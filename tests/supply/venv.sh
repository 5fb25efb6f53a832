#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# venv.sh ROOT: tests scripts/venv.sh. The script must install packages with the right hash and fail if a hash differs.
# Without a network, a suitable Python or hashes for the machine it must skip with a reason. If a source package cannot
# be built, it must omit the package, unless a hash differs. The test needs no network: the index is a folder.
set -eu
root=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -c 'import ensurepip, venv' 2>/dev/null || { echo "venv: skipped, Python's venv is not installed"; exit 77; }
passed=0
fail() { echo "$*"; cat "$folder/output"; echo "$passed passed, 1 failed"; exit 1; }
pass() { passed=$((passed + 1)); }

mkdir -p "$folder/scripts/requirements" "$folder/index"
cp "$root/scripts/venv.sh" "$folder/scripts"
# A wheel of one module.
hash=$(python3 - "$folder/index" <<'END'
import hashlib, sys, zipfile
path = sys.argv[1] + "/pinned-1.0-py3-none-any.whl"
with zipfile.ZipFile(path, "w") as wheel:
    wheel.writestr("pinned.py", "value = 7\n")
    wheel.writestr("pinned-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned\nVersion: 1.0\n")
    wheel.writestr("pinned-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("pinned-1.0.dist-info/RECORD", "")
print(hashlib.sha256(open(path, "rb").read()).hexdigest())
END
)
# A source archive whose build backend needs the wheel, and a source archive whose backend fails.
hashes=$(python3 - "$folder/index" <<'END'
import hashlib, io, sys, tarfile
backend = """
import os, zipfile
import {needs}
def build_wheel(folder, settings=None, metadata=None):
    with zipfile.ZipFile(os.path.join(folder, "{name}-1.0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("{name}.py", "value = 8\\n")
        wheel.writestr("{name}-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n")
        wheel.writestr("{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("{name}-1.0.dist-info/RECORD", "")
    return "{name}-1.0-py3-none-any.whl"
"""
project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
for name, needs in (("built", "pinned"), ("broken", "nothing_of_this_name")):
    path = "%s/%s-1.0.tar.gz" % (sys.argv[1], name)
    with tarfile.open(path, "w:gz") as archive:
        for file, text in (("PKG-INFO", "Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n" % name), ("pyproject.toml", project),
                           ("backend.py", backend.format(name=name, needs=needs))):
            entry = tarfile.TarInfo("%s-1.0/%s" % (name, file))
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    print(hashlib.sha256(open(path, "rb").read()).hexdigest())
END
)
list() { # OLDEST HASH
    printf '# python %s\npinned\n' "$1" >"$folder/scripts/requirements/one.in"
    printf 'pinned==1.0 \\\n    --hash=sha256:%s\n' "$2" >"$folder/scripts/requirements/one.txt"
}
source_list() { # NAME HASH
    printf '%s==1.0 \\\n    --hash=sha256:%s\n' "$1" "$2" >"$folder/scripts/requirements/one-source.txt"
}
make() { # STATUS
    status=0
    "$folder/scripts/venv.sh" "$folder/venv" one no-such-python python3 >"$folder/output" 2>&1 || status=$?
    [ "$status" = "$1" ]
}
export PIP_CONFIG_FILE=/dev/null
unset PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_NO_INDEX PIP_PROXY
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY # a proxy would answer for the closed index
export no_proxy='*'
wrong=$(echo "$hash" | tr 0-9a-f 1-9a-f0)

export PIP_NO_INDEX=1 PIP_FIND_LINKS="$folder/index"
list 3.6 "$hash"
make 0 || fail "with the right hash: status $status"
[ "$("$folder/venv/bin/python" -c 'import pinned; print(pinned.value)')" = 7 ] || fail "the module is not installed"
pass
touch "$folder/venv/marker"
make 0 && [ -f "$folder/venv/marker" ] || fail "a complete environment is created again"
pass
source_list broken "$(echo "$hashes" | tail -n 1)"
make 0 || fail "with a source that cannot be built: status $status"
grep -q '^left out: one-source.txt: ' "$folder/output" || fail "with a source that cannot be built: no reason"
pass
source_list built "$(echo "$hashes" | head -n 1 | tr 0-9a-f 1-9a-f0)"
make 1 && grep -q 'DO NOT MATCH THE HASHES' "$folder/output" || fail "with another hash of a source: status $status"
pass
source_list built "$(echo "$hashes" | head -n 1)"
make 0 || fail "with a source: status $status"
[ "$("$folder/venv/bin/python" -c 'import built; print(built.value)')" = 8 ] ||
    fail "the source is not built and installed"
[ -f "$folder/venv/marker" ] || fail "a complete environment is created again for a source package"
pass
cp "$folder/scripts/requirements/one-source.txt" "$folder/scripts/requirements/one-aside.txt"
make 0 && [ -f "$folder/venv/aside/built.py" ] || fail "with packages of a separate folder: status $status"
pass
touch "$folder/venv/aside/marker"
make 0 && [ -f "$folder/venv/aside/marker" ] || fail "a complete separate folder is created again"
echo "# changed" >>"$folder/scripts/requirements/one-aside.txt"
make 0 && [ ! -f "$folder/venv/aside/marker" ] && [ -f "$folder/venv/aside/built.py" ] ||
    fail "a separate folder with other pins is not created again: status $status"
pass
rm "$folder/scripts/requirements/one-source.txt" "$folder/scripts/requirements/one-aside.txt"
# Network warnings in the log must not hide a wrong hash. No server listens at this index.
unset PIP_NO_INDEX
export PIP_INDEX_URL=http://127.0.0.1:9/simple
list 3.6 "$wrong"
make 1 || fail "with another hash: status $status in place of 1"
grep -q 'Retrying' "$folder/output" || fail "with another hash: pip did not ask the index"
grep -q 'DO NOT MATCH THE HASHES' "$folder/output" || fail "with another hash: no reason"
[ ! -f "$folder/venv/marker" ] || fail "an environment with other pins is not created again"
[ ! -f "$folder/venv/ready" ] || fail "with another hash: the environment is marked as complete"
pass
unset PIP_FIND_LINKS
make 77 || fail "without a network: status $status in place of 77"
grep -q '^skipped: PyPI was not reached' "$folder/output" || fail "without a network: no reason"
pass
list 3.99 "$hash"
make 77 || fail "without a Python that fits: status $status in place of 77"
grep -q '^skipped: there is no Python 3.99' "$folder/output" || fail "without a Python that fits: no reason"
pass
list 3.6 "$hash"
echo '# machine none' >>"$folder/scripts/requirements/one.in"
make 77 || fail "on a machine without hashes: status $status"
grep -q '^skipped: one.txt has no hashes' "$folder/output" || fail "on a machine without hashes: no reason"
pass
echo "$passed passed, 0 failed"
