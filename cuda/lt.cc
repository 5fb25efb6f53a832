// SPDX-License-Identifier: Apache-2.0
#include "lt.h"
#include <string>

namespace dsopt::gpu {
namespace {

/// Returns the copy that the process has loaded, of either version of CUDA: their ABI is the same. Otherwise loads that
/// of the version that this library is linked with.
lt::Api load_api() {
    LibraryNames names{nullptr, "cublasLtMatmul", "DSOPT_CUBLASLT_LIBRARY", "nvidia-cublas"};
    for (const char *const file : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        names.file = file;
        if (const auto library = Library::loaded(names)) return {*library};
    }
    int version = 0;
    check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
    const std::string file = "libcublasLt.so." + std::to_string(version / 1000);
    names.file = file.c_str();
    return {Library::any(names)};
}

lt::DataType type_of(Dtype dtype) {
    switch (dtype) {
    case Dtype::f32: return lt::float32;
    case Dtype::f16: return lt::float16;
    case Dtype::bf16: return lt::bfloat16;
    }
    __builtin_unreachable();
}

/// A descriptor of the library, destroyed with this object.
template <class T> class Descriptor : NotCopied {
public:
    explicit Descriptor(lt::Status (*destroy)(T)) : destroy_(destroy) {}
    ~Descriptor() {
        if (value != nullptr) (void)destroy_(value);
    }
    T value = nullptr;

private:
    lt::Status (*const destroy_)(T);
};

} // namespace

struct Lt::Plan {
    explicit Plan(const lt::Api &api) :
        operation(api.destroy_operation),
        a(api.destroy_layout),
        b(api.destroy_layout),
        d(api.destroy_layout) {}
    Descriptor<lt::Operation> operation;
    Descriptor<lt::Layout> a, b, d;
    lt::Algorithm algorithm;
};

Lt::Lt(const Gpu &gpu) : gpu_(gpu), api_(load_api()) {
    const OnDevice on(gpu_);
    check(api_.create(&handle_), "cublasLtCreate");
}
Lt::~Lt() {
    plans_.clear();
    try {
        const OnDevice on(gpu_);
        (void)api_.destroy(handle_);
    } catch (const std::exception &) {} // the device has failed
}

void Lt::check(lt::Status status, const char *what) const {
    if (status != lt::success)
        throw Error(status == lt::alloc_failed ? DSOPT_ERR_NOMEM : DSOPT_ERR_BACKEND, "%s: %s", what,
                    api_.status_string(status));
}

void Lt::prepare(const LtShape &shape) {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<const Plan> &known = plans_[shape];
    if (known) return;
    auto plan = std::make_unique<Plan>(api_);
    check(api_.create_operation(&plan->operation.value, lt::compute_float32, lt::float32), "cublasLtMatmulDescCreate");
    const auto set_operation = [&](lt::OperationAttribute attribute, bool is_transposed) {
        const int32_t value = is_transposed ? lt::transposed : lt::not_transposed;
        check(api_.set_operation(plan->operation.value, attribute, &value, sizeof value),
              "cublasLtMatmulDescSetAttribute");
    };
    set_operation(lt::transpose_a, shape.a.transposed);
    set_operation(lt::transpose_b, shape.b.transposed);
    const auto make_layout = [&](lt::Layout &layout, Dtype dtype, const LtMatrix &matrix, int64_t rows, int64_t cols) {
        if (matrix.transposed) std::swap(rows, cols);
        check(api_.create_layout(&layout, type_of(dtype), uint64_t(rows), uint64_t(cols), matrix.ld),
              "cublasLtMatrixLayoutCreate");
        constexpr const char *name = "cublasLtMatrixLayoutSetAttribute";
        check(api_.set_layout(layout, lt::batch_count, &shape.count, sizeof shape.count), name);
        check(api_.set_layout(layout, lt::batch_stride, &matrix.stride, sizeof matrix.stride), name);
    };
    make_layout(plan->a.value, shape.input, shape.a, shape.rows, shape.depth);
    make_layout(plan->b.value, shape.input, shape.b, shape.depth, shape.cols);
    make_layout(plan->d.value, shape.output, shape.d, shape.rows, shape.cols);
    Descriptor<lt::Preference> preference(api_.destroy_preference);
    check(api_.create_preference(&preference.value), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](lt::PreferenceAttribute attribute, auto value) {
        check(api_.set_preference(preference.value, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(lt::workspace_bytes, uint64_t(kLtWorkspace));
    prefer(lt::reductions, lt::reduce_in_compute_type);
    for (const auto attribute : {lt::alignment_a, lt::alignment_b, lt::alignment_c, lt::alignment_d})
        prefer(attribute, uint32_t(kLtAlignment));
    lt::HeuristicResult result{};
    int found = 0;
    const lt::Status status = api_.find_algorithms(handle_, plan->operation.value, plan->a.value, plan->b.value,
                                                   plan->d.value, plan->d.value, preference.value, 1, &result, &found);
    if (status == lt::not_supported || (status == lt::success && (found < 1 || result.state != lt::success)))
        throw Error(DSOPT_ERR_BACKEND,
                    "cuBLASLt has no algorithm for %d products of %lld x %lld x %lld in %s on a device of compute "
                    "capability %s%s",
                    shape.count, ll(shape.rows), ll(shape.cols), ll(shape.depth), dtype_name(int32_t(shape.input)),
                    gpu_.capability().c_str(),
                    shape.input == Dtype::f32 ? "" : "; another dsopt_group.ns_dtype may have one");
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    plan->algorithm = result.algorithm;
    known = std::move(plan);
}

const Lt::Plan &Lt::plan_of(const LtShape &shape) {
    {
        const std::lock_guard lock(mutex_);
        const auto known = plans_.find(shape);
        if (known != plans_.end() && known->second) return *known->second;
    }
    prepare(shape);
    return plan_of(shape);
}

void Lt::multiply(const LtShape &shape, const LtOperands &operands, void *workspace, cudaStream_t stream) {
    const Plan &plan = plan_of(shape);
    check(api_.multiply(handle_, plan.operation.value, &operands.alpha, operands.a, plan.a.value, operands.b,
                        plan.b.value, &operands.beta, operands.c, plan.d.value, operands.d, plan.d.value,
                        &plan.algorithm, workspace, kLtWorkspace, stream),
          "cublasLtMatmul");
}

} // namespace dsopt::gpu
