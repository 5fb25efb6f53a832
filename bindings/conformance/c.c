// SPDX-License-Identifier: Apache-2.0
// The conformance program in C; the README.md in this folder defines what it computes. The programs in other languages
// do the same.
#include <dsopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, MAX_PARAMS = 3, MAX_NUMEL = 9000 };

static void check(dsopt_status status) {
    if (status == DSOPT_OK) return;
    fprintf(stderr, "%s: %s\n", dsopt_status_name(status), dsopt_last_error());
    exit(1);
}

static float next(uint32_t *x) {
    *x = *x * 1664525u + 1013904223u;
    return (float)(*x >> 8) * 0x1p-24f - 0.5f; // 24 bits: exact
}
static void fill(float *values, int64_t count, uint32_t *x) {
    for (int64_t i = 0; i < count; ++i) values[i] = next(x);
}

// Of memory as it is: the library needs a little-endian machine.
static void hash(uint64_t *digest, const void *memory, size_t bytes) {
    const unsigned char *const byte = memory;
    for (size_t i = 0; i < bytes; ++i) {
        *digest ^= byte[i];
        *digest *= UINT64_C(0x100000001b3);
    }
}

typedef struct model {
    int count;
    dsopt_param params[MAX_PARAMS];
    dsopt_tensor grads[MAX_PARAMS];
    float weights[MAX_PARAMS][MAX_NUMEL];
    uint16_t weights16[MAX_PARAMS][MAX_NUMEL]; // of cases with 16-bit parameters
    float grad_values[MAX_PARAMS][MAX_NUMEL];
    uint32_t seed; // seed of the gradients
} model;

static void init(model *m, int count, const char *const *names, const int64_t *numels, uint32_t seed,
                 uint32_t grad_seed) {
    memset(m, 0, sizeof *m);
    m->count = count;
    m->seed = grad_seed;
    for (int i = 0; i < count; ++i) {
        fill(m->weights[i], numels[i], &seed);
        m->params[i].name = names[i];
        m->params[i].tensor = (dsopt_tensor){m->weights[i], numels[i], DSOPT_DTYPE_F32, 0};
        m->grads[i] = (dsopt_tensor){m->grad_values[i], numels[i], DSOPT_DTYPE_F32, 0};
    }
}

static void next_gradients(model *m) {
    for (int i = 0; i < m->count; ++i) fill(m->grad_values[i], m->grads[i].numel, &m->seed);
}

static void train(model *m, dsopt_optimizer *opt, int steps) {
    DSOPT_NEW(dsopt_step, step);
    step.grads = m->grads;
    step.count = m->count;
    for (int s = 0; s < steps; ++s) {
        next_gradients(m);
        check(dsopt_optimizer_step(opt, &step));
    }
}

static size_t size_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_U8:
    case DSOPT_DTYPE_F8_E4M3: return 1;
    case DSOPT_DTYPE_I16:
    case DSOPT_DTYPE_F16:
    case DSOPT_DTYPE_BF16: return 2;
    default: return 4;
    }
}

static void hash_weights(uint64_t *digest, const model *m) {
    for (int i = 0; i < m->count; ++i) {
        const dsopt_tensor *weights = &m->params[i].tensor;
        hash(digest, weights->data, (size_t)weights->numel * size_of(weights->dtype));
    }
}

// Copies the state tensors of this name, one after the other, and returns their bytes.
static size_t copy_state(dsopt_optimizer *opt, const char *name, unsigned char *to) {
    int64_t count;
    size_t end = 0;
    check(dsopt_optimizer_state_count(opt, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        check(dsopt_optimizer_state(opt, i, &info));
        if (strcmp(info.name, name) != 0) continue;
        const size_t bytes = (size_t)info.tensor.numel * size_of(info.tensor.dtype);
        check(dsopt_optimizer_export(opt, i, to + end, bytes));
        end += bytes;
    }
    return end;
}

static void hash_state(uint64_t *digest, dsopt_optimizer *opt, const char *name) {
    static unsigned char bytes[MAX_PARAMS * MAX_NUMEL * sizeof(float)];
    hash(digest, bytes, copy_state(opt, name, bytes));
}

static dsopt_group adamw_group(void) {
    dsopt_group group;
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.015625;
    group.weight_decay = 0.125;
    return group;
}

static void adamw(uint64_t *digest) {
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    const dsopt_group group = adamw_group();
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init(&m, 3, (const char *const[]){"a", "b", "c"}, (const int64_t[]){1, 7, 4099}, 12345, 1000);
    check(dsopt_context_create(NULL, &ctx));
    desc.max_norm = 1;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_optimizer_add_group(opt, &group, m.params, m.count));
    train(&m, opt, 10);
    hash_weights(digest, &m);
    hash_state(digest, opt, "exp_avg");
    hash_state(digest, opt, "exp_avg_sq");
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

typedef struct rank {
    int rank, ranks;
    const unsigned char *id;
    size_t id_bytes;
    model m;
    unsigned char exp_avg[MAX_PARAMS * MAX_NUMEL * sizeof(float)], exp_avg_sq[MAX_PARAMS * MAX_NUMEL * sizeof(float)];
    size_t exp_avg_bytes, exp_avg_sq_bytes;
} rank;

static dsopt_comm *connect(dsopt_context *ctx, const rank *r) {
    dsopt_comm *comm;
    DSOPT_NEW(dsopt_comm_desc, local);
    local.kind = DSOPT_COMM_KIND_LOCAL;
    local.rank = r->rank;
    local.ranks = r->ranks;
    local.id = r->id;
    local.id_bytes = r->id_bytes;
    check(dsopt_comm_create(ctx, &local, &comm));
    return comm;
}

// Runs a function on two threads. Both must end with the same weights.
static void on_two_ranks(void *(*run)(void *), rank *ranks) {
    unsigned char id[16];
    size_t bytes = sizeof id;
    pthread_t threads[RANKS];
    check(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &bytes));
    for (int r = 0; r < RANKS; ++r) {
        ranks[r].rank = r;
        ranks[r].ranks = RANKS;
        ranks[r].id = id;
        ranks[r].id_bytes = bytes;
        if (pthread_create(&threads[r], NULL, run, &ranks[r]) != 0) exit(1);
    }
    for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
    if (memcmp(ranks[0].m.weights, ranks[1].m.weights, sizeof ranks[0].m.weights) != 0) {
        fprintf(stderr, "the ranks have different weights\n");
        exit(1);
    }
}

static void *onebit_rank(void *argument) {
    rank *r = argument;
    dsopt_context *ctx;
    dsopt_comm *comm;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init(&r->m, 2, (const char *const[]){"u", "v"}, (const int64_t[]){5, 130}, 54321, 2000 + (uint32_t)r->rank);
    check(dsopt_context_create(NULL, &ctx));
    comm = connect(ctx, r);
    desc.data = comm;
    desc.flags = DSOPT_OPTIMIZER_AVERAGES;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ONEBIT_ADAM));
    group.lr = 0.015625;
    group.freeze_step = 3;
    check(dsopt_optimizer_add_group(opt, &group, r->m.params, r->m.count));
    train(&r->m, opt, 6);
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(ctx);
    return NULL;
}

static void onebit(uint64_t *digest) {
    static rank ranks[RANKS];
    on_two_ranks(onebit_rank, ranks);
    hash_weights(digest, &ranks[0].m);
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

// The parameters and gradients of case 1, with weights rounded to bfloat16.
static void init_bf16(model *m) {
    init(m, 3, (const char *const[]){"a", "b", "c"}, (const int64_t[]){1, 7, 4099}, 12345, 1000);
    for (int i = 0; i < m->count; ++i) {
        dsopt_tensor *weights = &m->params[i].tensor;
        for (int64_t k = 0; k < weights->numel; ++k) m->weights16[i][k] = to_bf16(m->weights[i][k]);
        *weights = (dsopt_tensor){m->weights16[i], weights->numel, DSOPT_DTYPE_BF16, 0};
    }
}

static void low_precision(uint64_t *digest) {
    static const char *const names[] = {"remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"};
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group = adamw_group();
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init_bf16(&m);
    check(dsopt_context_create(NULL, &ctx));
    desc.masters = DSOPT_MASTERS_REMAINDER;
    desc.seed = 7;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    group.exp_avg_format = DSOPT_MOMENT_E4M3;
    group.exp_avg_sq_format = DSOPT_MOMENT_BF16_RANDOM;
    check(dsopt_optimizer_add_group(opt, &group, m.params, 2));
    group.exp_avg_format = DSOPT_MOMENT_Q8;
    group.exp_avg_sq_format = DSOPT_MOMENT_Q8;
    check(dsopt_optimizer_add_group(opt, &group, &m.params[2], 1));
    train(&m, opt, 10);
    hash_weights(digest, &m);
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) hash_state(digest, opt, names[i]);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

static const char *const shard_names[] = {"a", "b", "c"};
static const int64_t shard_numels[] = {6, 9000, 130}; // b begins on rank 0 and ends on rank 1

// Hashes weights and whole moments of an optimizer that is not sharded.
static void hash_adamw(uint64_t *digest, const model *m, dsopt_optimizer *opt) {
    hash_weights(digest, m);
    hash_state(digest, opt, "exp_avg");
    hash_state(digest, opt, "exp_avg_sq");
}

static void require_same(uint64_t digest, uint64_t other, const char *what) {
    if (digest == other) return;
    fprintf(stderr, "%s: %016llx and %016llx\n", what, (unsigned long long)digest, (unsigned long long)other);
    exit(1);
}

// An optimizer of the cases `sharded` and `resharded`. Without a comm it has all state.
static dsopt_optimizer *shard_optimizer(dsopt_context *ctx, model *m, dsopt_comm *data, int32_t flags,
                                        double max_norm) {
    dsopt_optimizer *opt;
    const dsopt_group group = adamw_group();
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.data = data;
    desc.flags = flags;
    desc.max_norm = max_norm;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_optimizer_add_group(opt, &group, m->params, m->count));
    return opt;
}

static void *sharded_rank(void *argument) {
    rank *r = argument;
    dsopt_context *ctx;
    init(&r->m, 3, shard_names, shard_numels, 54321, 3000 + (uint32_t)r->rank);
    check(dsopt_context_create(NULL, &ctx));
    dsopt_comm *const comm = connect(ctx, r);
    dsopt_optimizer *const opt = shard_optimizer(ctx, &r->m, comm, DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES, 1);
    train(&r->m, opt, 5);
    r->exp_avg_bytes = copy_state(opt, "exp_avg", r->exp_avg);
    r->exp_avg_sq_bytes = copy_state(opt, "exp_avg_sq", r->exp_avg_sq);
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(ctx);
    return NULL;
}

// One rank with the means of the gradients of both ranks: docs/sharding.md promises the same bits.
static void unsharded(uint64_t *digest) {
    static model m, other;
    dsopt_context *ctx;
    init(&m, 3, shard_names, shard_numels, 54321, 3000);
    init(&other, 3, shard_names, shard_numels, 54321, 3001);
    check(dsopt_context_create(NULL, &ctx));
    dsopt_optimizer *const opt = shard_optimizer(ctx, &m, NULL, 0, 1);
    DSOPT_NEW(dsopt_step, step);
    step.grads = m.grads;
    step.count = m.count;
    for (int s = 0; s < 5; ++s) {
        next_gradients(&m);
        next_gradients(&other);
        for (int i = 0; i < m.count; ++i)
            for (int64_t k = 0; k < shard_numels[i]; ++k)
                m.grad_values[i][k] = (m.grad_values[i][k] + other.grad_values[i][k]) * 0.5f;
        check(dsopt_optimizer_step(opt, &step));
    }
    hash_adamw(digest, &m, opt);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

static void sharded(uint64_t *digest) {
    static rank ranks[RANKS];
    uint64_t other = *digest;
    on_two_ranks(sharded_rank, ranks);
    hash_weights(digest, &ranks[0].m);
    for (int r = 0; r < RANKS; ++r) hash(digest, ranks[r].exp_avg, ranks[r].exp_avg_bytes);
    for (int r = 0; r < RANKS; ++r) hash(digest, ranks[r].exp_avg_sq, ranks[r].exp_avg_sq_bytes);
    unsharded(&other);
    require_same(*digest, other, "sharded and unsharded state differ");
}

static const char *const files[RANKS] = {"c0.safetensors", "c1.safetensors"}; // in the current folder

static void *saving_rank(void *argument) {
    rank *r = argument;
    dsopt_context *ctx;
    init(&r->m, 3, shard_names, shard_numels, 54321, 4000); // averages: the same on both ranks
    check(dsopt_context_create(NULL, &ctx));
    dsopt_comm *const comm = connect(ctx, r);
    dsopt_optimizer *const opt = shard_optimizer(ctx, &r->m, comm, DSOPT_OPTIMIZER_SHARD, 0);
    train(&r->m, opt, 3);
    check(dsopt_optimizer_save(opt, files[r->rank], NULL));
    dsopt_optimizer_destroy(opt);
    dsopt_comm_destroy(comm);
    dsopt_context_destroy(ctx);
    return NULL;
}

static void resharded(uint64_t *digest) {
    static rank ranks[RANKS];
    static model whole;
    uint64_t other = *digest;
    dsopt_context *ctx;
    DSOPT_NEW(dsopt_io, io);
    on_two_ranks(saving_rank, ranks);

    // One rank continues with the weights, and with the generator, of rank 0.
    model *const m = &ranks[0].m;
    check(dsopt_context_create(NULL, &ctx));
    dsopt_optimizer *const opt = shard_optimizer(ctx, m, NULL, 0, 0);
    io.files = RANKS;
    io.paths = files;
    check(dsopt_optimizer_load(opt, NULL, &io));
    train(m, opt, 3);
    hash_adamw(digest, m, opt);
    dsopt_optimizer_destroy(opt);
    for (int r = 0; r < RANKS; ++r) remove(files[r]);

    // One rank from the start: docs/sharding.md promises the same bits.
    init(&whole, 3, shard_names, shard_numels, 54321, 4000);
    dsopt_optimizer *const one = shard_optimizer(ctx, &whole, NULL, 0, 0);
    train(&whole, one, 6);
    hash_adamw(&other, &whole, one);
    require_same(*digest, other, "a loaded state and an uninterrupted run differ");
    dsopt_optimizer_destroy(one);
    dsopt_context_destroy(ctx);
}

static void muon(uint64_t *digest) {
    static model m;
    static const int64_t dims[2][2] = {{48, 16}, {20, 17}};
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group, adam = adamw_group();
    init(&m, 3, (const char *const[]){"qkv", "w", "bias"}, (const int64_t[]){48 * 16, 20 * 17, 130}, 777, 888);
    for (int i = 0; i < 2; ++i) {
        m.params[i].dims = dims[i];
        m.params[i].ndim = 2;
    }
    m.params[0].rows = m.params[0].cols = 16; // three matrices
    check(dsopt_context_create(NULL, &ctx));
    check(dsopt_optimizer_create(ctx, NULL, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
    group.lr = 0.015625;
    group.momentum = 0.9375;
    group.weight_decay = 0.125;
    check(dsopt_optimizer_add_group(opt, &group, m.params, 2));
    adam.lr = 0.0078125;
    adam.weight_decay = 0.25;
    adam.eps = 0;
    check(dsopt_optimizer_add_group(opt, &adam, &m.params[2], 1));
    train(&m, opt, 5);
    hash_weights(digest, &m);
    hash_state(digest, opt, "momentum_buffer");
    hash_state(digest, opt, "exp_avg");
    hash_state(digest, opt, "exp_avg_sq");
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

// Of a multiple of 2^-10 from -0.5 to 0.5, which is exact.
static uint16_t to_f16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == 0 ? 0 : (uint16_t)((bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10)));
}

static void accumulation(uint64_t *digest) {
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_scaler *scaler;
    const dsopt_group group = adamw_group();
    DSOPT_NEW(dsopt_scaler_desc, scale);
    DSOPT_NEW(dsopt_scaler_info, info);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    DSOPT_NEW(dsopt_step, step);
    init(&m, 3, (const char *const[]){"a", "b", "c"}, (const int64_t[]){1, 7, 4099}, 12345, 5000);
    for (int i = 0; i < m.count; ++i) {
        dsopt_tensor *weights = &m.params[i].tensor;
        for (int64_t k = 0; k < weights->numel; ++k) {
            const float upper = (float)(int)((m.weights[i][k] + 0.5f) * 1024); // 10 bits
            m.weights16[i][k] = to_f16(upper * 0x1p-10f - 0.5f);
        }
        *weights = (dsopt_tensor){m.weights16[i], weights->numel, DSOPT_DTYPE_F16, 0};
    }
    check(dsopt_context_create(NULL, &ctx));
    scale.init = 1024;
    scale.window = 2;
    check(dsopt_scaler_create(ctx, &scale, &scaler));
    desc.scaler = scaler;
    desc.max_norm = 1;
    desc.flags = DSOPT_OPTIMIZER_ACCUMULATE;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_optimizer_add_group(opt, &group, m.params, m.count));
    step.count = m.count;
    step.flags = DSOPT_STEP_ACCUMULATED;
    for (int s = 0; s < 8; ++s) {
        check(dsopt_scaler_query(scaler, &info));
        for (int micro = 0; micro < 3; ++micro) {
            next_gradients(&m);
            for (int i = 0; i < m.count; ++i)
                for (int64_t k = 0; k < m.grads[i].numel; ++k) m.grad_values[i][k] *= (float)info.scale;
            if (s == 3 && micro == 1) m.grad_values[2][0] = HUGE_VALF;
            check(dsopt_optimizer_accumulate(opt, m.grads, m.count, NULL));
        }
        check(dsopt_optimizer_step(opt, &step));
    }
    hash_weights(digest, &m);
    hash_state(digest, opt, "master");
    hash_state(digest, opt, "exp_avg");
    hash_state(digest, opt, "exp_avg_sq");
    hash_state(digest, opt, "loss_scale");
    dsopt_optimizer_destroy(opt);
    dsopt_scaler_destroy(scaler);
    dsopt_context_destroy(ctx);
}

static void uncorrected(uint64_t *digest) {
    static const char *const names[] = {"remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"};
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group = adamw_group();
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init_bf16(&m);
    check(dsopt_context_create(NULL, &ctx));
    desc.masters = DSOPT_MASTERS_REMAINDER;
    desc.max_value = 0.25;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    group.flags |= DSOPT_GROUP_EPS_UNCORRECTED;
    group.eps = 0.001;
    group.exp_avg_format = DSOPT_MOMENT_E4M3;
    group.exp_avg_sq_format = DSOPT_MOMENT_Q8;
    check(dsopt_optimizer_add_group(opt, &group, m.params, m.count));
    train(&m, opt, 10);
    hash_weights(digest, &m);
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) hash_state(digest, opt, names[i]);
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

int main(void) {
    static const struct {
        const char *name;
        void (*run)(uint64_t *digest);
    } cases[] = {
        {"adamw", adamw},         {"onebit", onebit}, {"low_precision", low_precision}, {"sharded", sharded},
        {"resharded", resharded}, {"muon", muon},     {"accumulation", accumulation},   {"uncorrected", uncorrected}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        uint64_t digest = UINT64_C(0xcbf29ce484222325);
        cases[i].run(&digest);
        printf("c %s %016llx\n", cases[i].name, (unsigned long long)digest);
    }
    return 0;
}
