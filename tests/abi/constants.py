#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""constants.py dsopt.h: checks that the values of each enum ascend, *_SIGNED is last, and each enum has a unique
prefix."""
import re
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
enums = {name: [(key, int(value)) for key, value in re.findall(r"(\w+) = (-?\d+)", body)]
         for name, body in re.findall(r"\benum (\w+) \{(.*?)\}", text, flags=re.S)}
problems = [] if len(enums) > 20 else ["only %d enums" % len(enums)]
prefixes = {}
for name, members in enums.items():
    values = [value for _, value in members]
    if members[-1][0].endswith("_SIGNED"):
        prefixes[name] = members[-1][0][:-len("SIGNED")]
        values.pop()
        if members[-1][1] != -1:
            problems.append("%s: %s is not -1" % (name, members[-1][0]))
    else:  # already checked: *_SIGNED
        prefixes[name] = members[0][0]
        if min(values) >= 0:
            problems.append("%s: no *_SIGNED" % name)
    if values != sorted(set(values)):
        problems.append("%s: values do not ascend" % name)
enum_of = {key: name for name, members in enums.items() for key, _ in members}
macros = {key: "a macro" for key in re.findall(r"#define (DSOPT_\w+)", text)}
for key, where in {**enum_of, **macros}.items():
    if key == "DSOPT_OK":
        continue
    if where in prefixes and not key.startswith(prefixes[where]):
        problems.append("%s: does not begin with %s" % (key, prefixes[where]))
    for name, prefix in prefixes.items():
        if name != where and key.startswith(prefix):
            problems.append("%s of %s has the prefix of the constants of %s" % (key, where, name))
if problems:
    sys.exit("\n".join(problems))
print("%d enums, %d constants" % (len(enums), len(enum_of)))
