// SPDX-License-Identifier: Apache-2.0
// In place of libFuzzer, for any compiler: runs inputs that are there, or random ones.
//
//     PROGRAM [--seconds N] [--seed S] [FILE|FOLDER...]
//
// With --seconds random bytes from S, S + 1, ... for so long, after the files. A finding aborts; its seed is one of the
// 64 from the last one that was named.
#include "harness.h"
#include "support/numbers.h"
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace {

namespace fs = std::filesystem;

constexpr int kMostBytes = 600; // of a random input

void run(const std::vector<uint8_t> &input) { (void)LLVMFuzzerTestOneInput(input.data(), input.size()); }
void run_file(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        std::fprintf(stderr, "%s cannot be read\n", path.c_str());
        std::exit(2);
    }
    run(std::vector<uint8_t>(std::istreambuf_iterator<char>(file), {}));
}

} // namespace

// libFuzzer's own, where it is not linked: one byte becomes another one.
extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t) {
    static test::Random random(1);
    if (size != 0) data[random.below(int(size))] = uint8_t(random.next());
    return size;
}

int main(int argc, char **argv) {
    long seconds = 0, seed = 1, files = 0, inputs = 0;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if ((word == "--seconds" || word == "--seed") && i + 1 < argc) {
            (word == "--seconds" ? seconds : seed) = std::atol(argv[++i]);
        } else if (fs::is_directory(word)) {
            std::vector<fs::path> paths;
            for (const fs::directory_entry &entry : fs::directory_iterator(word)) paths.push_back(entry.path());
            std::sort(paths.begin(), paths.end());
            for (const fs::path &path : paths) run_file(path);
            files += long(paths.size());
        } else {
            run_file(word);
            ++files;
        }
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    for (; std::chrono::steady_clock::now() < end; ++inputs) {
        if (inputs % 64 == 0) std::fprintf(stderr, "seeds from %ld\n", seed + inputs);
        test::Random random(uint64_t(seed + inputs));
        std::vector<uint8_t> input(size_t(random.below(kMostBytes)));
        for (uint8_t &byte : input) byte = uint8_t(random.next() >> 32);
        run(input);
    }
    std::printf("%ld files and %ld random inputs without a finding\n", files, inputs);
    return files + inputs == 0 ? 2 : 0;
}
