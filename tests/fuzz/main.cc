// SPDX-License-Identifier: Apache-2.0
// Replaces libFuzzer for any compiler: runs existing inputs, and changed or random ones.
//
//     PROGRAM [--index] [--seconds N] [--seed S] [--bytes B] [FILE|FOLDER...]
//
// --index: prints a line for each file: its name, its size and the outcome of its calls, separated by tabs.
// With --seconds: after the files, runs inputs of the seeds S, S + 1, ... for N seconds. They are up to B (600) random
// bytes or, if the target has a mutator, changed files. The input of a finding is written to finding-SEED.
#include "harness.h"
#include "support/numbers.h"
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <unistd.h>

extern "C" [[gnu::weak]] size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed);

namespace {

namespace fs = std::filesystem;
using Input = std::vector<uint8_t>;

constexpr size_t kMaxChanged = 65536;

test::Random random_bytes(1); // for the current seed
const Input *running = nullptr;
char finding_path[64];

/// Writes the input to a file and raises the same signal again.
void write_finding(int signal) {
    (void)std::signal(signal, SIG_DFL);
    const int file = running != nullptr ? ::open(finding_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644) : -1;
    if (file >= 0 && ::write(file, running->data(), running->size()) < 0) (void)!::write(2, "not finding_path\n", 9);
    (void)std::raise(signal);
}

void run(const Input &input, long seed) {
    std::snprintf(finding_path, sizeof finding_path, "finding-%ld", seed);
    running = &input;
    (void)LLVMFuzzerTestOneInput(input.data(), input.size());
    running = nullptr;
}
Input read(const fs::path &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        std::fprintf(stderr, "%s cannot be read\n", path.c_str());
        std::exit(2);
    }
    return Input(std::istreambuf_iterator<char>(file), {});
}

Input random_input(int most) {
    Input input(size_t(random_bytes.below(most)));
    for (uint8_t &byte : input) byte = uint8_t(random_bytes.next() >> 32);
    return input;
}
Input changed(Input input) {
    size_t now = input.size();
    const size_t most = std::max(now, size_t(kMaxChanged));
    input.resize(most);
    for (int times = 1 + random_bytes.below(4); times > 0; --times)
        now = LLVMFuzzerCustomMutator(input.data(), now, most, unsigned(random_bytes.next()));
    input.resize(now);
    return input;
}

} // namespace

// libFuzzer's function, for programs that are not linked to it.
extern "C" size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most) {
    if (size == 0) return 0;
    const auto random_index = [size] { return size_t(random_bytes.below(int(size))); };
    switch (random_bytes.below(4)) {
    case 0: data[random_index()] = uint8_t(random_bytes.next()); return size;
    case 1: data[random_index()] ^= uint8_t(1 << random_bytes.below(8)); return size;
    case 2: { // removes a range
        const size_t begin = random_index(), bytes = std::min(size - begin, size_t(1 + random_bytes.below(16)));
        std::memmove(data + begin, data + begin + bytes, size - begin - bytes);
        return size - bytes;
    }
    default: { // duplicates a range
        const size_t begin = random_index(),
                     bytes = std::min({size - begin, most - size, size_t(1 + random_bytes.below(16))});
        std::memmove(data + begin + bytes, data + begin, size - begin);
        return size + bytes;
    }
    }
}

int main(int argc, char **argv) {
    long seconds = 0, seed = 1, most = 600, inputs = 0;
    bool index = false;
    std::vector<fs::path> paths;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        long *const number = word == "--seconds" ? &seconds
                             : word == "--seed"  ? &seed
                             : word == "--bytes" ? &most
                                                 : nullptr;
        if (number != nullptr && i + 1 < argc) {
            *number = std::atol(argv[++i]);
        } else if (word == "--index") {
            index = true;
        } else if (fs::is_directory(word)) {
            const size_t first = paths.size();
            for (const fs::directory_entry &entry : fs::directory_iterator(word)) paths.push_back(entry.path());
            std::sort(paths.begin() + long(first), paths.end());
        } else {
            paths.push_back(word);
        }
    }
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) (void)std::signal(signal, write_finding);
    std::vector<Input> files;
    for (const fs::path &path : paths) {
        files.push_back(read(path));
        run(files.back(), 0);
        if (index) std::printf("%s\t%zu\t%s\n", path.filename().c_str(), files.back().size(), fuzz::outcome().c_str());
    }
    const bool changes = LLVMFuzzerCustomMutator != nullptr && !files.empty();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    for (; std::chrono::steady_clock::now() < end; ++inputs) {
        random_bytes = test::Random(uint64_t(seed + inputs));
        run(changes ? changed(files[size_t(random_bytes.below(int(files.size())))]) : random_input(int(most)),
            seed + inputs);
    }
    std::printf("%zu files and %ld %s inputs without a finding\n", files.size(), inputs,
                changes ? "changed" : "random");
    return files.size() + size_t(inputs) == 0 ? 2 : 0;
}
