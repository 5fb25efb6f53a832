// SPDX-License-Identifier: Apache-2.0
// Interface between bench_against and its adapters, through which it calls libraries. An adapter is against_adapter.cc,
// compiled against the dsopt_dl.h of the commit that its library was built from, so two libraries whose structs differ
// can run in one process. Nothing here may depend on dsopt.h, because the two sides would be compiled with different
// versions of it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace against {

enum class Rule { adamw, lamb, sgd, lion, adagrad, onebit_adam };
enum class Dtype { f32, f16, bf16 };

struct Case {
    const char *name;
    Rule rule;
    Dtype dtype; // of parameters and gradients; 16-bit: with fp32 masters, loss scale and clipping
    double momentum = 0;
    bool exchanges = false; // compressed steps of one of 8 ranks
    bool delta = false;     // writes the change and does not modify the parameters
};

struct Tensor {
    void *data;
    int64_t numel;
};

/// Memory that both libraries work on.
class Shared {
public:
    std::vector<Tensor> params, grads;
    std::vector<Tensor> outs; // empty unless the case writes changes
    /// Returns the memory for the state tensor `name` of one parameter, with as many elements as the parameter. It is
    /// the same for both libraries.
    virtual void *state_memory(const char *name, size_t param, size_t element_bytes) = 0;

protected:
    ~Shared() = default;
};

/// Steps of one library.
class Engine {
public:
    virtual ~Engine() = default;
    virtual void step() = 0;
};

/// `against_open` of an adapter. Returns NULL if the library does not know the rule. Other failures end the program.
using Open = Engine *(const char *library, const Case &config, Shared &shared);

} // namespace against
