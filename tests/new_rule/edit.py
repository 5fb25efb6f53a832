#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Edits that add an update rule with three moments and one more beta, and a format of moments with scales.

usage: edit.py SOURCE OUTPUT

RULE and the rule's own header (rules/ademamix.h) are all that such a rule needs: nothing in src/device, src/cpu, cuda,
src/step, src/optimizer and src/checkpoint changes. FORMAT is all that such a format needs: its constants, the dtype of
its codes, its codec and record, the codec on vector registers and its cases in tiles. Fails if a line that is edited no
longer exists.
"""
import pathlib
import sys

# By file: a line, and its replacement.
RULE = {
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

# FP8 E5M2, for means of gradients: 2 bits of fraction, exponent bias 15, largest finite value 57344.
CODEC = """struct E5M2 {
    static constexpr float kLargest = 57344;
    DSOPT_HD static uint8_t code(float y) {
        const uint32_t bits = bits_of(y), magnitude = bits & 0x7fffffffu;
        const uint32_t subnormal = bits_of(float_of(magnitude) + 128.0f) - 0x43000000u; // in units of 2^-16
        const uint32_t normal = ((magnitude + 0xfffffu + (magnitude >> 21 & 1u)) >> 21) - 448u;
        return uint8_t((magnitude < 0x38800000u ? subnormal : normal) | (bits >> 24 & 0x80u));
    }
    DSOPT_HD static BlockScale scale(uint32_t top, float, float) {
        if (!has_codes(top)) return scale_without_codes(top);
        const float t = float_of(top > kLeastTop ? top : kLeastTop);
        return {t / kLargest, kLargest / t, false};
    }
    struct Map {};
    DSOPT_HD static constexpr Map map() { return {}; }
    DSOPT_HD static uint8_t code_of(const Map &, float x, float factor) { return code(x * factor); }
    DSOPT_HD static constexpr float level(const Map &, uint8_t code) {
        const float magnitude = float_of(uint32_t(code & 0x7fu) << 21) * float_of(0x77800000u /* 2^112 */);
        return float_of(bits_of(magnitude) | uint32_t(code & 0x80u) << 24);
    }
};
"""
REGISTER_CODEC = """template <> struct RegisterCodec<E5M2> {
    DSOPT_HD Floats level(Words code) const {
        const Floats magnitude = Floats((code & 0x7f) << 21) * float_of(0x77800000u /* 2^112 */);
        return Floats(Words(magnitude) | (code & 0x80) << 24);
    }
    DSOPT_HD Words code_of(Floats x, Floats factor) const {
        const Words bits = Words(x * factor), magnitude = bits & 0x7fffffffu;
        const Words subnormal = Words(Floats(magnitude) + 128.0f) - 0x43000000u;
        const Words normal = ((magnitude + 0xfffffu + (magnitude >> 21 & 1)) >> 21) - 448;
        return (Integers(magnitude) < 0x38800000 ? subnormal : normal) | (bits >> 24 & 0x80);
    }
};
"""
FORMAT = {
    "dsopt.h": [
        ("    DSOPT_MOMENT_SIGNED = -1", "    DSOPT_MOMENT_E5M2 = 5,\n    DSOPT_MOMENT_SIGNED = -1"),
        ("    DSOPT_DTYPE_SIGNED = -1", "    DSOPT_DTYPE_F8_E5M2 = 100,\n    DSOPT_DTYPE_SIGNED = -1"),
    ],
    "dtype.h": [
        ("inline constexpr DtypeInfo kDtypes[] = {\n",
         "inline constexpr DtypeInfo kDtypes[] = {\n    {DSOPT_DTYPE_F8_E5M2, 1, \"F8_E5M2\"},\n"),
    ],
    "formats.h": [
        ("    q8_squares\n};", "    q8_squares,\n    e5m2\n};"),
        ("    case Format::e4m3: return DSOPT_DTYPE_F8_E4M3;\n",
         "    case Format::e4m3: return DSOPT_DTYPE_F8_E4M3;\n    case Format::e5m2: return DSOPT_DTYPE_F8_E5M2;\n"),
        ("    {DSOPT_MOMENT_Q8, \"Q8\", \"q8\", Format::q8, Format::q8_squares},\n",
         "    {DSOPT_MOMENT_Q8, \"Q8\", \"q8\", Format::q8, Format::q8_squares},\n"
         "    {DSOPT_MOMENT_E5M2, \"E5M2\", \"e5m2\", Format::e5m2, Format::e5m2, \"needs more bits of fraction\"},\n"),
        ("/// All codecs.\n", CODEC + "/// All codecs.\n"),
        ("CodecList<E4M3, Q8, Q8Squares>;", "CodecList<E4M3, Q8, Q8Squares, E5M2>;"),
        ("    case Format::q8_squares: f(Q8Squares{}); return;\n",
         "    case Format::q8_squares: f(Q8Squares{}); return;\n    case Format::e5m2: f(E5M2{}); return;\n"),
    ],
    "codecs.h": [
        ("/// The position of a magnitude in a dynamic map, see position_in().\n",
         REGISTER_CODEC + "/// The position of a magnitude in a dynamic map, see position_in().\n"),
    ],
    "tiles.h": [
        ("    case Format::q8_squares: return load_codes(Q8Squares{});\n",
         "    case Format::q8_squares: return load_codes(Q8Squares{});\n"
         "    case Format::e5m2: return load_codes(E5M2{});\n"),
        ("    case Format::q8_squares: return store_codes(Q8Squares{});\n",
         "    case Format::q8_squares: return store_codes(Q8Squares{});\n"
         "    case Format::e5m2: return store_codes(E5M2{});\n"),
    ],
}
assert len(FORMAT) <= 5

source, output = map(pathlib.Path, sys.argv[1:])
text = source.read_text(encoding="utf-8")
for old, new in RULE.get(source.name, []) + FORMAT.get(source.name, []):
    if text.count(old) != 1:
        sys.exit(f"{source}: found {text.count(old)} times, not once: {old}")
    text = text.replace(old, new)
output.write_text(text, encoding="utf-8")
