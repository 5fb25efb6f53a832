#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of refused options in docs/*.md from src/rules/options.h and src/rules/facts.h.

usage: options.py [--check]      --check: writes nothing, and fails if a page is not what would be written

A page has `<!-- options: NAME... -->` and `<!-- end of options -->`, and everything between them is written. A NAME is
a fact, for all rows with that fact, or an At, for all its rows. abi.py writes the rows to include/dsopt.json.
"""
import glob
import os
import re
import sys

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
# The call that checks the rows of an At.
CALLS = {"context": "dsopt_context_create", "scaler": "dsopt_scaler_create", "comm": "dsopt_comm_create",
         "optimizer": "dsopt_optimizer_create", "group": "dsopt_optimizer_add_group",
         "groups": "dsopt_optimizer_add_group", "param": "dsopt_optimizer_add_group", "step": "dsopt_optimizer_step",
         "output": "dsopt_optimizer_step"}
BLOCK = re.compile(r"(<!-- options: ([\w ]+) -->\n).*?(<!-- end of options -->)", re.S)


def table_of(name, table):
    """Returns the text between the braces of a constexpr table in src/rules, without comments."""
    with open(os.path.join(TOP, "src", "rules", name), encoding="utf-8") as file:
        found = re.search(r"\b%s\[\] = \{\n(.*?)\n\};" % table, file.read(), re.S)
    if not found:
        raise SyntaxError("%s has no table %s" % (name, table))
    return re.sub(r"^ *//.*$", "", found.group(1), flags=re.M)


def rows_of(text, pattern):
    """Returns the matches of `pattern`, of which the text must consist."""
    rows, at = [], 0
    row = re.compile(r"\s*\{" + pattern + r"\},?\s*")
    while at < len(text.rstrip()):
        found = row.match(text, at)
        if not found:
            raise SyntaxError("not a row: " + text[at:at + 120].strip())
        rows.append(found)
        at = found.end()
    return rows


def option_rules():
    """Returns the rows of kOptionRules, with the names of facts in the words of dsopt.json."""
    names = dict(row.groups() for row in rows_of(table_of("facts.h", "kFactNames"), r'(\w+), "([^"]*)"'))
    pattern = (r"\.at = At::(\w+),\s*\.option = \{([^}]*)\},\s*\.(needs|excludes) = \{([^}]*)\},\s*"
               r'(?:\.status = (\w+),\s*)?\.text = ("[^"]*"(?:\s*"[^"]*")*)')
    rules = []
    for row in rows_of(table_of("options.h", "kOptionRules"), pattern):
        at, option, relation, others, status, text = row.groups()
        facts = {"option": re.findall(r"\w+", option), "needs": [], "excludes": []}
        facts[relation] = re.findall(r"\w+", others)
        rules.append({"at": at, "status": status or "DSOPT_ERR_UNSUPPORTED", "facts": facts,
                      "text": "".join(re.findall(r'"([^"]*)"', text)),
                      "names": {key: [names[fact] for fact in value] for key, value in facts.items()}})
    return rules


def description():
    """Returns the rows for dsopt.json."""
    return [dict({"checked": CALLS[rule["at"]], "status": rule["status"]}, **rule["names"], text=rule["text"])
            for rule in option_rules()]


def listed(names):
    return ", ".join(re.sub(r"\b((DSOPT|dsopt)_[\w.]+)", r"`\1`", name) for name in names)


def markdown(names):
    rows = ["| option | needs | excludes | status | text |", "| --- | --- | --- | --- | --- |"]
    known = set()
    for rule in option_rules():
        facts = {rule["at"]}.union(*rule["facts"].values())
        known |= facts
        if facts.isdisjoint(names):
            continue
        lists = [listed(rule["names"][key]) for key in ("option", "needs", "excludes")]
        rows.append("| %s | %s | `%s` |" % (" | ".join(lists), rule["status"].replace("DSOPT_ERR_", ""), rule["text"]))
    if set(names) - known:
        raise SyntaxError("no rows: " + " ".join(sorted(set(names) - known)))
    return "\n".join(rows) + "\n"


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    stale = []
    for path in sorted(glob.glob(os.path.join(TOP, "docs", "*.md"))):
        with open(path, encoding="utf-8") as file:
            page = file.read()
        wanted = BLOCK.sub(lambda block: block.group(1) + markdown(block.group(2).split()) + block.group(3), page)
        if wanted == page:
            continue
        stale.append("docs/" + os.path.basename(path))
        if not arguments:
            with open(path, "w", encoding="utf-8") as file:
                file.write(wanted)
    if stale and arguments:
        sys.exit("%s: stale. Run scripts/generate/options.py." % ", ".join(stale))


if __name__ == "__main__":
    main(sys.argv[1:])
