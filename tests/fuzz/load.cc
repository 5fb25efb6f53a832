// SPDX-License-Identifier: Apache-2.0
// Loads checkpoints made of arbitrary bytes into optimizers of every kind. A rejected load must not change anything.
// After a successful load the optimizer can be saved, loaded and stepped, and then saved and loaded again.
//
// Format of an input: the optimizer, how to load, flags of dsopt_io, then for each file two lengths, header and data.
// Checksums are corrected here, so that a changed number reaches the checks after them.
//
// --seeds=FOLDER: runs nothing, writes checkpoints of all kinds of optimizers as inputs
#include "files.h"
#include "subject.h"
#include <fstream>
#include <functional>
#include <memory>
#include <optional>

namespace fuzz {
namespace {

constexpr size_t kMaxFiles = 5, kMaxLength = 20000; // of a header, and of a file's data

/// Flags: how an input is loaded.
enum Mode : uint8_t {
    kList = 1,       // dsopt_io.files
    kBadTensors = 2, // does not correct the tensors' checksums
    kBadHeader = 4,  // does not correct the header's checksum
    kUntrained = 8,  // loads into an optimizer that has not stepped
    kVerbatim = 16,  // corrects nothing
};

struct Input {
    uint8_t kind = 0, mode = 0, flags = 0;
    std::vector<File> files;

    static std::optional<Input> from(const uint8_t *data, size_t size) {
        if (size < 3) return {};
        Input input{data[0], data[1], data[2], {}};
        Bytes rest(reinterpret_cast<const char *>(data) + 3, size - 3);
        while (rest.size() >= 4 && input.files.size() < kMaxFiles) {
            uint16_t lengths[2];
            std::memcpy(lengths, rest.data(), sizeof lengths);
            rest.erase(0, sizeof lengths);
            File file;
            for (const auto &[part, length] :
                 {std::pair(&file.header, lengths[0]), std::pair(&file.data, lengths[1])}) {
                *part = rest.substr(0, length);
                rest.erase(0, length);
            }
            input.files.push_back(std::move(file));
        }
        if (input.files.empty()) return {};
        return input;
    }
    Bytes bytes() const {
        Bytes all = {char(kind), char(mode), char(flags)};
        for (const File &file : files) {
            const uint16_t lengths[] = {uint16_t(file.header.size()), uint16_t(file.data.size())};
            all.append(reinterpret_cast<const char *>(lengths), sizeof lengths);
            all += file.header + file.data;
        }
        return all;
    }
};

/// An optimizer that is ready for the next load, and its state. It is created again after a load has changed it.
struct ReadySubject {
    std::unique_ptr<Subject> subject;
    Bytes before;
};
ReadySubject &ready_subject(int kind, bool untrained) {
    static std::vector<ReadySubject> all(size_t(2 * kKinds));
    ReadySubject &ready = all[size_t(2 * kind + untrained)];
    if (ready.subject == nullptr) {
        ready.subject = std::make_unique<Subject>(kind);
        if (!untrained) ready.subject->train();
        ready.before = ready.subject->text(!untrained); // requesting the state would create it
    }
    return ready;
}

/// Loads into an optimizer that earlier inputs have used. The file of one rank is not enough for sharded state.
void load_again(int kind, const Bytes &file, uint32_t flags, const char *what) {
    if (Subject::is_sharded(kind)) return;
    static std::vector<std::unique_ptr<Subject>> all(static_cast<size_t>(kKinds));
    std::unique_ptr<Subject> &other = all[size_t(kind)];
    if (other == nullptr) {
        other = std::make_unique<Subject>(kind);
        other->train();
    }
    std::vector<Bytes> files{file};
    if (const dsopt_status status = other->load(files, false, flags); status != DSOPT_OK)
        finding("the file that was saved %s cannot be loaded: %s", what, dsopt_status_name(status));
}

void run(const Input &input) {
    const int kind = input.kind % kKinds;
    const bool untrained = input.mode & kUntrained;
    std::vector<Bytes> files;
    for (const File &file : input.files)
        files.push_back(input.mode & kVerbatim
                            ? file.header + file.data
                            : file.assembled(!(input.mode & kBadTensors), !(input.mode & kBadHeader)));
    ReadySubject &ready = ready_subject(kind, untrained);
    const dsopt_status status = ready.subject->load(files, input.mode & kList, input.flags);
    if (status == DSOPT_ERR_NOMEM) finding("the engine requests too much memory for this file");
    if (status != DSOPT_OK) {
        if (ready.subject->text(!untrained) != ready.before)
            finding("a refused load changed optimizer %d: %s", kind, dsopt_status_name(status));
        return;
    }
    const std::unique_ptr<Subject> subject = std::move(ready.subject);
    const uint32_t params = input.flags & DSOPT_IO_PARAMS;
    load_again(kind, subject->save(params), params, "after a load");
    subject->copy_as_f32();
    for (int i = 0; i < 3; ++i) (void)subject->step();
    for (const int64_t call : {0, 1, 100}) subject->query_reduction(call);
    load_again(kind, subject->save(0), 0, "after a load and steps");
}

// ------------------------------------------------------------------------------------------------------------ mutation
const char *const kNumbers[] = {"0",
                                "-1",
                                "1",
                                "2",
                                "3",
                                "4",
                                "7",
                                "2147483647",
                                "2147483648",
                                "-2147483648",
                                "4294967295",
                                "4294967296",
                                "9007199254740992",
                                "9223372036854775807",
                                "9223372036854775808",
                                "18446744073709551615",
                                "18446744073709551616",
                                "1e308",
                                "1e-320",
                                "nan",
                                "inf",
                                "-inf",
                                "1.5",
                                "-0",
                                "00",
                                " 1",
                                "0x10",
                                "1e999",
                                "65536",
                                ""};
constexpr uint32_t kWords[] = {0,          1,          2,          3,          4,          0xffffffff,
                               0x7fffffff, 0x80000000, 0x7ffffffe, 0x7fc00000, 0x7f800000, 0xff800000,
                               0x3f800000, 0x7f7fffff, 1u << 30,   1u << 29};

class Mutator {
public:
    Mutator(Input input, unsigned seed) : input_(std::move(input)), random_(seed) {}
    Input operator()() {
        for (int rounds = 1 + below(3); rounds > 0; --rounds)
            change(input_.files[size_t(below(int(input_.files.size())))]);
        for (File &file : input_.files)
            for (Bytes *part : {&file.header, &file.data}) part->resize(std::min(part->size(), kMaxLength));
        return std::move(input_);
    }

private:
    int below(int n) { return int(random_.next() % uint64_t(n)); }

    void change(File &file) {
        switch (below(10)) {
        case 0: input_.kind = uint8_t(below(kKinds)); break;
        case 1: input_.mode = uint8_t(below(2) != 0 ? below(2) : below(32)); break;
        case 2: input_.flags = uint8_t(below(2) != 0 ? 0 : below(128)); break;
        case 3: replace(file.header, numbers_of(file.header)); break;
        case 4: replace(file.header, values_of(file.header)); break;
        case 5: change_word(file.data); break;
        case 6: mutate(file.header, 256); break;
        case 7: mutate(file.data, 64); break;
        case 8: repeat(file.header); break;
        case 9: change_files(); break;
        }
    }
    using Range = std::pair<size_t, size_t>;
    static std::vector<Range> numbers_of(const Bytes &text) {
        std::vector<Range> all;
        for (size_t i = 0, end = 0; (i = text.find_first_of("0123456789", end)) != Bytes::npos;) {
            end = std::min(text.find_first_not_of("0123456789.e", i), text.size());
            if (end - i < 12) all.push_back({i, end}); // longer strings are checksums
        }
        return all;
    }
    /// Strings after a colon: metadata.
    static std::vector<Range> values_of(const Bytes &text) {
        std::vector<Range> all;
        for (size_t i = 0; (i = text.find("\":\"", i)) != Bytes::npos;) {
            i += 3;
            all.push_back({i, std::min(text.find('"', i), text.size())});
        }
        return all;
    }
    void replace(Bytes &text, const std::vector<Range> &ranges) {
        if (ranges.empty()) return;
        const auto [begin, end] = ranges[size_t(below(int(ranges.size())))];
        text.replace(begin, end - begin, kNumbers[below(int(std::size(kNumbers)))]);
    }
    void change_word(Bytes &data) {
        if (data.size() < 4) return;
        const int words = int(data.size() / 4);
        // Counters and schedules are near the end.
        const int index = below(3) == 0 ? std::max(words - 1 - below(48), 0) : below(words);
        std::memcpy(&data[4 * size_t(index)], &kWords[below(int(std::size(kWords)))], 4);
    }
    void mutate(Bytes &text, size_t more) {
        const size_t size = text.size();
        text.resize(size + more);
        text.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t *>(text.data()), size, text.size()));
    }
    void repeat(Bytes &text) {
        if (text.size() < 40) return;
        const Bytes piece = text.substr(size_t(below(int(text.size()))), size_t(1 + below(120)));
        text.insert(size_t(below(int(text.size()))), piece);
    }
    void change_files() {
        std::vector<File> &all = input_.files;
        const auto index = size_t(below(int(all.size())));
        if (below(2) != 0 && all.size() > 1)
            all.erase(all.begin() + long(index));
        else if (all.size() < kMaxFiles)
            all.push_back(File(all[index]));
        else
            std::swap(all[0], all[index]);
    }

    Input input_;
    test::Random random_;
};

// --------------------------------------------------------------------------------------------------------------- seeds
/// Kinds of which one loads files of the other.
struct Conversion {
    int from, to;
    uint8_t flags = DSOPT_IO_CONVERT;
};
constexpr Conversion kConversions[] = {{20, 21},
                                       {21, 20},
                                       {22, 23},
                                       {23, 22},
                                       {4, 26},
                                       {26, 4},
                                       {20, 22, DSOPT_IO_CONVERT | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_SCALER},
                                       {30, 31, DSOPT_IO_CONVERT | DSOPT_IO_NO_MASTERS | DSOPT_IO_NO_SCALER},
                                       {33, 30, DSOPT_IO_CONVERT}};

/// Gives files of sharded state the save_id of the first. Each rank has saved alone, and drawn its own.
void make_one_save(std::vector<File> &files) {
    constexpr std::string_view key = "\"save_id\":\"";
    const auto id_of = [&](Bytes &header) {
        const size_t at = header.find(key), begin = at + key.size();
        return at == Bytes::npos ? std::pair(size_t(0), size_t(0)) : std::pair(begin, header.find('"', begin) - begin);
    };
    const auto [begin, count] = id_of(files[0].header);
    const Bytes id = files[0].header.substr(begin, count);
    for (File &file : files) {
        const auto [at, old] = id_of(file.header);
        file.header.replace(at, old, id);
    }
}

void write_seeds(const std::string &folder) {
    for (int kind = 0; kind < kKinds; ++kind) {
        const auto write = [&](const std::string &name, const Input &input) {
            const Bytes bytes = input.bytes();
            std::ofstream(folder + "/" + std::to_string(kind) + "-" + name, std::ios::binary) << bytes;
        };
        for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_IO_PARAMS)}) {
            Subject subject(kind);
            subject.train();
            write(flags == 0 ? "state" : "params",
                  {uint8_t(kind), 0, uint8_t(flags), {File::split(subject.save(flags))}});
        }
        for (const int ranks : Subject::rank_counts(kind)) { // this many files
            Input input{uint8_t(kind), kList, 0, {}};
            for (int rank = 0; rank < ranks; ++rank) {
                Subject subject(kind, rank, ranks);
                subject.train();
                input.files.push_back(File::split(subject.save(0)));
            }
            make_one_save(input.files);
            write("ranks" + std::to_string(ranks), input);
        }
        for (const Conversion &conversion : kConversions) {
            if (conversion.to != kind) continue;
            Subject subject(conversion.from);
            subject.train();
            write("from" + std::to_string(conversion.from),
                  {uint8_t(kind), 0, conversion.flags, {File::split(subject.save(0))}});
        }
    }
}

} // namespace
} // namespace fuzz

extern "C" int LLVMFuzzerInitialize(int *argc, char ***argv) {
    constexpr const char *option = "--seeds=";
    for (int i = 1; i < *argc; ++i)
        if (std::strncmp((*argv)[i], option, std::strlen(option)) == 0) {
            fuzz::write_seeds((*argv)[i] + std::strlen(option));
            std::exit(0);
        }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz::count_runs();
    if (const std::optional<fuzz::Input> input = fuzz::Input::from(data, size)) fuzz::run(*input);
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed) {
    std::optional<fuzz::Input> input = fuzz::Input::from(data, size);
    if (!input || seed % 16 == 0) return LLVMFuzzerMutate(data, size, most);
    const fuzz::Bytes bytes = fuzz::Mutator(std::move(*input), seed)().bytes();
    if (bytes.size() > most) return LLVMFuzzerMutate(data, size, most);
    std::memcpy(data, bytes.data(), bytes.size());
    return bytes.size();
}
