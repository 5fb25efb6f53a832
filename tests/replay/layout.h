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
    /// To be registered; borrows from this Layout.
    dsopt_param param(int64_t index, const dsopt_tensor &tensor) const;

    size_t group_count() const { return groups_.size(); }
    const std::vector<int64_t> &group(size_t index) const { return groups_[index].params; }
    /// Parameter indices in optimizer order: `groups[0].params`, `groups[1].params`, ...
    const std::vector<int64_t> &order() const { return order_; }

    /// Hyper-parameter of a group: its override, or the top-level value. "beta1" and "beta2" also stand for "betas".
    double hyper(size_t group, const std::string &key);
    /// A flag that was not recorded has the original's default, `otherwise`.
    bool hyper_flag(size_t group, const std::string &key, bool otherwise);
    /// The same for something that the original keeps once for all groups: an override of it is never read, so finish()
    /// fails.
    double common(const std::string &key) { return file_.number(key); }
    bool common_flag(const std::string &key, bool otherwise) { return file_.has(key) ? file_.flag(key) : otherwise; }

    /// Failure that names an override which nothing has read.
    void finish() const;

private:
    struct Group {
        std::vector<int64_t> params;
        std::map<std::string, double> overrides;
        std::set<std::string> read;
    };

    void read_groups();

    GoldenFile &file_;
    std::vector<std::vector<int64_t>> shapes_;
    std::vector<int64_t> numels_, order_;
    std::vector<std::string> items_;
    std::vector<Group> groups_;
};

/// A list of shapes, and the number of elements of one.
std::vector<std::vector<int64_t>> read_shapes(GoldenFile &file, const char *key);
int64_t product(const std::vector<int64_t> &shape);

/// Metadata `world_size`, 1 to 64.
int64_t read_ranks(GoldenFile &file);
/// Number of calls in the record, 1 at least.
int64_t read_steps(GoldenFile &file);
/// Failure if the record is of several ranks.
void expect_one_rank(GoldenFile &file);

// A group with everything that is recorded of it; lr is what the metadata says until a call brings its own.
dsopt_group common_group(Layout &layout, size_t index, int32_t algorithm); // what all algorithms have
dsopt_group adam_group(Layout &layout, size_t index);
dsopt_group lamb_group(Layout &layout, size_t index);

/// A dtype as metadata spells it ("f32"), one for all parameters or a comma list in the order of their indices.
std::vector<int32_t> dtype_list(GoldenFile &file, const std::string &key, int64_t params);

} // namespace replay
