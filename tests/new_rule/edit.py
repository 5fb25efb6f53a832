#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Edits that add an update rule with three moments and one more beta.

usage: edit.py SOURCE OUTPUT

These edits and the rule's own header (rules/ademamix.h) are all that such a rule needs: nothing in src/device, src/cpu,
cuda, src/step, src/optimizer and src/checkpoint changes. Fails if a line that is edited no longer exists.
"""
import pathlib
import sys

# By file: a line, and its replacement.
EDITS = {
    "dsopt.h": [
        ("    DSOPT_ALGORITHM_SIGNED = -1",
         "    DSOPT_ALGORITHM_ADEMAMIX = 100, DSOPT_ALGORITHM_ADEMAMIX_TRUST = 101,\n    DSOPT_ALGORITHM_SIGNED = -1"),
        ("    int32_t adjust;\n} dsopt_group;", "    int32_t adjust;\n    double beta3;\n} dsopt_group;"),
        ("    DSOPT_KEY_SIGNED = -1", "    DSOPT_KEY_BETA3 = 100,\n    DSOPT_KEY_SIGNED = -1"),
        ("    DSOPT_HYPER_SIGNED = -1", "    DSOPT_HYPER_BETA3 = 8,\n    DSOPT_HYPER_SIGNED = -1"),
    ],
    "rule.h": [
        ("    muon_nesterov\n};", "    muon_nesterov,\n    ademamix,\n    ademamix_trust\n};"),
        ("constexpr int kMoments = 2;", "constexpr int kMoments = 3;"),
        ("    kStepSize = 256,", "    kBeta3 = 65536,\n    kStepSize = 256,"),
        ("dampening, lr_decay;\n", "dampening, lr_decay,\n        beta3;\n"),
        ("inline constexpr GroupField kGroupFields[] = {\n",
         "inline constexpr GroupField kGroupFields[] = {\n"
         "    {\"beta3\", &dsopt_group::beta3, &Hyper::beta3, DSOPT_HYPER_BETA3, DSOPT_KEY_BETA3, kBeta3,\n"
         "     GroupField::below_one, \"AdEMAMix\", kBeta3},\n"),
    ],
    "scalars.h": [
        ("    float eps, wd;\n", "    float eps, wd;\n    float beta3, a3;\n"),
        ("    s.wd = float(hyper.weight_decay);\n",
         "    s.wd = float(hyper.weight_decay);\n    s.beta3 = float(hyper.beta3);\n"
         "    s.a3 = float(1.0 - hyper.beta3);\n"),
    ],
    "all.h": [
        ("#include \"rules/adam.h\"\n", "#include \"rules/adam.h\"\n#include \"rules/ademamix.h\"\n"),
        ("kRules[] = {\n", "kRules[] = {\n    &kAdEmaMix, &kAdEmaMixTrust,\n"),
        ("    case Rule::lion: f(Formula<Lion>{}); return;\n",
         "    case Rule::lion: f(Formula<Lion>{}); return;\n"
         "    case Rule::ademamix: f(Formula<AdEmaMix>{}); return;\n"
         "    case Rule::ademamix_trust: f(Formula<AdEmaMixTrust>{}); return;\n"),
    ],
}

source, output = map(pathlib.Path, sys.argv[1:])
text = source.read_text(encoding="utf-8")
for old, new in EDITS[source.name]:
    if text.count(old) != 1:
        sys.exit(f"{source}: found {text.count(old)} times, not once: {old}")
    text = text.replace(old, new)
output.write_text(text, encoding="utf-8")
