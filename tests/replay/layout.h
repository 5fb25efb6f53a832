// SPDX-License-Identifier: Apache-2.0
// Parameters, groups and hyper-parameters of a recorded case, the same for every optimizer.
#pragma once
#include "golden_file.h"
#include <map>
#include <set>
#include <string>
#include <vector>

namespace replay {

class Layout {
public:
    /// Reads the metadata `param_shapes` and `groups`. Failure unless every parameter is in exactly one group.
    explicit Layout(GoldenFile &file);

    int64_t param_count() const { return int64_t(shapes_.size()); }
    const std::vector<int64_t> &shape(int64_t param) const { return shapes_[size_t(param)]; }
    int64_t numel(int64_t param) const { return numels_[size_t(param)]; }
    const std::string &item(int64_t param) const { return items_[size_t(param)]; } ///< "p<index>"
    /// Returns the parameter's description for add_group; it refers to memory of this Layout.
    dsopt_param param(int64_t index, const dsopt_tensor &tensor) const;

    size_t group_count() const { return groups_.size(); }
    const std::vector<int64_t> &group(size_t index) const { return groups_[index].params; }
    /// Parameter indices in optimizer order: `groups[0].params`, `groups[1].params`, ...
    const std::vector<int64_t> &order() const { return order_; }

    /// Returns a hyper-parameter of a group: its override, or the top-level value. "beta1" and "beta2" also stand for
    /// "betas".
    double hyper(size_t group, const std::string &key);
    /// Returns a flag. If it was not recorded, it has the original's default, `default_value`.
    bool hyper_flag(size_t group, const std::string &key, bool default_value);
    /// Returns a hyper-parameter that is a word.
    std::string hyper_word(size_t group, const std::string &key);
    /// Same for a hyper-parameter that the original stores once for all groups. Since an override of it is never read,
    /// finish() fails if there is one.
    double common(const std::string &key) { return file_.number(key); }
    bool common_flag(const std::string &key, bool default_value) {
        return file_.has(key) ? file_.flag(key) : default_value;
    }

    /// Failure that names an override that was never read.
    void finish() const;

private:
    struct Group {
        std::vector<int64_t> params;
        std::map<std::string, double> overrides;
        std::map<std::string, std::string> words;
        std::set<std::string> read;
    };

    void read_groups();

    GoldenFile &file_;
    std::vector<std::vector<int64_t>> shapes_;
    std::vector<int64_t> numels_, order_;
    std::vector<std::string> items_;
    std::vector<Group> groups_;
};

/// Reads a JSON list of integers.
std::vector<int64_t> read_integers(GoldenFile &file, const char *key);
/// Reads a list of shapes; product() is the number of elements of one shape.
std::vector<std::vector<int64_t>> read_shapes(GoldenFile &file, const char *key);
int64_t product(const std::vector<int64_t> &shape);

/// Returns metadata `world_size`, 1 to 64.
int64_t read_ranks(GoldenFile &file);
/// Returns the number of recorded calls, at least 1.
int64_t read_steps(GoldenFile &file);
/// Failure if the record has several ranks.
void expect_one_rank(GoldenFile &file);

// A group with all recorded hyper-parameters; lr is the metadata's value until a call sets another.
dsopt_group common_group(Layout &layout, size_t index, int32_t algorithm); // fields that all algorithms have
dsopt_group adam_group(Layout &layout, size_t index);
dsopt_group lamb_group(Layout &layout, size_t index);

/// Parses a dtype as metadata spells it ("f32"): one for all parameters, or a comma-separated list by parameter index.
std::vector<int32_t> dtype_list(GoldenFile &file, const std::string &key, int64_t params);

} // namespace replay
