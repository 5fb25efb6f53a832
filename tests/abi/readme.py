# SPDX-License-Identifier: Apache-2.0
"""readme.py links ROOT
readme.py same TEXT PROGRAM
readme.py examples ROOT NAME...

links: every relative link in *.md, docs/*.md and examples/*.md must lead to a file, and to a heading if it names one.
same: a C program in TEXT must be identical to PROGRAM, which other tests compile and run.
examples: the tests must run every examples/*.c (NAME...), and README.md and examples/README.md must link to each of
them.
"""
import pathlib
import re
import sys


def fail(text):
    print("readme:", text)
    sys.exit(1)


def links(root):
    """Checks relative links. Anchors are derived from headings as on GitHub."""

    def anchors(page):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    wrong = []
    for page in [page for folder in ("", "docs", "examples") for page in sorted((root / folder).glob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                wrong.append(f"{page.relative_to(root)}: {link}: no such file")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                wrong.append(f"{page.relative_to(root)}: {link}: no such heading")
    if wrong:
        fail("\n".join(wrong))


def same(text, program):
    found = re.findall(r"^```c\n(.*?)^```$", text.read_text(), flags=re.M | re.S)
    if program.read_text() not in found:
        fail(f"none of the C programs in {text.name} is {program.name}")


def examples(root, names):
    files = {path.stem for path in (root / "examples").glob("*.c")}
    if files != set(names):
        fail("examples that no test runs, or that do not exist: " + ", ".join(sorted(files ^ set(names))))
    for page, folder in ((root / "README.md", "examples/"), (root / "examples" / "README.md", "")):
        linked = set(re.findall(rf"^\| \[[^\]]+\]\({folder}(\w+)\.c\)", page.read_text(), flags=re.M))
        if linked != files:
            fail(f"{page.relative_to(root)}: missing or additional rows: " + ", ".join(sorted(files ^ linked)))


def main():
    kind, first, *rest = sys.argv[1:]
    path = pathlib.Path(first)
    if kind == "links":
        links(path)
    elif kind == "same":
        same(path, pathlib.Path(rest[0]))
    else:
        examples(path, rest)


main()
