# SPDX-License-Identifier: Apache-2.0
"""covers.py DSOPT.JSON HEADER...: the headers must use every function and constant of dsopt.h, and every field of each
struct of dsopt.h that has a counterpart in C++. Additions to dsopt.h must be in C++, too, or be listed below.
"""
import json
import pathlib
import re
import sys

# Array indices and result bits keep their C names, like the structs in which they are returned.
SAME_NAME = {"dsopt_status_code", "dsopt_report_index", "dsopt_hyper_index", "dsopt_skip", "dsopt_phase",
             "dsopt_collective", "dsopt_nonfinite_kind", "dsopt_state_flags"}
RETURNED = {"dsopt_report", "dsopt_scaler_info", "dsopt_schedule_info", "dsopt_state_info", "dsopt_comm_info",
            "dsopt_context_info", "dsopt_norm_result", "dsopt_tensor"}

FILLED = {"size", "algorithm"}  # set by desc_of and by dsopt_group_init


def main():
    description = json.loads(pathlib.Path(sys.argv[1]).read_text())
    text = "\n".join(pathlib.Path(header).read_text() for header in sys.argv[2:])
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    words = set(re.findall(r"\w+", text))
    wanted = [function["name"] for function in description["functions"]]
    for enum in description["enums"]:
        if enum["name"] not in SAME_NAME:
            wanted += [constant["name"] for constant in enum["constants"]]
    missing = [name for name in wanted if name not in words]
    for struct in description["structs"]:
        if struct["name"] in RETURNED:
            continue
        for field in struct["fields"]:
            name = field["name"]
            if not name.startswith("reserved") and name not in FILLED and not re.search(r"(\.|->)%s\b" % name, text):
                missing.append(struct["name"] + "." + name)
    if missing or len(wanted) < 100:
        print("not in C++:", *(missing or ["nothing was compared"]))
        sys.exit(1)
    print(len(wanted), "functions and constants are used")


main()
