#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes man pages of section 3 from the comments of dsopt.h: one per function, struct, enum and type, and dsopt(3).

usage: man.py dsopt.h dsopt.json OUTPUT-FOLDER

Declarations are from dsopt.json, text is from the header. Doxygen is not used: it writes pages only per file or group,
one for each field name (abort.3, count.3), a NAME line that whatis(1) cannot read, and every text three times. The date
of the pages is SOURCE_DATE_EPOCH, else the header's.
"""

import json
import os
import re
import sys
import time

COMMENT = re.compile(r"/\*\*(.*?)\*/", re.S)
DECLARED = re.compile(
    r"\s*(?:DSOPT_API\s[^;]*?\b(dsopt_\w+)\([^;]*?\);|enum (dsopt_\w+) \{|typedef struct (dsopt_\w+)\b"
    r"|typedef [^;{]*?\(\*(dsopt_\w+)\)[^;]*;|typedef \w+ (dsopt_\w+);)",
    re.S,
)
MEMBER = re.compile(
    r"(?:/\*\*(?P<words>.*?)\*/\s*)?(?:(?P<constant>DSOPT_\w+) = -?\d+,?|(?P<field>[a-z][^;{}/]*?(?:\([^;]*\))?);)",
    re.S,
)
PROSE = re.compile(r"^/\* -+ ([a-z][^*\n]*) \*/\n/\*\n(.*?)\*/", re.M | re.S)
OBJECTS = ("context", "optimizer", "scaler", "comm", "compressed")
# Parameters that the header does not document at every function.
COMMON = {
    "ctx": "the context.",
    "opt": "the optimizer.",
    "scaler": "the scaler.",
    "comm": "the comm.",
    "index": "index in the state list.",
    "stream": "where work is enqueued: see Streams in dsopt(3).",
    "count": "number of entries of the list.",
    "path": "name of the file, or NULL.",
    "value": "the number.",
    "status": "the status.",
    "limit": "the bound.",
    "max_norm": "largest norm, 0 = no clipping.",
    "b": "factor of y.",
}


def plain(comment):
    """Returns the text of a comment without its stars."""
    return re.sub(r"^[ \t]*\*(?: |$)", "", comment.strip("*"), flags=re.M).strip()


def roff(words):
    """Returns one line of prose as roff: special characters are escaped, names and code have their own fonts."""
    words = words.replace("\\", "\\e").replace("-", "\\-")
    words = re.sub(r"`([^`]+)`", r"\\fI\1\\fP", words)
    words = re.sub(r"\b((?:dsopt|DSOPT)_\w+)\b", r"\\fB\1\\fP", words)
    return "\\&" + words if words[:1] in (".", "'") else words


def blocks(text):
    """Returns prose, lists and indented text as roff."""
    out, kind = [], None
    for row in text.split("\n"):
        bullet = re.match(r" ?- (.*)", row)
        if not row.strip():
            kind = kind if kind == "list" else None
            continue
        indented = row.startswith("  ") and not (kind == "list" and row.startswith("   "))
        wanted = "list" if bullet or (kind == "list" and row.startswith(" ")) else "code" if indented else "prose"
        if kind == "code" and wanted != "code":
            out.append(".EE")
        if bullet:
            out += [".IP \\(bu 2", roff(bullet[1])]
        elif wanted == "code":
            out += ([".PP", ".EX"] if kind != "code" else []) + [row.replace("\\", "\\e").replace("-", "\\-")]
        else:
            out += ([".PP"] if wanted != kind else []) + [roff(row.strip())]
        kind = wanted
    return out + ([".EE"] if out and kind == "code" else [])


def closed(rows):
    """Returns the rows with an .EE for each example that a blank line has ended."""
    out, is_open = [], False
    for row in rows:
        if is_open and row in (".PP", ".IP \\(bu 2"):
            out.append(".EE")
            is_open = False
        is_open = row == ".EX" or (is_open and row != ".EE")
        out.append(row)
    return out + ([".EE"] if is_open else [])


class Words:
    """The parts of a comment."""

    def __init__(self, comment):
        text = plain(comment)
        self.since = "0.1"
        found = re.search(r"\s*Since:\s+(\d+\.\d+)\.?", text)
        if found:
            self.since, text = found[1], text[: found.start()] + text[found.end() :]
        found = re.search(r"\s*Thread-safety:\s+(.*?\.)(?=\s+(?:[A-Z@])|\s*$)", text, re.S)
        self.threads = "One call at a time per object, as dsopt(3) says."
        if found:
            self.threads, text = " ".join(found[1].split()), text[: found.start()] + text[found.end() :]
            self.threads = self.threads[0].upper() + self.threads[1:]
        head, *tags = re.split(r"\s*@(?=param|return)", text)
        self.text, self.parameters, self.result = head.strip(), {}, None
        for tag in tags:
            parameter = re.match(r"param(?:\[([a-z,]+)\])?\s+(\w+)\s+(.*)", tag, re.S)
            if parameter:
                self.parameters[parameter[2]] = (parameter[1], " ".join(parameter[3].split()))
            else:
                self.result = " ".join(tag[len("return") :].split())
        first = re.split(r"(?<=[.:])\s+(?=[A-Z@*-])|\n\n|\n -", self.text + "\n\n", maxsplit=1)[0]
        self.brief = " ".join(first.split()).rstrip(".:") or "see dsopt(3)"


class Header:
    def __init__(self, header, abi):
        self.abi, self.text = abi, header
        self.words, self.members, at = {}, {}, 0
        for declared in re.finditer(
            r"^(?:typedef struct (dsopt_\w+) \{|enum (dsopt_\w+) \{)(.*?)\n?\}", header, re.M | re.S
        ):
            name = declared[1] or declared[2]
            self.members[name] = self.members_of(declared[3])
            self.words[name] = Words(("Fields of struct " if declared[1] else "Constants of enum ") + name)
        while True:
            comment = COMMENT.search(header, at)
            if comment is None:
                break
            declared = DECLARED.match(header, comment.end())
            at = comment.end()
            if declared:
                self.words[declared[declared.lastindex]] = Words(comment[1])
        self.pages = set(self.words)

    @staticmethod
    def members_of(body):
        """Returns (declaration, text) of each field or constant."""
        found = []
        for member in MEMBER.finditer(re.sub(r"/\*(?!\*).*?\*/", "", body, flags=re.S)):
            name = member["constant"] or " ".join(member["field"].split())
            if name.endswith("_SIGNED"):
                continue
            found.append((name, " ".join(plain(member["words"] or "").split())))
        return found


def section(title, rows):
    return [f".SH {title}", *rows] if rows else []


def tagged(pairs):
    return [
        row
        for name, words in pairs
        for row in (".TP", "\\fB" + name.replace("-", "\\-") + "\\fP", roff(words) or "\\&")
    ]


def see_also(names):
    return [".BR %s (3)%s" % (name, "," if at + 1 < len(names) else "") for at, name in enumerate(names)]


def related(header, name, words):
    """Returns the pages that a declaration or its comment names, the object's create function, and the overview."""
    owner = next((kind for kind in OBJECTS if name.startswith(f"dsopt_{kind}_")), "")
    maker = [f"dsopt_{owner}_create"]
    names = re.findall(r"\bdsopt_\w+", words) + maker
    return sorted({word for word in names if word in header.pages and word != name}) + ["dsopt"]


def prototype(function, name):
    arguments = [
        "%s%s%s" % (kind["type"], "" if kind["type"].endswith("*") else " ", kind["name"])
        for kind in function["arguments"]
    ]
    result = function["result"] + ("" if function["result"].endswith("*") else " ")
    start = f"{result}{name}("
    rows = (",\n" + " " * len(start)).join(arguments or ["void"])
    return f"{start}{rows});".replace("\\", "\\e").replace("-", "\\-").split("\n")


def page(header, name, date, synopsis, body, mentioned):
    words = header.words[name]
    version = header.abi["version"]
    rows = [
        '.\\" SPDX-License-Identifier: Apache-2.0',
        f'.TH {name} 3 {date} "dsopt {version}" "dsopt"',
        ".SH NAME",
        f"{name} \\- {roff(words.brief)}",
        ".SH SYNOPSIS",
        ".nf",
        ".B #include <dsopt.h>",
        ".PP",
        *synopsis,
        ".fi",
    ]
    rows += body + section("HISTORY", [f"Since dsopt {words.since}."])
    return rows + section("SEE ALSO", see_also(related(header, name, mentioned)))


def function_page(header, function, date):
    name = function["name"]
    words = header.words[name]
    status = function["result"] == "dsopt_status"
    body = section("DESCRIPTION", closed(blocks(words.text))[1:])
    parameters = []
    for argument in function["arguments"]:
        direction, said = words.parameters.get(argument["name"], (None, None))
        struct = re.search(r"dsopt_\w+", argument["type"])
        fallback = f"{struct[0]}(3)." if struct else "see above."
        said = said or COMMON.get(argument["name"]) or fallback
        parameters.append((argument["name"], (f"({direction}) " if direction else "") + said))
    body += section("PARAMETERS", tagged(parameters))
    returned = [roff(words.result)] if words.result else []
    if status:
        returned += (
            [".PP", "Any of the statuses that " + roff("dsopt(3)") + " lists for every function."]
            if returned
            else [roff("DSOPT_OK, or a status that dsopt(3) lists for every function.")]
        )
    elif function["result"] == "void":
        returned = ["Nothing."]
    body += section("RETURN VALUE", returned or [roff(words.text)])
    body += section("THREAD SAFETY", [roff(words.threads)])
    mentioned = (
        words.text
        + str(words.parameters)
        + str(words.result)
        + " ".join(kind["type"] for kind in function["arguments"])
    )
    return page(
        header,
        name,
        date,
        prototype(function, name),
        body,
        mentioned + (" dsopt_last_error dsopt_status_code" if status else ""),
    )


def struct_page(header, struct, date):
    name = struct["name"]
    fields = header.members[name]
    synopsis = [f"typedef struct {name} {{", *(f"    {field};" for field, _ in fields), f"}} {name};"]
    fields = [field for field in fields if not re.search(r" (size|reserved2?)$", field[0])]  # dsopt(3) has them
    body = section("DESCRIPTION", closed(blocks(header.words[name].text))[1:]) + section("FIELDS", tagged(fields))
    return page(
        header, name, date, synopsis, body, header.words[name].text + " ".join(field + text for field, text in fields)
    )


def enum_page(header, enum, date):
    name = enum["name"]
    said = dict(header.members[name])
    values = {constant["name"]: constant["value"] for constant in enum["constants"]}
    synopsis = [f"enum {name} {{", *(f"    {constant} = {value}," for constant, value in values.items()), "};"]
    body = section("DESCRIPTION", closed(blocks(header.words[name].text))[1:])
    body += section(
        "CONSTANTS", tagged((f"{constant} ({value})", said[constant]) for constant, value in values.items())
    )
    return page(header, name, date, synopsis, body, header.words[name].text + " ".join(said.values()))


def other_page(header, name, declaration, date):
    return page(
        header,
        name,
        date,
        declaration,
        section("DESCRIPTION", closed(blocks(header.words[name].text))[1:]),
        header.words[name].text,
    )


def overview(header, date):
    """Returns the introduction, the prose before sections of the header, and the list of pages."""
    title, rest = plain(COMMENT.search(header.text)[1]).split("\n", 1)
    rows = [
        '.\\" SPDX-License-Identifier: Apache-2.0',
        f".TH dsopt 3 {date} \"dsopt {header.abi['version']}\" \"dsopt\"",
        ".SH NAME",
        "dsopt \\- " + roff(title.split(": ", 1)[1].rstrip(".")),
        ".SH SYNOPSIS",
        ".nf",
        ".B #include <dsopt.h>",
        ".PP",
        "cc ... $(pkg\\-config \\-\\-cflags \\-\\-libs dsopt)",
        ".fi",
        ".SH DESCRIPTION",
        *closed(blocks(rest.strip("\n")))[1:],
    ]
    for title, prose in PROSE.findall(header.text):
        rows += section(title.upper(), closed(blocks(plain(prose)))[1:])
    for title, kind in (("FUNCTIONS", "functions"), ("STRUCTS", "structs"), ("CONSTANTS OF THE HEADER", "enums")):
        rows += section(
            title,
            [
                row
                for entry in header.abi[kind]
                for row in (".TP", f".BR {entry['name']} (3)", roff(header.words[entry["name"]].brief + "."))
            ],
        )
    return rows + section("SEE ALSO", [".BR dsopt\\-info (1)"])


def main(arguments):
    if len(arguments) != 3:
        sys.exit(__doc__)
    path, description, folder = arguments
    with open(path, encoding="utf-8") as file, open(description, encoding="utf-8") as other:
        header = Header(file.read(), json.load(other))
    date = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", os.path.getmtime(path)))))
    pages = {"dsopt": overview(header, date)}
    for function in header.abi["functions"]:
        pages[function["name"]] = function_page(header, function, date)
    for struct in header.abi["structs"]:
        pages[struct["name"]] = struct_page(header, struct, date)
    for enum in header.abi["enums"]:
        pages[enum["name"]] = enum_page(header, enum, date)
    for handle in header.abi["opaque"]:
        pages[handle] = other_page(header, handle, [f"typedef struct {handle} {handle};"], date)
    for new in header.abi["typedefs"]:
        pages[new["name"]] = other_page(header, new["name"], [f"typedef {new['type']} {new['name']};"], date)
    for callback in header.abi["callbacks"]:
        declaration = prototype({**callback, "result": "typedef " + callback["result"]}, f"(*{callback['name']})")
        declaration = [
            row.replace("void (*)(void *, int64_t) body", "void (*body)(void *arg, int64_t i)") for row in declaration
        ]
        pages[callback["name"]] = other_page(header, callback["name"], declaration, date)
    os.makedirs(folder, exist_ok=True)
    for name, rows in pages.items():
        with open(os.path.join(folder, name + ".3"), "w", encoding="utf-8") as file:
            file.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
