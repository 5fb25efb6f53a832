#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the software bill of materials of one package: SPDX 2.3, as JSON.

usage: sbom.py PACKAGE [--inputs FILE] [--with NAME=VERSION]... [--output FILE]

PACKAGE is `install`, `wheel`, `crate` (dsopt), `crate-sys` (dsopt-sys), or the name of a Debian package. FILE is
BUILD/sbom-inputs.json, in which Meson writes the version of dsopt, its compiler and the components compiled into its
libraries, as the preprocessor sees them; crates have no compiled code and use the version in meson.build. NAME is one
more component, which is only in the libraries of this package. The time is SOURCE_DATE_EPOCH if that is set. The same
inputs give the same bytes.
"""
import argparse
import datetime
import hashlib
import json
import os
import re
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CUDA_LICENCE = "LicenseRef-NVIDIA-CUDA-EULA"
GCC_LICENCE = "GPL-3.0-or-later WITH GCC-exception-3.1"
# Name -> licence, copyright without years (they differ by version), origin. Texts of the first two are in LICENSES.
COMPONENTS = {
    "RapidJSON": ("MIT", "Copyright (C) THL A29 Limited, a Tencent company, and Milo Yip.",
                  "pkg:github/Tencent/rapidjson@v%s"),
    "xxHash": ("BSD-2-Clause", "Copyright (C) Yann Collet", "pkg:github/Cyan4973/xxHash@v%s"),
    "CUDA runtime": (CUDA_LICENCE, "NVIDIA Corporation", "pkg:generic/cudart@%s"),
    "XLA FFI": ("Apache-2.0", "The OpenXLA Authors", "pkg:generic/xla-ffi@%s"),
    "GCC runtime libraries": (GCC_LICENCE, "Free Software Foundation, Inc.", "pkg:generic/gcc@%s"),
}
ARCHIVES = ("CUDA runtime", "GCC runtime libraries")  # the others are headers
# Package -> (name, package URL, contents).
PACKAGES = {
    "install": ("dsopt", "pkg:generic/dsopt@%s", "library"),
    "wheel": ("dsopt", "pkg:pypi/dsopt@%s", "library"),
    "crate": ("dsopt", "pkg:cargo/dsopt@%s", "source"),
    "crate-sys": ("dsopt-sys", "pkg:cargo/dsopt-sys@%s", "source"),
    "libdsopt2": ("libdsopt2", "pkg:generic/libdsopt2@%s", "library"),
    "libdsopt-dev": ("libdsopt-dev", "pkg:generic/libdsopt-dev@%s", "library"),
    "dsopt-tools": ("dsopt-tools", "pkg:generic/dsopt-tools@%s", "program"),
}


def identifier(name):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", name)


def package(name, version, licence, rights, url, concluded=None):
    return {
        "name": name,
        "SPDXID": identifier(name),
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": concluded or licence,
        "licenseDeclared": licence,
        "copyrightText": rights,
        "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                          "referenceLocator": url % version}],
    }


def document(kind, inputs, created):
    name, url, has = PACKAGES[kind]
    compiled_in = inputs["compiled_in"] if has == "library" else {}
    licences = list(dict.fromkeys(["Apache-2.0"] + [COMPONENTS[part][0] for part in compiled_in]))
    packages = [package(name, inputs["version"], "Apache-2.0", "2026 the dsopt authors", url, " AND ".join(licences))]
    top = packages[0]["SPDXID"]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", top)]
    for part, version in compiled_in.items():
        packages.append(package(part, version, *COMPONENTS[part]))
        relations.append((top, "STATIC_LINK" if part in ARCHIVES else "CONTAINS", identifier(part)))
    if has != "source":
        compiler, version = inputs["compiler"].split(" ", 1)
        packages.append(package(compiler, version, "NOASSERTION", "NOASSERTION", "pkg:generic/" + compiler + "@%s"))
        relations.append((identifier(compiler), "BUILD_TOOL_OF", top))
    result = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name + "-" + inputs["version"],
        "creationInfo": {"created": created,
                         "creators": ["Organization: dsopt authors", "Tool: dsopt-sbom-" + inputs["version"]]},
        "packages": packages,
        "relationships": [
            {"spdxElementId": one, "relationshipType": relation, "relatedSpdxElement": other}
            for one, relation, other in relations
        ],
    }
    if CUDA_LICENCE in licences:
        result["hasExtractedLicensingInfos"] = [{
            "licenseId": CUDA_LICENCE, "name": "NVIDIA CUDA Toolkit End User License Agreement",
            "extractedText": "libcudart_static.a, distributed under https://docs.nvidia.com/cuda/eula/",
        }]
    content = json.dumps([kind, result], sort_keys=True).encode()
    result["documentNamespace"] = "https://spdx.org/spdxdocs/%s-%s" % (result["name"],
                                                                       hashlib.sha256(content).hexdigest()[:32])
    return result


def source_inputs():
    with open(os.path.join(ROOT, "meson.build"), encoding="utf-8") as file:
        version = re.search(r"^project\('dsopt'.* version: '([^']*)'", file.read(), re.M)
    return {"version": version.group(1), "compiled_in": {}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--inputs")
    parser.add_argument("--with", dest="more", action="append", default=[], metavar="NAME=VERSION")
    parser.add_argument("--output")
    options = parser.parse_args()
    if options.inputs:
        with open(options.inputs, encoding="utf-8") as file:
            inputs = json.load(file)
    elif PACKAGES[options.package][2] == "source":
        inputs = source_inputs()
    else:
        parser.error("--inputs is needed for what is compiled")
    for more in options.more:
        name, _, version = more.partition("=")
        if name not in COMPONENTS or not version:
            parser.error("--with takes one of %s, with its version" % ", ".join(COMPONENTS))
        inputs["compiled_in"][name] = version
    now = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    created = datetime.datetime.fromtimestamp(now, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = json.dumps(document(options.package, inputs, created), indent=2) + "\n"
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
