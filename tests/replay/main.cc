// SPDX-License-Identifier: Apache-2.0
// dsopt-replay: compares the engine with records of the original. Prints one line per recorded case. The exit status is
// 1 if any case fails, and 77 if there is no device to run on.
#include "cases.h"
#include "emulated.h"
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace replay {
namespace {

struct Algorithm {
    const char *name; ///< as in the metadata
    void (*run)(const Case &recorded);
};
constexpr Algorithm algorithms[] = {
    {"fused_adam", replay_fused_adam},
    {"fused_lamb", replay_fused_lamb},
    {"compressed_allreduce", replay_compressed_allreduce},
    {"onebit_adam", replay_onebit_adam},
    {"zero_one_adam", replay_zero_one_adam},
    {"onebit_lamb", replay_onebit_lamb},
    {"dynamic_loss_scaler", replay_dynamic_loss_scaler},
    {"fp16_scale_rule", replay_fp16_scale_rule},
    {"fp16_optimizer", replay_fp16_optimizer},
    {"low_precision", replay_low_precision},
    {"low_precision_codecs", replay_low_precision_codecs},
    {"low_precision_maps", replay_low_precision_maps},
    {"low_precision_import", replay_low_precision_import},
    {"muon", replay_muon},
};

/// Returns the file name without folder and extension. The name in the record is not used, because copies of a case
/// must be distinguishable.
std::string case_name(const std::string &path) {
    const size_t slash = path.find_last_of('/');
    std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
    const std::string ending = ".safetensors";
    if (name.size() > ending.size() && name.compare(name.size() - ending.size(), ending.size(), ending) == 0)
        name.resize(name.size() - ending.size());
    return name;
}

/// Returns true if the case passed; `text` is what to print after its name.
bool run_case(const std::string &path, int32_t backend, std::string &text) {
    try {
        GoldenFile file(path);
        if (file.text("format_version") != "1")
            fail("format_version %s is not known", file.text("format_version").c_str());
        for (const char *key : {"case", "seed", "source", "quirk", "original", "original_commit"}) file.ignore(key);
        const std::string &name = file.text("algorithm");
        for (const Algorithm &algorithm : algorithms) {
            if (name != algorithm.name) continue;
            Comparison comparison(file);
            algorithm.run({file, comparison, backend});
            file.finish();
            comparison.finish();
            text = comparison.summary();
            return comparison.passed();
        }
        fail("algorithm '%s' is not known to this program", name.c_str());
    } catch (const std::exception &error) { text = error.what(); }
    return false;
}

/// Names and texts come from files: they must not be able to imitate another line of the report.
void print_line(const char *verdict, std::string line) {
    for (char &c : line)
        if (static_cast<unsigned char>(c) < ' ') c = '?';
    std::printf("%s %s\n", verdict, line.c_str());
    std::fflush(stdout);
}

/// Returns true if the backend can be used here; if not, prints the reason in one line.
bool usable(int32_t backend) {
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.backend = backend;
    dsopt_context *context = nullptr;
    const dsopt_status status = dsopt_context_create(&desc, &context);
    if (status == DSOPT_ERR_MISSING) std::printf("dsopt-replay: %s\n", dsopt_last_error());
    dsopt_context_destroy(context);
    return status != DSOPT_ERR_MISSING;
}

int usage(std::FILE *stream, int status) {
    std::fprintf(stream, "usage: dsopt-replay [--backend cpu|cuda|emulated] FILE...\n");
    return status;
}

int run(int argc, char **argv) {
    std::string backend = "cpu";
    std::vector<std::string> paths;
    bool options = true;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (!options || word.empty() || word[0] != '-') {
            paths.push_back(word);
        } else if (word == "--") {
            options = false;
        } else if (word == "--help") {
            return usage(stdout, 0);
        } else if (word == "--backend" && i + 1 < argc) {
            backend = argv[++i];
        } else {
            return usage(stderr, 2);
        }
    }
    if (paths.empty() || (backend != "cpu" && backend != "cuda" && backend != "emulated")) return usage(stderr, 2);
    if (backend == "emulated" && !is_emulated()) {
        become_emulated(argv);
        return 2;
    }
    if (backend == "cuda" && !usable(DSOPT_BACKEND_CUDA)) return 77; // the tests' exit status for "skipped"

    int passed = 0, failed = 0;
    for (const std::string &path : paths) {
        std::string text;
        const bool ok = run_case(path, backend == "cpu" ? DSOPT_BACKEND_CPU : DSOPT_BACKEND_CUDA, text);
        ++(ok ? passed : failed);
        print_line(ok ? "PASS" : "FAIL", case_name(path) + " " + text);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

} // namespace
} // namespace replay

int main(int argc, char **argv) { return replay::run(argc, argv); }
