#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the licence texts of code that is compiled in, and the bills of materials.

usage: licences.py ROOT INPUTS CXX...

The texts in LICENSES must be those of the headers in this build, and in every package. Only wheels that have the CUDA
runtime name its licence. The bill of materials of
each package has the fields that SPDX 2.3 requires, versions as the preprocessor sees them, and the same bytes for the
same inputs. If spdx-tools are installed, they validate each bill. Prints `name: reason` for each check that fails, then
`N passed, N failed`.
"""
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest.mock

ROOT, INPUTS, CXX = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3:]
HEADERS = {"RapidJSON": "rapidjson/reader.h", "xxHash": "xxhash.h"}
LICENCES = {"RapidJSON": "MIT", "xxHash": "BSD-2-Clause", "CUDA runtime": "LicenseRef-NVIDIA-CUDA-EULA",
            "XLA FFI": "Apache-2.0", "GCC runtime libraries": "GPL-3.0-or-later WITH GCC-exception-3.1"}
RELATIONS = {"DESCRIBES", "CONTAINS", "STATIC_LINK", "BUILD_TOOL_OF"}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def words(text):
    """Returns a text without the characters that comments and the format of Debian's copyright file put around it."""
    return " ".join(word for word in re.sub(r"[/*\u201c\u201d]", " ", text).split() if word != ".")


def without_years(text):
    return re.sub(r"\b(19|20)\d\d(-(19|20)\d\d)?\b ?", "", text)


def preprocessed(source):
    output = subprocess.run([*CXX, "-x", "c++", "-E", "-P", "-"], input=source, stdout=subprocess.PIPE, text=True,
                            check=True)
    return output.stdout.strip().splitlines()[-1].replace(" ", "")


def header(name):
    """Returns the text of a header that the compiler finds."""
    output = subprocess.run([*CXX, "-x", "c++", "-M", "-"], input=f"#include <{HEADERS[name]}>\n",
                            stdout=subprocess.PIPE, text=True, check=True)
    (path,) = {path for path in output.stdout.replace("\\\n", " ").split() if path.endswith("/" + HEADERS[name])}
    with open(path, encoding="utf-8") as file:
        return file.read()


def texts():
    for name in HEADERS:
        text = read("LICENSES", name + ".txt")
        rights = re.search(r"^Copyright.*$", text, re.M).group()
        notice = words(header(name)[:6000])
        yield f"{name}: '{rights}' is in its header", without_years(words(rights)) in without_years(notice)
        recorded = json.loads(written("install", "--inputs", INPUTS))["packages"]
        (recorded,) = (package["copyrightText"] for package in recorded if package["name"] == name)
        yield f"{name}: '{recorded}' is in its header", words(recorded) in without_years(notice)
        terms = text.split("\n\n")[3:]
        yield f"{name}: has terms", len(terms) >= 3
        if name == "xxHash":  # RapidJSON's header contains only the name of its licence
            for paragraph in terms:
                yield f"{name}: '{paragraph[:40]}...' is in its header", words(paragraph) in notice
        else:
            yield f"{name}: its header names the licence", "MIT License" in notice
        copyright_file = words(read("packaging", "debian", "copyright"))
        for paragraph in terms:
            yield f"{name}: '{paragraph[:40]}...' is in debian/copyright", words(paragraph) in copyright_file
        yield (f"{name}: the crate has the text",
               text == read("bindings", "rust", "dsopt-sys", "LICENSES", name + ".txt"))
        yield f"{name}: it is installed", f"'LICENSES/{name}.txt'" in read("meson.build")
    project = read("pyproject.toml")
    yield ("wheel: has the texts",
           'license-files = ["LICENSE", "LICENSES/RapidJSON.txt", "LICENSES/xxHash.txt"]' in project)
    yield "wheel: names the licences", 'license = "Apache-2.0 AND MIT AND BSD-2-Clause"' in project


def backend():
    """Returns the module with the build backend of wheels, without meson-python, which this Python may lack."""
    name = "mesonpy"
    had = sys.modules.get(name)
    sys.modules[name] = unittest.mock.MagicMock()
    try:
        path = os.path.join(ROOT, "bindings", "python", "wheel_backend.py")
        spec = importlib.util.spec_from_file_location("wheel_backend", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        if had is None:
            del sys.modules[name]
        else:
            sys.modules[name] = had
    return module


def wheels():
    """Checks what the build backend adds to the metadata of a wheel, with and without CUDA."""
    metadata = ["Metadata-Version: 2.4", "License-Expression: Apache-2.0 AND MIT", "License-File: LICENSE", "",
                "License-Expression: a line of the description", ""]
    for compiled_in in ({"xxHash": "0.8.1"}, {"xxHash": "0.8.1", "CUDA runtime": "13.0"}):
        kind = "with CUDA" if "CUDA runtime" in compiled_in else "without CUDA"
        with tempfile.TemporaryDirectory() as info:
            for folder in ("sboms", "licenses/LICENSES"):
                os.makedirs(os.path.join(info, folder))
            inputs, path = os.path.join(info, "inputs.json"), os.path.join(info, "METADATA")
            with open(inputs, "w", encoding="utf-8") as file:
                json.dump({"version": "1.0", "compiler": "gcc 12.2.0", "compiled_in": compiled_in}, file)
            with open(path, "w", encoding="utf-8") as file:
                file.write("\n".join(metadata))
            with open(os.path.join(info, "sboms", "dsopt.spdx.json"), "w", encoding="utf-8") as file:
                file.write(written("wheel", "--inputs", inputs))
            backend().add_cuda_licence(info)
            with open(path, encoding="utf-8") as file:
                lines = file.read().split("\n")
            added = os.listdir(os.path.join(info, "licenses", "LICENSES"))
            if kind == "with CUDA":
                want = metadata[:1] + [metadata[1] + " AND LicenseRef-NVIDIA-CUDA-EULA", metadata[2],
                                       "License-File: LICENSES/CUDA-runtime.txt"] + metadata[3:]
                yield f"wheel {kind}: adds {added}", added == ["CUDA-runtime.txt"]
            else:
                want = metadata
                yield f"wheel {kind}: adds {added}", added == []
            yield f"wheel {kind}: the metadata are {lines}", lines == want


def required(sbom):
    """Yields whether each requirement of SPDX 2.3 on a document without files holds."""
    yield all(isinstance(sbom.get(key), str) and sbom[key] for key in ("name", "documentNamespace"))
    yield (sbom["spdxVersion"] == "SPDX-2.3" and sbom["dataLicense"] == "CC0-1.0" and
           sbom["SPDXID"] == "SPDXRef-DOCUMENT")
    yield bool(re.fullmatch(r"https://[^#\s]+", sbom["documentNamespace"]))
    yield bool(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", sbom["creationInfo"]["created"]))
    yield all(re.match(r"(Tool|Organization|Person): \S", creator) for creator in sbom["creationInfo"]["creators"])
    names = [package["SPDXID"] for package in sbom["packages"]]
    yield len(set(names)) == len(names) and all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", name) for name in names)
    for package in sbom["packages"]:
        yield all(package.get(key) for key in ("name", "versionInfo", "downloadLocation", "licenseConcluded",
                                               "licenseDeclared",
                                               "copyrightText"))
        yield package["filesAnalyzed"] is False
        yield all(re.fullmatch(r"pkg:\S+@\S+", ref["referenceLocator"]) for ref in package["externalRefs"])
    known = {"SPDXRef-DOCUMENT", *names}
    for relation in sbom["relationships"]:
        yield relation["relationshipType"] in RELATIONS
        yield {relation["spdxElementId"], relation["relatedSpdxElement"]} <= known
    # Every package is in a relationship.
    yield {end for relation in sbom["relationships"]
           for end in (relation["spdxElementId"], relation["relatedSpdxElement"])} == known


def valid(path):
    """Returns None if spdx-tools are not installed, otherwise their findings."""
    try:
        from spdx_tools.spdx.parser.parse_anything import parse_file
        from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
    except ImportError:
        return None
    return [message.validation_message for message in validate_full_spdx_document(parse_file(path))]


def written(kind, *arguments):
    command = [sys.executable, os.path.join(ROOT, "scripts", "sbom.py"), kind, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, "SOURCE_DATE_EPOCH": "1"}).stdout


def materials():
    with open(INPUTS, encoding="utf-8") as file:
        inputs = json.load(file)
    seen = {
        "RapidJSON": preprocessed("#include <rapidjson/rapidjson.h>\n"
                                  "RAPIDJSON_MAJOR_VERSION.RAPIDJSON_MINOR_VERSION.RAPIDJSON_PATCH_VERSION"),
        "xxHash": preprocessed("#include <xxhash.h>\nXXH_VERSION_MAJOR.XXH_VERSION_MINOR.XXH_VERSION_RELEASE"),
    }
    compiled_in = {name: version for name, version in inputs["compiled_in"].items() if name in seen}
    yield f"inputs: {compiled_in} is compiled in, the preprocessor sees {seen}", compiled_in == seen
    version = re.search(r"^#define DSOPT_VERSION_MAJOR (\d+)", read("include", "dsopt.h"), re.M).group(1)
    yield "inputs: the version is that of dsopt.h", inputs["version"].split(".")[0] == version
    scanned = 0
    wheels = {"XLA FFI": "0.3", "GCC runtime libraries": "12.2.0"}  # as in scripts/wheel.sh
    kinds = ("install", "wheel", "crate", "crate-sys", "libdsopt2", "libdsopt-dev", "dsopt-tools")
    for kind, more in [(kind, {}) for kind in kinds] + [("wheel", wheels)]:
        arguments = [] if kind.startswith("crate") else ["--inputs", INPUTS]
        for name, number in more.items():
            arguments += ["--with", f"{name}={number}"]
        text = written(kind, *arguments)
        sbom = json.loads(text)
        yield f"{kind}: has what SPDX requires", all(required(sbom))
        yield f"{kind}: the same inputs give the same bytes", text == written(kind, *arguments)
        have = {package["name"]: (package["versionInfo"], package["licenseDeclared"]) for package in sbom["packages"]}
        parts = {name: have[name] for name in have if name in LICENCES}
        has_library = kind in ("install", "wheel", "libdsopt2", "libdsopt-dev")
        want = ({name: (number, LICENCES[name]) for name, number in {**inputs["compiled_in"], **more}.items()}
                if has_library else {})
        yield f"{kind}: {parts} is compiled in, not {want}", parts == want
        concluded = sbom["packages"][0]["licenseConcluded"].split(" AND ")
        yield (f"{kind}: {concluded} covers its parts",
               set(concluded) == {"Apache-2.0", *(LICENCES[name] for name in want)})
        path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"dsopt-{os.getpid()}.spdx.json")
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            found = valid(path)
        finally:
            os.remove(path)
        if found is not None:
            scanned += 1
            yield f"{kind}: spdx-tools say {found}", not found
    print(f"spdx-tools validated {scanned} documents"
          if scanned else "spdx-tools are not installed: bindings/python/check has them")


def main():
    passed = failed = 0
    for part in (texts, wheels, materials):
        for name, holds in part():
            passed += holds
            failed += not holds
            if not holds:
                print(f"{name}: does not hold")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
