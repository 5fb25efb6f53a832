// SPDX-License-Identifier: Apache-2.0
#include "expect.h"

namespace test {

testing::AssertionResult refused(dsopt_status got, dsopt_status wanted, const std::string &words) {
    const std::string text = got == DSOPT_OK ? "" : dsopt_last_error();
    if (got != wanted)
        return testing::AssertionFailure()
               << dsopt_status_name(got) << " in place of " << dsopt_status_name(wanted) << ", last error: " << text;
    for (size_t begin = 0, end = 0; begin <= words.size(); begin = end + 1) {
        end = std::min(words.find('|', begin), words.size());
        const std::string word = words.substr(begin, end - begin);
        if (text.find(word) == std::string::npos)
            return testing::AssertionFailure() << "'" << word << "' is not in: " << text;
    }
    return testing::AssertionSuccess();
}

testing::AssertionResult same(const std::string &a, const std::string &b) {
    if (a == b) return testing::AssertionSuccess();
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " bytes and " << b.size();
    size_t i = 0, different = 0;
    while (a[i] == b[i]) ++i;
    for (size_t k = i; k < a.size(); ++k) different += a[k] != b[k];
    return testing::AssertionFailure() << different << " of " << a.size() << " bytes differ, first at " << i;
}
testing::AssertionResult same(const Snapshot &a, const Snapshot &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " tensors";
    for (const auto &[name, bytes] : a) {
        const auto other = b.find(name);
        if (other == b.end()) return testing::AssertionFailure() << "no " << name;
        if (const auto result = same(bytes, other->second); !result)
            return testing::AssertionFailure() << name << ": " << result.message();
    }
    return testing::AssertionSuccess();
}
testing::AssertionResult same_bits(const std::vector<float> &a, const std::vector<float> &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " elements";
    for (size_t i = 0; i < a.size(); ++i)
        if (!(std::isnan(a[i]) && std::isnan(b[i])) && bits_of(a[i]) != bits_of(b[i]))
            return testing::AssertionFailure() << "element " << i << ": " << testing::PrintToString(a[i]) << " and "
                                               << testing::PrintToString(b[i]);
    return testing::AssertionSuccess();
}

std::string algorithm_name(const testing::TestParamInfo<int32_t> &info) { return name_of(info.param); }

dsopt_status call_collective(const Context &context, const Comm &comm, float value, dsopt_norm_result *result) {
    const Array array(DSOPT_DTYPE_F32, 1, value);
    const dsopt_tensor tensor = array.tensor();
    const Shared<dsopt_norm_result> got(1);
    const dsopt_status status =
        dsopt_tensors_norm(context.get(), &tensor, 1, DSOPT_NORM_L2, 0, comm.get(), got.data(), nullptr);
    if (result != nullptr && status == DSOPT_OK) *result = *got;
    return status;
}

} // namespace test
