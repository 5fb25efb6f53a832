// SPDX-License-Identifier: Apache-2.0
#include "dtype.h"
#include "safetensors.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <random>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

using namespace dsopt;
namespace fs = std::filesystem;

namespace {

constexpr size_t kPiece = size_t(4) << 20;

struct Folder { // of one test, gone when it ends
    Folder() {
        static std::atomic<int> counter{0};
        path = fs::path(testing::TempDir()) /
               ("dsopt_safetensors_" + std::to_string(::getpid()) + "_" + std::to_string(counter++));
        fs::create_directories(path);
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    std::string operator/(const std::string &name) const { return (path / name).string(); }
    size_t entries() const { return size_t(std::distance(fs::directory_iterator(path), fs::directory_iterator())); }
    fs::path path;
};

struct Content {
    Metadata metadata;
    std::vector<TensorEntry> tensors;
    std::vector<std::string> bytes;

    void add(const std::string &name, int32_t dtype, std::vector<int64_t> shape, uint64_t size) {
        std::mt19937 random(unsigned(tensors.size()) + 1);
        std::string data(size, '\0');
        for (char &byte : data) byte = char(random());
        tensors.push_back({name, dtype, std::move(shape), size});
        bytes.push_back(std::move(data));
    }
    Deliver deliver() const { // in turn in place and through the buffer
        return [this](size_t index, uint64_t offset, size_t count, void *buffer) -> const void * {
            const char *const data = bytes[index].data() + offset;
            return index % 2 ? std::memcpy(buffer, data, count) : data;
        };
    }
};

Content small() {
    Content content;
    content.metadata = {{"format", "1"}, {"algorithm", "adamw"}};
    content.add("a.exp_avg", DSOPT_F32, {2, 3}, 24);
    content.add("b.empty", DSOPT_F32, {0, 7}, 0);
    content.add("b.exp_avg", DSOPT_BF16, {5}, 10);
    content.add("b.step", DSOPT_I64, {}, 8);
    return content;
}

struct Memory { // both ends of the callbacks
    std::string data;
    int calls = 0, fail_at = -1;

    static int write(void *user, const void *data, size_t bytes) {
        auto *self = static_cast<Memory *>(user);
        if (self->calls++ == self->fail_at) return 4711;
        self->data.append(static_cast<const char *>(data), bytes);
        return 0;
    }
    static int read(void *user, uint64_t offset, void *data, size_t bytes) {
        auto *self = static_cast<Memory *>(user);
        if (self->calls++ == self->fail_at) return -42;
        if (offset > self->data.size() || bytes > self->data.size() - offset) return 99;
        std::memcpy(data, self->data.data() + offset, bytes);
        return 0;
    }
    dsopt_io io() {
        DSOPT_NEW(dsopt_io, io);
        io.user = this;
        io.write = write;
        io.read = read;
        io.total = data.size();
        return io;
    }
};

void save(Sink &sink, const Content &content) {
    write_safetensors(sink, content.metadata, content.tensors, content.deliver());
}
void save(const std::string &path, const Content &content) { save(*file_sink(path.c_str()), content); }
std::string image(const Content &content) {
    Memory memory;
    save(*callback_sink(memory.io()), content);
    return memory.data;
}
std::string slurp(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
void spill(const std::string &path, const std::string &data) { std::ofstream(path, std::ios::binary) << data; }

struct Outcome {
    dsopt_status status = DSOPT_OK;
    std::string text;
};
template <class F> Outcome outcome(F &&body) {
    try {
        body();
        return {};
    } catch (const Error &error) { return {error.status(), error.what()}; }
}

void load_all(std::unique_ptr<const Source> source) {
    const SafetensorsReader reader(std::move(source));
    for (size_t i = 0; i < reader.tensors().size(); ++i) reader.verify(i);
}
Outcome load(const std::string &data) {
    Memory memory{data};
    return outcome([&] { load_all(callback_source(memory.io())); });
}
bool refused(const Outcome &result) { return result.status == DSOPT_ERR_FORMAT || result.status == DSOPT_ERR_CHECKSUM; }

void expect_same(const SafetensorsReader &reader, const Content &content) {
    ASSERT_EQ(reader.tensors().size(), content.tensors.size());
    EXPECT_EQ(Metadata(reader.metadata().begin(), reader.metadata().end()), [&] {
        Metadata sorted = content.metadata;
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }());
    for (size_t i = 0; i < content.tensors.size(); ++i) {
        const size_t at = reader.find(content.tensors[i].name);
        ASSERT_NE(at, SafetensorsReader::npos) << content.tensors[i].name;
        const TensorEntry &entry = reader.tensors()[at];
        EXPECT_EQ(entry.name, content.tensors[i].name);
        EXPECT_EQ(entry.dtype, content.tensors[i].dtype);
        EXPECT_EQ(entry.shape, content.tensors[i].shape);
        ASSERT_EQ(entry.bytes, content.tensors[i].bytes);
        std::string data(entry.bytes, '\0');
        reader.verify(at, data.data());
        EXPECT_EQ(data, content.bytes[i]);
        for (const size_t offset : {size_t(0), size_t(entry.bytes / 2), size_t(entry.bytes)}) {
            std::string part(entry.bytes - offset, '\0');
            reader.read(at, offset, part.data(), part.size());
            EXPECT_EQ(part, content.bytes[i].substr(offset));
        }
    }
    EXPECT_EQ(reader.find("no such tensor"), SafetensorsReader::npos);
}

// ---- hand-made files: a header of any text with right checksums ----

std::string hex(XXH128_hash_t hash) {
    char text[33];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                  static_cast<unsigned long long>(hash.low64));
    return text;
}
std::string digest(const std::string &data) { return hex(XXH3_128bits(data.data(), data.size())); }

std::string with_length(std::string header) {
    const uint64_t length = header.size();
    return std::string(reinterpret_cast<const char *>(&length), 8) + header;
}
/// `rest` follows the digits of the header's checksum.
std::string file(const std::string &rest, const std::string &data = "") {
    const std::string start = R"({"__metadata__":{"header_xxh3":")";
    const std::string zeroed = with_length(start + std::string(32, '0') + rest);
    return zeroed.substr(0, 8) + start + digest(zeroed) + rest + data;
}
/// One tensor "t" with this description, and this many bytes of data, all 'x'.
std::string one(const std::string &description, size_t bytes) {
    const std::string data(bytes, 'x');
    return file(R"(","xxh3.t":")" + digest(data) + R"("},"t":)" + description + "}", data);
}
void expect_refused(const std::string &data, const std::string &reason) {
    const Outcome result = load(data);
    EXPECT_EQ(result.status, DSOPT_ERR_FORMAT) << reason;
    EXPECT_NE(result.text.find(reason), std::string::npos) << result.text;
}

// ---- round trips ----

TEST(Safetensors, FileAndCallbacksGiveTheSameBytesAndComeBack) {
    const Folder folder;
    const Content content = small();
    save(folder / "a.safetensors", content);
    const std::string data = image(content);
    EXPECT_EQ(slurp(folder / "a.safetensors"), data);
    EXPECT_EQ(folder.entries(), 1u);
    expect_same(SafetensorsReader(file_source((folder / "a.safetensors").c_str())), content);
    Memory memory{data};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, EveryDtypeComesBackAligned) {
    Content content;
    for (int round = 0; round < 3; ++round)
        for (const int32_t dtype : {DSOPT_U8, DSOPT_F32, DSOPT_F16, DSOPT_F64, DSOPT_BF16, DSOPT_I32, DSOPT_I64})
            content.add("t" + std::to_string(dtype) + "." + std::to_string(round), dtype, {3, round},
                        3 * uint64_t(round) * dtype_size(dtype));
    Memory memory{image(content)};
    const SafetensorsReader reader(callback_source(memory.io()));
    expect_same(reader, content);
    size_t last = 8;
    uint64_t offset = 0;
    for (const TensorEntry &entry : reader.tensors()) {
        const size_t size = dtype_size(entry.dtype);
        EXPECT_LE(size, last);
        EXPECT_EQ(offset % size, 0u) << entry.name;
        last = size;
        offset += entry.bytes;
    }
    EXPECT_EQ(memory.data.size() % 64, offset % 64);
}

TEST(Safetensors, HeaderIsTheDocumentedText) {
    Content content;
    content.metadata = {{"k", "v"}};
    content.add("t", DSOPT_U8, {3}, 3);
    const std::string &data = content.bytes[0];
    std::string rest =
        R"(","k":"v","xxh3.t":")" + digest(data) + R"("},"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
    rest.resize(3 * 64 - 8 - 32 - 32, ' '); // 3 * 64 is the first multiple of 64 with room for it
    EXPECT_EQ(image(content), file(rest, data));
}

TEST(Safetensors, NoTensorsAtAll) {
    Content content;
    EXPECT_EQ(image(content).size(), 128u);
    Memory memory{image(content)};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, TensorsAroundThePieceSizeComeBackPageAligned) {
    const Folder folder;
    Content content;
    for (const size_t size : {kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 5})
        content.add("t" + std::to_string(size), DSOPT_U8, {int64_t(size)}, size);
    save(folder / "big", content);
    EXPECT_EQ(fs::file_size(folder / "big"), 4096 + 5 * kPiece + 5);
    expect_same(SafetensorsReader(file_source((folder / "big").c_str())), content);
}

TEST(Safetensors, NamesAndMetadataMayHaveAnyText) {
    Content content;
    content.metadata = {
        {"\"quoted\"", "back\\slash\n\t\x01\x7f/"}, {"", ""}, {"xxh3", "z\xc3\xbcrich \xe2\x82\xac \xf0\x9f\x98\x80"}};
    content.add("", DSOPT_U8, {1}, 1);
    content.add("dtype", DSOPT_U8, {1}, 1);
    content.add("\"\\\x1f\xe6\x9d\x83\xe9\x87\x8d", DSOPT_U8, {1}, 1);
    content.add(std::string(5000, 'n'), DSOPT_U8, {1, 1, 1, 1, 1, 1, 1, 1}, 1);
    Memory memory{image(content)};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, HundredThousandTensorsInReasonableTime) {
    Content content;
    for (int i = 0; i < 100'000; ++i) {
        content.tensors.push_back({"layer." + std::to_string(i) + ".exp_avg", DSOPT_U8, {1}, 1});
        content.bytes.push_back(std::string(1, char(i)));
    }
    const auto start = std::chrono::steady_clock::now();
    Memory memory{image(content)};
    const SafetensorsReader reader(callback_source(memory.io()));
    for (size_t i = 0; i < reader.tensors().size(); ++i) reader.verify(i);
    EXPECT_EQ(reader.tensors().size(), 100'000u);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)); // 0.3 s without a sanitizer
}

// ---- damage ----

TEST(Safetensors, RefusesEveryBitFlipOfASmallFile) {
    std::string data = image(small());
    ASSERT_EQ(load(data).status, DSOPT_OK);
    for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
        data[bit / 8] = char(data[bit / 8] ^ (1 << bit % 8));
        const Outcome result = load(data);
        EXPECT_TRUE(refused(result)) << "bit " << bit << ": " << result.text;
        data[bit / 8] = char(data[bit / 8] ^ (1 << bit % 8));
    }
}

TEST(Safetensors, NamesTheTensorWhoseDataAreDamaged) {
    std::string data = image(small());
    data.back() = char(data.back() ^ 1);
    const Outcome result = load(data);
    EXPECT_EQ(result.status, DSOPT_ERR_CHECKSUM);
    EXPECT_NE(result.text.find("\"b.exp_avg\""), std::string::npos) << result.text;
}

TEST(Safetensors, RefusesEveryTruncation) {
    const std::string data = image(small());
    for (size_t size = 0; size < data.size(); ++size)
        EXPECT_EQ(load(data.substr(0, size)).status, DSOPT_ERR_FORMAT) << size;
}

TEST(Safetensors, RefusesAnAppendedByte) {
    expect_refused(image(small()) + '\0', "appended");
    expect_refused(image(small()) + ' ', "appended");
}

TEST(Safetensors, RefusesWrongHeaderLengths) {
    std::string data = image(small());
    for (const uint64_t length : {uint64_t(1) << 63, ~uint64_t(0), ~uint64_t(0) - 7, uint64_t(100'000'001),
                                  uint64_t(data.size()), uint64_t(data.size()) - 7, uint64_t(0), uint64_t(1)}) {
        std::memcpy(data.data(), &length, 8);
        EXPECT_EQ(load(data).status, DSOPT_ERR_FORMAT) << length;
    }
}

TEST(Safetensors, RefusesPlainSafetensors) {
    const std::string header =
        R"({"__metadata__":{"format":"pt"},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
    expect_refused(with_length(header) + "x", "not a dsopt checkpoint");
    expect_refused(with_length("{}"), "not a dsopt checkpoint");
    expect_refused("PK\x03\x04 an archive of another framework", "not a checkpoint");
}

TEST(Safetensors, RefusesATensorWithoutChecksumAndAChecksumWithoutTensor) {
    expect_refused(file(R"("},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"), "\"t\" has no checksum");
    expect_refused(file(R"(","xxh3.u":"0"}})"), "\"xxh3.u\" belongs to no tensor");
}

// ---- headers with right checksums and wrong content ----

TEST(Safetensors, HandMadeFilesAreReadableAtAll) {
    EXPECT_EQ(load(one(R"({"dtype":"U8","shape":[3],"data_offsets":[0,3]})", 3)).text, "");
    EXPECT_EQ(load(one("{ \"data_offsets\" : [0, 3],\n\"shape\":[3,1] ,\t\"dtype\":\"\\u0055\\u0038\" }\r", 3)).text,
              "");
    EXPECT_EQ(load(one(R"({"dtype":"F64","shape":[],"data_offsets":[0,8]})", 8)).text, "");
}

TEST(Safetensors, RefusesHolesAndOverlaps) {
    expect_refused(one(R"({"dtype":"U8","shape":[3],"data_offsets":[1,4]})", 4), "hole");
    const std::string sums = R"(","xxh3.a":"","xxh3.b":""},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":)";
    expect_refused(file(sums + R"({"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", "xxxxxx"), "\"b\": overlap");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[1],"data_offsets":[5,6]}})", "xxxxxx"), "\"b\": hole");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[1],"data_offsets":[4,5]}})", "xxxxxx"), "appended");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", "xxxxxx"), "cut off");
}

TEST(Safetensors, RefusesDataOffsetsThatDoNotFitTheShape) {
    expect_refused(one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,3]})", 3), "do not fit the shape");
    expect_refused(one(R"({"dtype":"U8","shape":[0],"data_offsets":[0,18446744073709551615]})", 3), "do not fit");
    expect_refused(one(R"({"dtype":"U8","shape":[3],"data_offsets":[3,0]})", 3), "hole");
    expect_refused(one(R"({"dtype":"U8","shape":[3],"data_offsets":[0]})", 3), "missing");
    expect_refused(one(R"({"dtype":"U8","shape":[3],"data_offsets":[0,3,3]})", 3), "more than two");
}

TEST(Safetensors, RefusesShapesThatOverflow) {
    for (const char *shape : {"4294967296,4294967296", "9223372036854775807,3", "9223372036854775808",
                              "18446744073709551615", "4294967296,4294967296,0", "2305843009213693952,8"})
        expect_refused(one(std::string(R"({"dtype":"F64","shape":[)") + shape + R"(],"data_offsets":[0,0]})", 0),
                       "overflow");
    expect_refused(one(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})", 1), "too many dimensions");
    for (const char *shape : {"-1", "1.0", "1e0", "18446744073709551616", "\"1\"", "null", "true", "[1]", "{}", "-0"})
        expect_refused(one(std::string(R"({"dtype":"U8","shape":[)") + shape + R"(],"data_offsets":[0,1]})", 1),
                       "tensor \"t\"");
}

TEST(Safetensors, RefusesDuplicateNames) {
    const std::string tensor = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    const std::string sum = R"(","xxh3.t":")" + digest("") + '"';
    EXPECT_EQ(load(file(sum + R"(},"t":)" + tensor + "}")).text, "");
    expect_refused(file(sum + R"(},"t":)" + tensor + R"(,"t":)" + tensor + "}"), "tensor \"t\" is there twice");
    expect_refused(file(sum + R"(},"t":)" + tensor + R"(,"\u0074":)" + tensor + "}"), "tensor \"t\" is there twice");
    expect_refused(file(sum + R"(,"k":"1","k":"2"},"t":)" + tensor + "}"), "metadata key \"k\": is there twice");
    expect_refused(file(sum + R"(,"header_xxh3":""},"t":)" + tensor + "}"), "\"header_xxh3\": is there twice");
    expect_refused(file(sum + R"(},"t":)" + tensor + R"(,"__metadata__":{}})"), "__metadata__ is there twice");
    for (const char *field : {R"("dtype":"U8")", R"("shape":[0])", R"("data_offsets":[0,0])"})
        expect_refused(one(tensor.substr(0, tensor.size() - 1) + "," + field + "}", 0), "is there twice");
}

TEST(Safetensors, RefusesMissingUnknownAndMisplacedFields) {
    for (const char *tensor : {"{}", R"({"shape":[1],"data_offsets":[0,1]})", R"({"dtype":"U8","data_offsets":[0,1]})",
                               R"({"dtype":"U8","shape":[1]})"})
        expect_refused(one(tensor, 1), "missing");
    expect_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]})", 1),
                   "unknown field \"strides\"");
    for (const char *dtype : {"f32", "F8", "", "U8 ", "U8\\u0000"})
        expect_refused(one(std::string(R"({"dtype":")") + dtype + R"(","shape":[1],"data_offsets":[0,1]})", 1),
                       "unknown dtype");
    for (const char *tensor : {"1", "\"U8\"", "[]", "null", R"({"dtype":1})", R"({"dtype":{}})", R"({"dtype":["U8"]})",
                               R"({"shape":1})", R"({"shape":{}})", R"({"shape":"1"})", R"({"data_offsets":0})"})
        expect_refused(one(tensor, 1), "tensor \"t\": a value of a wrong kind");
    for (const char *value : {"1", "null", "{}", "[]", "true"})
        expect_refused(file(std::string(R"(","k":)") + value + "}}"), "metadata key \"k\": a value of a wrong kind");
}

TEST(Safetensors, RefusesWhatIsNotJson) {
    for (const char *rest :
         {"", "\"", "\"}", "\"}}}", "\"}}{}", "\"}} x", "\"},}", "\",}}", "\"}/**/}", "\"},\"t\"}", "\",'k':'v'}}"})
        expect_refused(file(rest), "not valid JSON");
    using namespace std::string_literals;
    expect_refused(file("\"}}\0"s), "not valid JSON");
    expect_refused(file("\"}}\0  {}"s), "not valid JSON");
    expect_refused(file("\"}\0}"s), "not valid JSON");
}

TEST(Safetensors, RefusesDeepNesting) {
    const size_t depth = 1'000'000;
    expect_refused(file("\"},\"t\":" + std::string(depth, '[')), "tensor \"t\"");
    expect_refused(one(R"({"dtype":"U8","shape":)" + std::string(depth, '[') + std::string(depth, ']') + "}", 1),
                   "\"t\"");
    std::string objects = "\"},\"t\":";
    for (size_t i = 0; i < depth; ++i) objects += "{\"dtype\":";
    expect_refused(file(objects), "tensor \"t\"");
}

TEST(Safetensors, RefusesNulAndInvalidUtf8) {
    std::vector<std::string> raw = {"\x80", "\xc3", "\xff", "a\xe2\x82"}; // then overlong, surrogate, out of range
    raw.insert(raw.end(), {"\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xed\xa0\x80"});
    raw.insert(raw.end(), {"\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"});
    std::vector<std::string> escaped = {"\\u0000", "a\\u0000b", "\\ud800", "\\udc00", "\\ud800\\u0041"};
    escaped.insert(escaped.end(), raw.begin(), raw.end());
    for (const std::string &text : escaped) {
        for (const std::string &rest :
             {"\",\"k\":\"" + text + "\"}}", "\",\"" + text + "\":\"v\"}}",
              "\"},\"" + text + "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"}) {
            const Outcome result = load(file(rest));
            EXPECT_EQ(result.status, DSOPT_ERR_FORMAT) << rest;
            for (const char c : result.text) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << result.text;
        }
    }
    std::vector<std::string> written = raw;
    written.push_back(std::string(1, '\0'));
    for (const std::string &text : written) {
        Content name, key, value;
        name.add(text, DSOPT_U8, {0}, 0);
        key.metadata = {{text, "v"}};
        value.metadata = {{"k", text}};
        for (const Content *content : {&name, &key, &value})
            EXPECT_EQ(outcome([&] { image(*content); }).status, DSOPT_ERR_ARGUMENT);
    }
}

TEST(Safetensors, RefusesAMillionMetadataKeys) { // each would take ten times its bytes in the file
    std::string rest = "\"";
    for (int i = 0; i <= 1 << 20; ++i) rest += ",\"" + std::to_string(i) + "\":\"\"";
    expect_refused(file(rest + "}}"), "too many keys");
}

TEST(Safetensors, LongNamesAreCutInMessagesBetweenCharacters) {
    std::string name;
    for (int i = 0; i < 200; ++i) name += "\xe6\x9d\x83";
    expect_refused(file("\"},\"" + name + "\":1}"), "\xe6\x9d\x83...\xe6\x9d\x83");
    EXPECT_LT(load(file("\"},\"" + name + "\":1}")).text.size(), 250u);
}

// ---- what a writer is given ----

TEST(Safetensors, RefusesToWriteWrongLists) {
    const auto status_of = [](auto &&change) {
        Content content = small();
        change(content);
        return outcome([&] { image(content); }).status;
    };
    EXPECT_EQ(status_of([](Content &c) { c.add("a.exp_avg", DSOPT_U8, {1}, 1); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Content &c) { c.add("__metadata__", DSOPT_U8, {1}, 1); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Content &c) { c.metadata.push_back({"format", "2"}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Content &c) { c.metadata.push_back({"header_xxh3", ""}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Content &c) { c.metadata.push_back({"xxh3.a", ""}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Content &c) { c.tensors.resize(1 << 20); }), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(status_of([](Content &c) { c.tensors[0].dtype = 0; }), DSOPT_ERR_DTYPE);
    EXPECT_EQ(status_of([](Content &c) { c.tensors[0].bytes += 1; }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Content &c) { c.tensors[0].shape = {-2, -3}; }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Content &c) { c.tensors[0].shape = std::vector<int64_t>(9, 1); }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Content &c) {
                  const uint64_t half = uint64_t(1) << 62;
                  for (const char *name : {"x", "y", "z", "w", "v"})
                      c.tensors.push_back({name, DSOPT_U8, {int64_t(half)}, half});
              }),
              DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Content &c) {
                  c.metadata.push_back({"long", std::string(100'000'000, 'x')});
              }),
              DSOPT_ERR_UNSUPPORTED);
}

TEST(Safetensors, ATensorThatChangesMeanwhileIsNotSaved) {
    const Folder folder;
    const Content content = small();
    save(folder / "a", content);
    const std::string before = slurp(folder / "a");
    int asked = 0;
    const auto deliver = [&](size_t index, uint64_t offset, size_t, void *) -> const void * {
        static std::string other;
        other = content.bytes[index];
        if (++asked == 5) other[3] = char(other[3] ^ 1); // three tensors have data: the second of the second pass
        return other.data() + offset;
    };
    const Outcome result = outcome(
        [&] { write_safetensors(*file_sink((folder / "a").c_str()), content.metadata, content.tensors, deliver); });
    EXPECT_EQ(result.status, DSOPT_ERR_BUSY);
    EXPECT_NE(result.text.find("\"a.exp_avg\""), std::string::npos) << result.text;
    EXPECT_EQ(slurp(folder / "a"), before);
    EXPECT_EQ(folder.entries(), 1u);
}

// ---- callbacks ----

TEST(Safetensors, AWriteCallbackThatFailsEndsTheSaveAtEveryCall) {
    Memory good;
    save(*callback_sink(good.io()), small());
    ASSERT_EQ(good.calls, 4); // the header and three tensors with data
    for (int call = 0; call < good.calls; ++call) {
        Memory memory;
        memory.fail_at = call;
        const Outcome result = outcome([&] { save(*callback_sink(memory.io()), small()); });
        EXPECT_EQ(result.status, DSOPT_ERR_IO);
        EXPECT_NE(result.text.find("4711"), std::string::npos) << result.text;
        EXPECT_EQ(memory.calls, call + 1);
        EXPECT_EQ(memory.data, good.data.substr(0, memory.data.size()));
    }
}

TEST(Safetensors, AReadCallbackThatFailsEndsTheLoadAtEveryCall) {
    Memory good{image(small())};
    load_all(callback_source(good.io()));
    ASSERT_EQ(good.calls, 5); // length, header, three tensors with data
    for (int call = 0; call < good.calls; ++call) {
        Memory memory{good.data};
        memory.fail_at = call;
        const Outcome result = outcome([&] { load_all(callback_source(memory.io())); });
        EXPECT_EQ(result.status, DSOPT_ERR_IO);
        EXPECT_NE(result.text.find("-42"), std::string::npos) << result.text;
        EXPECT_EQ(memory.calls, call + 1);
    }
}

TEST(Safetensors, RefusesCallbacksThatAreMissing) {
    DSOPT_NEW(dsopt_io, io);
    EXPECT_EQ(outcome([&] { callback_sink(io); }).status, DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(outcome([&] { callback_source(io); }).status, DSOPT_ERR_ARGUMENT);
}

TEST(Safetensors, ReadsBehindATensorAreRefused) {
    Memory memory{image(small())};
    const SafetensorsReader reader(callback_source(memory.io()));
    char data[64];
    const size_t at = reader.find("a.exp_avg");
    EXPECT_EQ(outcome([&] { reader.read(at, 24, data, 0); }).status, DSOPT_OK);
    EXPECT_EQ(outcome([&] { reader.read(at, 24, data, 1); }).status, DSOPT_ERR_INTERNAL);
    EXPECT_EQ(outcome([&] { reader.read(at, ~uint64_t(0), data, 2); }).status, DSOPT_ERR_INTERNAL);
}

// ---- files ----

Outcome save_outcome(const std::string &path, const Content &content = small()) {
    return outcome([&] { save(path, content); });
}
Outcome load_outcome(const std::string &path) {
    return outcome([&] { load_all(file_source(path.c_str())); });
}
void expect_io(const Outcome &result, const std::string &reason) {
    EXPECT_EQ(result.status, DSOPT_ERR_IO) << result.text;
    EXPECT_NE(result.text.find(reason), std::string::npos) << result.text;
}

TEST(SafetensorsFile, WrongPathsAreIoErrorsWithAReason) {
    const Folder folder;
    fs::create_directory(folder / "directory");
    ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
    std::string dots = folder.path.string();
    while (dots.size() < 4090) dots += "/."; // the directory alone is not too long, the path is
    for (const auto &[path, saved, loaded] : std::initializer_list<std::tuple<std::string, std::string, std::string>>{
             {folder / "directory", "Is a directory", "Is a directory"},
             {folder / "directory/", "Is a directory", "Is a directory"},
             {folder / "directory/..", "Is a directory", "Is a directory"},
             {folder / "fifo", "not a regular file", "not a regular file"},
             {folder / "missing/file", "No such file", "No such file"},
             {"", "No such file", "No such file"},
             {folder / std::string(4096, 'n'), "name too long", "name too long"},
             {folder / std::string(256, 'n'), "name too long", "name too long"},
             {dots + "/abcdef", "name too long", "name too long"}}) {
        expect_io(save_outcome(path), saved);
        expect_io(load_outcome(path), loaded);
    }
    EXPECT_EQ(folder.entries(), 2u);
}

TEST(SafetensorsFile, ANameOfTheGreatestLengthIsFine) {
    const Folder folder;
    const std::string path = folder / std::string(255, 'n');
    EXPECT_EQ(save_outcome(path).text, "");
    EXPECT_EQ(load_outcome(path).text, "");
}

TEST(SafetensorsFile, APathWithoutDirectoryIsInTheCurrentOne) {
    const Folder folder;
    const fs::path before = fs::current_path();
    fs::current_path(folder.path);
    const Outcome saved = save_outcome("plain"), loaded = load_outcome("plain");
    fs::current_path(before);
    EXPECT_EQ(saved.text + loaded.text, "");
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, AReadOnlyDirectoryIsAnIoError) {
    if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
    const Folder folder;
    fs::permissions(folder.path, fs::perms::owner_read | fs::perms::owner_exec);
    expect_io(save_outcome(folder / "a"), "Permission denied");
    fs::permissions(folder.path, fs::perms::owner_all);
}

TEST(SafetensorsFile, ModeFollowsTheUmaskAndThenTheExistingFile) {
    const Folder folder;
    const mode_t before = ::umask(027);
    save(folder / "a", small());
    ::umask(0);
    struct stat now;
    ::stat((folder / "a").c_str(), &now);
    EXPECT_EQ(now.st_mode & 0777, 0640u);
    ::chmod((folder / "a").c_str(), 0400);
    save(folder / "a", small());
    ::umask(before);
    ::stat((folder / "a").c_str(), &now);
    EXPECT_EQ(now.st_mode & 0777, 0400u);
}

TEST(SafetensorsFile, ASymlinkStaysAndTheFileBehindItIsReplaced) {
    const Folder folder;
    fs::create_directory(folder / "disk");
    fs::create_symlink("disk/file", folder / "relative"); // dangling at first
    fs::create_symlink(folder / "relative", folder / "absolute");
    fs::create_symlink("loop", folder / "loop");
    EXPECT_EQ(save_outcome(folder / "absolute").text, "");
    EXPECT_EQ(save_outcome(folder / "relative").text, "");
    EXPECT_TRUE(fs::is_symlink(folder / "absolute"));
    EXPECT_TRUE(fs::is_symlink(folder / "relative"));
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder / "disk/file")));
    EXPECT_EQ(load_outcome(folder / "absolute").text, "");
    expect_io(save_outcome(folder / "loop"), "symbolic links");
}

TEST(SafetensorsFile, AFileBeingReadCanBeReplaced) {
    const Folder folder;
    save(folder / "a", small());
    const SafetensorsReader reader(file_source((folder / "a").c_str()));
    Content other = small();
    other.metadata = {};
    save(folder / "a", other);
    expect_same(reader, small());
    expect_same(SafetensorsReader(file_source((folder / "a").c_str())), other);
}

TEST(SafetensorsFile, AFileThatBecomesShorterWhileReadIsAnIoError) {
    const Folder folder;
    save(folder / "a", small());
    const SafetensorsReader reader(file_source((folder / "a").c_str()));
    fs::resize_file(folder / "a", fs::file_size(folder / "a") - 1);
    expect_io(outcome([&] { reader.verify(reader.find("b.exp_avg")); }), "shorter");
}

TEST(SafetensorsFile, TwoSaversToOneNameBothSucceed) {
    const Folder folder;
    const Content content = small();
    Content other = small();
    other.metadata = {};
    const auto slow = file_sink((folder / "a").c_str());
    bool first = true;
    write_safetensors(*slow, content.metadata, content.tensors,
                      [&](size_t index, uint64_t offset, size_t, void *) -> const void * {
                          if (std::exchange(first, false))
                              save(folder / "a", other); // must not sweep the temporary of `slow`
                          return content.bytes[index].data() + offset;
                      });
    expect_same(SafetensorsReader(file_source((folder / "a").c_str())), content);
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, ASinkThatIsNotCommittedLeavesNothing) {
    const Folder folder;
    save(folder / "a", small());
    const std::string before = slurp(folder / "a");
    {
        const auto sink = file_sink((folder / "a").c_str());
        sink->begin(1000);
        sink->write("half", 4);
        EXPECT_EQ(folder.entries(), 2u);
    }
    EXPECT_EQ(folder.entries(), 1u);
    EXPECT_EQ(slurp(folder / "a"), before);
}

/// The largest file that the process may write, for a moment; writing over it is an error and no signal.
struct FileSizeLimit {
    explicit FileSizeLimit(rlim_t bytes) {
        handler = std::signal(SIGXFSZ, SIG_IGN);
        ::getrlimit(RLIMIT_FSIZE, &before);
        set(bytes);
    }
    ~FileSizeLimit() {
        ::setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
    }
    void set(rlim_t bytes) const {
        const rlimit limit{bytes, before.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    rlimit before;
    void (*handler)(int);
};

TEST(SafetensorsFile, NoRoomForTheFileLeavesTheOldOneAndNothingElse) {
    const Folder folder;
    save(folder / "a", small());
    const std::string before = slurp(folder / "a");
    Content large;
    large.add("large", DSOPT_U8, {3'000'000}, 3'000'000);
    const auto not_asked = [](size_t, uint64_t, size_t, void *) -> const void * { throw std::logic_error("too late"); };
    const Outcome early = outcome([&] {
        const FileSizeLimit limit(100'000);
        write_safetensors(*file_sink((folder / "a").c_str()), {}, large.tensors, not_asked);
    });
    expect_io(early, "File too large");
    EXPECT_NE(early.text.find(folder / "a"), std::string::npos) << early.text;
    // The room goes only when part of the data are written: the first write is short, the next one fails.
    const Outcome late = outcome([&] {
        const FileSizeLimit limit(RLIM_INFINITY);
        int asked = 0;
        write_safetensors(*file_sink((folder / "a").c_str()), {}, large.tensors,
                          [&](size_t index, uint64_t offset, size_t, void *) {
                              if (++asked == 2) limit.set(2'000'000);
                              return static_cast<const void *>(large.bytes[index].data() + offset);
                          });
    });
    expect_io(late, "File too large");
    EXPECT_EQ(slurp(folder / "a"), before);
    EXPECT_EQ(folder.entries(), 1u);
}

// ---- crashes ----

Content of_step(uint64_t step) { // contents follow from the step, so a mixture of two steps is seen
    Content content;
    content.metadata = {{"step", std::to_string(step)}};
    for (const char *name : {"exp_avg", "exp_avg_sq"}) {
        std::mt19937_64 random(step + content.tensors.size());
        std::string data(64 << 10, '\0');
        for (size_t i = 0; i < data.size(); i += 8) {
            const uint64_t value = random();
            std::memcpy(&data[i], &value, 8);
        }
        content.tensors.push_back({name, DSOPT_F32, {int64_t(data.size() / 4)}, data.size()});
        content.bytes.push_back(std::move(data));
    }
    return content;
}

TEST(SafetensorsFile, KilledAtAnyMomentTheFileIsWholeAndNotOlderThanAcknowledged) {
    const Folder folder;
    const std::string path = folder / "state.safetensors";
    save(path, of_step(1));
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 5; ++i) save(path, of_step(1));
    const auto five = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
    std::mt19937 random(7);
    uint64_t last = 1;
    size_t interrupted = 0; // in the middle of a save
    int kill = 0;
    for (; kill < 200; ++kill) {
        int pipe[2];
        ASSERT_EQ(::pipe(pipe), 0);
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            for (uint64_t step = last + 1;; ++step) {
                if (save_outcome(path, of_step(step)).status != DSOPT_OK) ::_exit(1);
                if (::write(pipe[1], &step, sizeof step) != sizeof step) ::_exit(1);
            }
        }
        ::close(pipe[1]);
        uint64_t acknowledged = last, step;
        if (kill % 2 && ::read(pipe[0], &step, sizeof step) == sizeof step) acknowledged = step; // in the second save
        ::usleep(useconds_t(random() % uint64_t(five.count() / 4 + 1)));
        ::kill(child, SIGKILL);
        int status = 0;
        ::waitpid(child, &status, 0);
        EXPECT_TRUE(WIFSIGNALED(status)) << "a save failed";
        while (::read(pipe[0], &step, sizeof step) == sizeof step) acknowledged = step;
        ::close(pipe[0]);
        EXPECT_LE(folder.entries(), 2u); // more would say that the next save does not sweep
        interrupted += folder.entries() - 1;
        const SafetensorsReader reader(file_source(path.c_str()));
        last = std::stoull(reader.metadata().at("step"));
        EXPECT_GE(last, acknowledged);
        expect_same(reader, of_step(last));
    }
    EXPECT_GT(last, 1u);
    EXPECT_GT(interrupted, 0u);
    std::printf("%d kills, %zu of them in the middle of a save, step %s\n", kill, interrupted,
                std::to_string(last).c_str());
    save(path, of_step(last));
    EXPECT_EQ(folder.entries(), 1u);
}

TEST(SafetensorsFile, SweepsTemporariesOfDeadSaversOfTheSameTargetOnly) {
    const Folder folder;
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        for (const char *target : {"a", "a", "b"}) {
            auto sink = file_sink((folder / target).c_str());
            sink->begin(100'000);
            (void)sink.release(); // so that nobody removes the temporary
        }
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_EQ(folder.entries(), 3u);
    spill(folder / ".dsopt-notes.tmp", "the user's own");
    save(folder / "a", small());
    EXPECT_EQ(folder.entries(), 3u); // "a", the temporary of "b", the user's own
    save(folder / "b", small());
    EXPECT_EQ(folder.entries(), 3u);
    EXPECT_EQ(slurp(folder / ".dsopt-notes.tmp"), "the user's own");
}

} // namespace
