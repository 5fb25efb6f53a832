// SPDX-License-Identifier: Apache-2.0
// Metadata of a checkpoint and names of its tensors, for saving and loading.
#pragma once
#include "base/text.h"
#include "checkpoint/safetensors.h"
#include "optimizer/optimizer.h"
#include <charconv>

namespace dsopt {

/// Reads metadata. A missing or malformed field is a FORMAT error that names the key.
class Fields {
public:
    explicit Fields(const SafetensorsReader &file) : file_(file) {}
    bool has(const std::string &key) const { return file_.metadata().count(key) != 0; }
    const std::string &text(const std::string &key) const {
        const auto found = file_.metadata().find(key);
        if (found == file_.metadata().end())
            throw Error(DSOPT_ERR_FORMAT, "the checkpoint has no field %s", quoted(key).c_str());
        return found->second;
    }
    template <class T> T number(const std::string &key) const {
        const std::string &value = text(key);
        T number{};
        const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
        if (error != std::errc() || end != value.data() + value.size())
            throw Error(DSOPT_ERR_FORMAT, "field %s of the checkpoint is %s, not a number", quoted(key).c_str(),
                        quoted(value).c_str());
        return number;
    }
    template <class T> void read(const std::string &key, T &value) const { value = number<T>(key); }

private:
    const SafetensorsReader &file_;
};

/// Number of elements of the longest tensor in a file of sharded state: a checksum covers little more than what a rank
/// of another number of ranks reads. A multiple of kBlock.
constexpr int64_t kFilePiece = int64_t(1) << 24;
/// Pieces of a tensor in the files of sharded state are called NAME@FIRST_ELEMENT.
constexpr char kPieceMark = '@';
inline std::string piece_name(const std::string &name, int64_t begin) {
    return name + kPieceMark + std::to_string(begin);
}

/// Value of the field "layout" of files of the 1-bit family in standard mode.
constexpr char kVectorLayout[] = "2";

/// `save_id`: of a save of sharded state, else "".
Metadata metadata_of(const Optimizer &optimizer, const std::string &save_id);
/// True for fields that differ in the files of the ranks of one save.
inline bool is_rank_field(const std::string &key) { return key == "rank" || key == "accumulated"; }
/// True for fields that DSOPT_IO_NO_HYPER leaves out of a load.
bool is_hyper_field(const std::string &key);
/// True if files have pieces of this parameter's tensors.
bool is_in_pieces(const Optimizer &optimizer, size_t param);
/// Returns an upper bound of the header length of this optimizer's checkpoints, with room for keys of other programs.
uint64_t longest_header(const Optimizer &optimizer);

/// The metadata of an optimizer as read from a file.
struct SavedOptimizer {
    std::vector<dsopt_group> groups; // this optimizer's, with the saved hyper-parameters
    double max_norm, max_value;
    int64_t calls;
    std::vector<int64_t> order; // the index in this optimizer of each parameter of the file
};
/// Throws FORMAT if the metadata is invalid, MISMATCH if it does not fit this optimizer.
SavedOptimizer read_optimizer(const Optimizer &optimizer, const Fields &fields);
/// Returns the saved rules of the loss scale, with the flags STATIC and SHARED of `live`.
ScalerRules read_scaler_rules(const Fields &fields, const ScalerRules &live);
/// Returns one digit per parameter of this optimizer, as in Param::accumulated.
std::string read_accumulated(const Fields &fields, const std::vector<int64_t> &order);

/// Returns the entry of a state tensor, or of a parameter, in a file. Of sharded state, that of the whole tensor.
TensorEntry tensor_of(const Optimizer &optimizer, const StateEntry &entry);
TensorEntry tensor_of(const Param &param);
/// Returns the value of the field "shard".
constexpr const char *sharding_name(Sharding sharding) {
    return sharding == Sharding::none ? "" : sharding == Sharding::in_node ? "node" : "data";
}
/// Throws MISMATCH if both have several dimensions and they differ.
void check_shape(const TensorEntry &saved, const TensorEntry &wanted);
/// Returns the index of a tensor with this name, dtype and size. Throws MISMATCH naming the tensor.
size_t find_tensor(const SafetensorsReader &file, const TensorEntry &wanted);

} // namespace dsopt
