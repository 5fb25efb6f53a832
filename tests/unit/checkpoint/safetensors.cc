// SPDX-License-Identifier: Apache-2.0
// The safetensors format: bytes, checksums and refusal of invalid content. safetensors_files.cc tests it on disk.
#include "support/safetensors.h"
#include "base/dtype.h"
#include <ctime>

#define XXH_INLINE_ALL
#include <xxhash.h>

using namespace test;

LABEL_FILE(one_thread);

namespace checkpoint_safetensors_tests {

constexpr size_t kPiece = size_t(4) << 20;

// ---- hand-made files: any text as header, with valid checksums ----

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
/// Returns a file with a valid header checksum. `rest` follows the digits of the checksum.
std::string file(const std::string &rest, const std::string &data = "") {
    const std::string start = R"({"__metadata__":{"header_xxh3":")";
    const std::string zeroed = with_length(start + std::string(32, '0') + rest);
    return zeroed.substr(0, 8) + start + digest(zeroed) + rest + data;
}
/// Returns a file of one tensor "t" with this description and `bytes` bytes of data, all 'x'.
std::string one_tensor(const std::string &description, size_t bytes) {
    const std::string data(bytes, 'x');
    return file(R"(","xxh3.t":")" + digest(data) + R"("},"t":)" + description + "}", data);
}
void expect_refused(const std::string &data, const std::string &reason) {
    const ReadOutcome result = load(data);
    EXPECT_EQ(result.status, DSOPT_ERR_FORMAT) << reason;
    EXPECT_NE(result.text.find(reason), std::string::npos) << result.text;
}

// ---- round trips ----

TEST(Safetensors, RoundTripsThroughFileAndCallbacks) {
    const Folder folder;
    const Container content = small();
    save(folder / "a.safetensors", content);
    const std::string data = image(content);
    EXPECT_EQ(read_file(folder / "a.safetensors"), data);
    EXPECT_EQ(folder.entries(), 1u);
    expect_same(SafetensorsReader(file_source((folder / "a.safetensors").c_str())), content);
    MemoryFile memory{data};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, RoundTripsEveryDtypeAligned) {
    Container content;
    for (int round = 0; round < 3; ++round)
        for (const int32_t dtype :
             std::initializer_list<int32_t>{DSOPT_DTYPE_U8, DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_F64,
                                            DSOPT_DTYPE_BF16, DSOPT_DTYPE_I32, dsopt::kI64})
            content.add("t" + std::to_string(dtype) + "." + std::to_string(round), dtype, {3, round},
                        3 * uint64_t(round) * dtype_size(dtype));
    MemoryFile memory{image(content)};
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

TEST(Safetensors, WritesDocumentedHeader) {
    Container content;
    content.metadata = {{"k", "v"}};
    content.add("t", DSOPT_DTYPE_U8, {3}, 3);
    const std::string &data = content.bytes[0];
    std::string rest =
        R"(","k":"v","xxh3.t":")" + digest(data) + R"("},"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})";
    rest.resize(3 * 64 - 8 - 32 - 32, ' '); // 3 * 64 is the first multiple of 64 that the header fits in
    EXPECT_EQ(image(content), file(rest, data));
}

TEST(Safetensors, RoundTripsFileWithoutTensors) {
    Container content;
    EXPECT_EQ(image(content).size(), 128u);
    MemoryFile memory{image(content)};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, RoundTripsTensorsAroundPieceSize) {
    const Folder folder;
    Container content;
    for (const size_t size : {kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 5})
        content.add("t" + std::to_string(size), DSOPT_DTYPE_U8, {int64_t(size)}, size);
    save(folder / "big", content);
    EXPECT_EQ(fs::file_size(folder / "big"), 4096 + 5 * kPiece + 5);
    expect_same(SafetensorsReader(file_source((folder / "big").c_str())), content);
}

TEST(Safetensors, AcceptsAnyTextInNamesAndMetadata) {
    Container content;
    content.metadata = {
        {"\"quoted\"", "back\\slash\n\t\x01\x7f/"}, {"", ""}, {"xxh3", "z\xc3\xbcrich \xe2\x82\xac \xf0\x9f\x98\x80"}};
    content.add("", DSOPT_DTYPE_U8, {1}, 1);
    content.add("dtype", DSOPT_DTYPE_U8, {1}, 1);
    content.add("\"\\\x1f\xe6\x9d\x83\xe9\x87\x8d", DSOPT_DTYPE_U8, {1}, 1);
    content.add(std::string(5000, 'n'), DSOPT_DTYPE_U8, {1, 1, 1, 1, 1, 1, 1, 1}, 1);
    MemoryFile memory{image(content)};
    expect_same(SafetensorsReader(callback_source(memory.io())), content);
}

TEST(Safetensors, HandlesHundredThousandTensors) {
    Container content;
    for (int i = 0; i < 100'000; ++i) {
        content.tensors.push_back({"layer." + std::to_string(i) + ".exp_avg", DSOPT_DTYPE_U8, {1}, 1});
        content.bytes.push_back(std::string(1, char(i)));
    }
    const std::clock_t start = std::clock(); // processor time: independent of other processes
    MemoryFile memory{image(content)};
    const SafetensorsReader reader(callback_source(memory.io()));
    for (size_t i = 0; i < reader.tensors().size(); ++i) reader.verify(i);
    EXPECT_EQ(reader.tensors().size(), 100'000u);
    EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 20); // 0.3 s without a sanitizer
}

// ---- damage ----

TEST(Safetensors, RefusesEveryBitFlip) {
    std::string data = image(small());
    ASSERT_EQ(load(data).status, DSOPT_OK);
    for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
        data[bit / 8] = char(data[bit / 8] ^ (1 << bit % 8));
        const ReadOutcome result = load(data);
        EXPECT_TRUE(refused(result)) << "bit " << bit << ": " << result.text;
        data[bit / 8] = char(data[bit / 8] ^ (1 << bit % 8));
    }
}

TEST(Safetensors, NamesDamagedTensor) {
    std::string data = image(small());
    data.back() = char(data.back() ^ 1);
    const ReadOutcome result = load(data);
    EXPECT_EQ(result.status, DSOPT_ERR_CHECKSUM);
    EXPECT_NE(result.text.find("\"b.exp_avg\""), std::string::npos) << result.text;
}

TEST(Safetensors, RefusesEveryTruncation) {
    const std::string data = image(small());
    for (size_t size = 0; size < data.size(); ++size)
        EXPECT_EQ(load(data.substr(0, size)).status, DSOPT_ERR_FORMAT) << size;
}

TEST(Safetensors, RefusesAppendedByte) {
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

TEST(Safetensors, RefusesUnmatchedTensorsAndChecksums) {
    expect_refused(file(R"("},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"), "\"t\" has no checksum");
    expect_refused(file(R"(","xxh3.u":"0"}})"), "\"xxh3.u\" belongs to no tensor");
}

// ---- headers with valid checksums and wrong content ----

TEST(Safetensors, ReadsHandMadeFiles) {
    EXPECT_EQ(load(one_tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[0,3]})", 3)).text, "");
    EXPECT_EQ(
        load(one_tensor("{ \"data_offsets\" : [0, 3],\n\"shape\":[3,1] ,\t\"dtype\":\"\\u0055\\u0038\" }\r", 3)).text,
        "");
    EXPECT_EQ(load(one_tensor(R"({"dtype":"F64","shape":[],"data_offsets":[0,8]})", 8)).text, "");
}

TEST(Safetensors, RefusesHolesAndOverlaps) {
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[1,4]})", 4), "hole");
    const std::string sums = R"(","xxh3.a":"","xxh3.b":""},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":)";
    expect_refused(file(sums + R"({"dtype":"U8","shape":[4],"data_offsets":[2,6]}})", "xxxxxx"), "\"b\": overlap");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[1],"data_offsets":[5,6]}})", "xxxxxx"), "\"b\": hole");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[1],"data_offsets":[4,5]}})", "xxxxxx"), "appended");
    expect_refused(file(sums + R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", "xxxxxx"), "cut off");
}

TEST(Safetensors, RefusesDataOffsetsThatContradictShape) {
    expect_refused(one_tensor(R"({"dtype":"F32","shape":[3],"data_offsets":[0,3]})", 3), "do not fit the shape");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[0],"data_offsets":[0,18446744073709551615]})", 3),
                   "do not fit");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[3,0]})", 3), "hole");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[0]})", 3), "missing");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[3],"data_offsets":[0,3,3]})", 3), "more than two");
}

TEST(Safetensors, RefusesShapesThatOverflow) {
    for (const char *shape : {"4294967296,4294967296", "9223372036854775807,3", "9223372036854775808",
                              "18446744073709551615", "4294967296,4294967296,0", "2305843009213693952,8"})
        expect_refused(one_tensor(std::string(R"({"dtype":"F64","shape":[)") + shape + R"(],"data_offsets":[0,0]})", 0),
                       "overflow");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]})", 1),
                   "too many dimensions");
    for (const char *shape : {"-1", "1.0", "1e0", "18446744073709551616", "\"1\"", "null", "true", "[1]", "{}", "-0"})
        expect_refused(one_tensor(std::string(R"({"dtype":"U8","shape":[)") + shape + R"(],"data_offsets":[0,1]})", 1),
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
        expect_refused(one_tensor(tensor.substr(0, tensor.size() - 1) + "," + field + "}", 0), "is there twice");
}

TEST(Safetensors, RefusesMissingUnknownAndMisplacedFields) {
    for (const char *tensor : {"{}", R"({"shape":[1],"data_offsets":[0,1]})", R"({"dtype":"U8","data_offsets":[0,1]})",
                               R"({"dtype":"U8","shape":[1]})"})
        expect_refused(one_tensor(tensor, 1), "missing");
    expect_refused(one_tensor(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"strides":[1]})", 1),
                   "unknown field \"strides\"");
    for (const char *dtype : {"f32", "F8", "", "U8 ", "U8\\u0000"})
        expect_refused(one_tensor(std::string(R"({"dtype":")") + dtype + R"(","shape":[1],"data_offsets":[0,1]})", 1),
                       "unknown dtype");
    for (const char *tensor : {"1", "\"U8\"", "[]", "null", R"({"dtype":1})", R"({"dtype":{}})", R"({"dtype":["U8"]})",
                               R"({"shape":1})", R"({"shape":{}})", R"({"shape":"1"})", R"({"data_offsets":0})"})
        expect_refused(one_tensor(tensor, 1), "tensor \"t\": a value of a wrong kind");
    for (const char *value : {"1", "null", "{}", "[]", "true"})
        expect_refused(file(std::string(R"(","k":)") + value + "}}"), "metadata key \"k\": a value of a wrong kind");
}

TEST(Safetensors, RefusesInvalidJson) {
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
    expect_refused(one_tensor(R"({"dtype":"U8","shape":)" + std::string(depth, '[') + std::string(depth, ']') + "}", 1),
                   "\"t\"");
    std::string objects = "\"},\"t\":";
    for (size_t i = 0; i < depth; ++i) objects += "{\"dtype\":";
    expect_refused(file(objects), "tensor \"t\"");
}

TEST(Safetensors, RefusesNulAndInvalidUtf8) {
    std::vector<std::string> raw = {"\x80", "\xc3", "\xff", "a\xe2\x82"}; // below: overlong, surrogate, out of range
    raw.insert(raw.end(), {"\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xf0\x80\x80\x80", "\xed\xa0\x80"});
    raw.insert(raw.end(), {"\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"});
    std::vector<std::string> escaped = {"\\u0000", "a\\u0000b", "\\ud800", "\\udc00", "\\ud800\\u0041"};
    escaped.insert(escaped.end(), raw.begin(), raw.end());
    for (const std::string &text : escaped) {
        for (const std::string &rest :
             {"\",\"k\":\"" + text + "\"}}", "\",\"" + text + "\":\"v\"}}",
              "\"},\"" + text + "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}"}) {
            const ReadOutcome result = load(file(rest));
            EXPECT_EQ(result.status, DSOPT_ERR_FORMAT) << rest;
            for (const char c : result.text) EXPECT_TRUE(c >= 0x20 && c < 0x7f) << result.text;
        }
    }
    std::vector<std::string> written = raw;
    written.push_back(std::string(1, '\0'));
    for (const std::string &text : written) {
        Container name, key, value;
        name.add(text, DSOPT_DTYPE_U8, {0}, 0);
        key.metadata = {{text, "v"}};
        value.metadata = {{"k", text}};
        for (const Container *content : {&name, &key, &value})
            EXPECT_EQ(outcome([&] { image(*content); }).status, DSOPT_ERR_ARGUMENT);
    }
}

TEST(Safetensors, RefusesTooManyMetadataKeys) { // in memory each takes ten times its bytes in the file
    std::string rest = "\"";
    for (int i = 0; i <= 1 << 20; ++i) rest += ",\"" + std::to_string(i) + "\":\"\"";
    expect_refused(file(rest + "}}"), "too many keys");
}

TEST(Safetensors, TruncatesNamesInMessagesAtCharacterBoundary) {
    std::string name;
    for (int i = 0; i < 200; ++i) name += "\xe6\x9d\x83";
    expect_refused(file("\"},\"" + name + "\":1}"), "\xe6\x9d\x83...\xe6\x9d\x83");
    EXPECT_LT(load(file("\"},\"" + name + "\":1}")).text.size(), 250u);
}

// ---- input of the writer ----

TEST(Safetensors, RefusesToWriteInvalidContent) {
    const auto status_of = [](auto &&change) {
        Container content = small();
        change(content);
        return outcome([&] { image(content); }).status;
    };
    EXPECT_EQ(status_of([](Container &c) { c.add("a.exp_avg", DSOPT_DTYPE_U8, {1}, 1); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Container &c) { c.add("__metadata__", DSOPT_DTYPE_U8, {1}, 1); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Container &c) { c.metadata.push_back({"format", "2"}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Container &c) { c.metadata.push_back({"header_xxh3", ""}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Container &c) { c.metadata.push_back({"xxh3.a", ""}); }), DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(status_of([](Container &c) { c.tensors.resize(1 << 20); }), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(status_of([](Container &c) { c.tensors[0].dtype = 0; }), DSOPT_ERR_DTYPE);
    EXPECT_EQ(status_of([](Container &c) { c.tensors[0].bytes += 1; }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Container &c) { c.tensors[0].shape = {-2, -3}; }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Container &c) { c.tensors[0].shape = std::vector<int64_t>(9, 1); }), DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Container &c) {
                  const uint64_t half = uint64_t(1) << 62;
                  for (const char *name : {"x", "y", "z", "w", "v"})
                      c.tensors.push_back({name, DSOPT_DTYPE_U8, {int64_t(half)}, half});
              }),
              DSOPT_ERR_SHAPE);
    EXPECT_EQ(status_of([](Container &c) {
                  c.metadata.push_back({"long", std::string(100'000'000, 'x')});
              }),
              DSOPT_ERR_UNSUPPORTED);
}

TEST(Safetensors, RefusesToSaveTensorThatChanges) {
    const Folder folder;
    const Container content = small();
    save(folder / "a", content);
    const std::string before = read_file(folder / "a");
    int requests = 0;
    const auto deliver = [&](size_t index, uint64_t offset, size_t) -> const void * {
        static std::string copy;
        copy = content.bytes[index];
        if (++requests == 5) copy[3] = char(copy[3] ^ 1); // three tensors have data: the second one in the second pass
        return copy.data() + offset;
    };
    const ReadOutcome result = outcome(
        [&] { write_safetensors(*file_sink((folder / "a").c_str()), content.metadata, content.tensors, deliver); });
    EXPECT_EQ(result.status, DSOPT_ERR_BUSY);
    EXPECT_NE(result.text.find("\"a.exp_avg\""), std::string::npos) << result.text;
    EXPECT_EQ(read_file(folder / "a"), before);
    EXPECT_EQ(folder.entries(), 1u);
}

// ---- callbacks ----

TEST(Safetensors, StopsSaveAtFailedWriteCallback) {
    MemoryFile good;
    save(*callback_sink(good.io()), small());
    ASSERT_EQ(good.calls, 4); // the header and three tensors with data
    for (int call = 0; call < good.calls; ++call) {
        MemoryFile memory;
        memory.fail_at = call;
        const ReadOutcome result = outcome([&] { save(*callback_sink(memory.io()), small()); });
        EXPECT_EQ(result.status, DSOPT_ERR_IO);
        EXPECT_NE(result.text.find("4711"), std::string::npos) << result.text;
        EXPECT_EQ(memory.calls, call + 1);
        EXPECT_EQ(memory.data, good.data.substr(0, memory.data.size()));
    }
}

TEST(Safetensors, StopsLoadAtFailedReadCallback) {
    MemoryFile good{image(small())};
    load_all(callback_source(good.io()));
    ASSERT_EQ(good.calls, 5); // length, header, three tensors with data
    for (int call = 0; call < good.calls; ++call) {
        MemoryFile memory{good.data};
        memory.fail_at = call;
        const ReadOutcome result = outcome([&] { load_all(callback_source(memory.io())); });
        EXPECT_EQ(result.status, DSOPT_ERR_IO);
        EXPECT_NE(result.text.find("-42"), std::string::npos) << result.text;
        EXPECT_EQ(memory.calls, call + 1);
    }
}

TEST(Safetensors, RefusesMissingCallbacks) {
    DSOPT_NEW(dsopt_io, io);
    EXPECT_EQ(outcome([&] { callback_sink(io); }).status, DSOPT_ERR_ARGUMENT);
    EXPECT_EQ(outcome([&] { callback_source(io); }).status, DSOPT_ERR_ARGUMENT);
}

TEST(Safetensors, RefusesReadsPastTensorEnd) {
    MemoryFile memory{image(small())};
    const SafetensorsReader reader(callback_source(memory.io()));
    char data[64];
    const size_t index = reader.find("a.exp_avg");
    EXPECT_EQ(outcome([&] { reader.read(index, 24, data, 0); }).status, DSOPT_OK);
    EXPECT_EQ(outcome([&] { reader.read(index, 24, data, 1); }).status, DSOPT_ERR_INTERNAL);
    EXPECT_EQ(outcome([&] { reader.read(index, ~uint64_t(0), data, 2); }).status, DSOPT_ERR_INTERNAL);
}

} // namespace checkpoint_safetensors_tests
