# SPDX-License-Identifier: Apache-2.0
"""test_man.py man.py dsopt.h dsopt.json: every function must have a page with its parameters and statuses, every struct
and enum a page with its fields and constants, every reference a page, and mandoc must report nothing."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

tool, header, description = sys.argv[1:]
abi = json.loads(pathlib.Path(description).read_text(encoding="utf-8"))
comments = pathlib.Path(header).read_text(encoding="utf-8")
wrong = []


def expect(condition, text):
    if not condition:
        wrong.append(text)


def words(text):
    """Returns the visible text: without roff's fonts and escapes."""
    return re.sub(r"\s+", " ", re.sub(r"\\f[BIRP]|\\&", "", text).replace("\\-", "-").replace("\\e", "\\"))


def section(page, title):
    found = re.search(rf"^\.SH {title}\n(.*?)(?=^\.SH |\Z)", page, re.M | re.S)
    return found[1] if found else ""


with tempfile.TemporaryDirectory() as folder:
    subprocess.run(
        [sys.executable, tool, header, description, folder], check=True, env=dict(os.environ, SOURCE_DATE_EPOCH="86400")
    )
    pages = {path.stem: path.read_text(encoding="utf-8") for path in pathlib.Path(folder).iterdir()}
    for kind in ("functions", "structs", "enums", "typedefs", "callbacks"):
        for entry in abi[kind]:
            expect(entry["name"] in pages, f"{entry['name']} has no page")
            expect(
                f"{entry['name']} (3)" in pages["dsopt"] or kind in ("typedefs", "callbacks"),
                f"dsopt(3) does not name {entry['name']}",
            )
    for function in abi["functions"]:
        name, page = function["name"], pages[function["name"]]
        parameters = section(page, "PARAMETERS")
        for argument in function["arguments"]:
            expect(
                re.search(rf"^\.TP\n\\fB{argument['name']}\\fP\n.{{5,}}", parameters, re.M),
                f"{name}(3): nothing about {argument['name']}",
            )
        expect(section(page, "RETURN VALUE").strip(), f"{name}(3): no RETURN VALUE")
        # The statuses of the header's comment, in any section of the page.
        comment = re.search(r"/\*\*((?:(?!\*/).)*)\*/\s*DSOPT_API[^;]*?\b" + name + r"\(", comments, re.S)
        for status in set(re.findall(r"\b(?:DSOPT_ERR)?_(?:[A-Z]+)\b", comment[1])):
            expect(status in words(page), f"{name}(3): {status} is missing")
    for struct in abi["structs"]:
        for field in struct["fields"]:
            expect(
                re.search(rf"\b{field['name']}\b", section(pages[struct["name"]], "SYNOPSIS")),
                f"{struct['name']}(3): no {field['name']}",
            )
    for enum in abi["enums"]:
        for constant in enum["constants"]:
            expect(
                f"{constant['name']} ({constant['value']})" in words(section(pages[enum["name"]], "CONSTANTS")),
                f"{enum['name']}(3): no {constant['name']}",
            )
    for name, page in pages.items():
        for other in re.findall(r"^\.BR (\S+) \(3\)", page, re.M):
            expect(other in pages, f"{name}(3) refers to {other}(3), which is missing")
        expect(f'.TH {name} 3 1970-01-02 "dsopt {abi["version"]}"' in page, f"{name}(3): its title")
        expect(not re.search(r"@(param|return|sa)\b|\*/|`", page), f"{name}(3): the marks of a comment are left in it")
    files = sorted(str(path) for path in pathlib.Path(folder).iterdir())
    if shutil.which("mandoc"):
        lint = subprocess.run(["mandoc", "-Tlint", "-Wwarning", *files], stdout=subprocess.PIPE, text=True, check=False)
        expect(lint.returncode == 0, lint.stdout)
    else:
        print("mandoc is not installed: pages not checked by it")
if wrong:
    sys.exit("\n".join(wrong))
print(f"{len(pages)} pages")
