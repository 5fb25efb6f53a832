// SPDX-License-Identifier: Apache-2.0
// The conformance program in C; the README.md in this folder defines what it computes. The programs in other languages
// do the same.
#include <dsopt.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 2, MAX_PARAMS = 3, MAX_NUMEL = 4099 };

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
    uint16_t bf16_weights[MAX_PARAMS][MAX_NUMEL]; // of case 3
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

static void train(model *m, dsopt_optimizer *opt, int steps) {
    DSOPT_NEW(dsopt_step, step);
    step.grads = m->grads;
    step.count = m->count;
    for (int s = 0; s < steps; ++s) {
        for (int i = 0; i < m->count; ++i) fill(m->grad_values[i], m->grads[i].numel, &m->seed);
        check(dsopt_optimizer_step(opt, &step));
    }
}

static size_t size_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_U8:
    case DSOPT_DTYPE_F8_E4M3: return 1;
    case DSOPT_DTYPE_I16:
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

static void hash_state(uint64_t *digest, dsopt_optimizer *opt, const char *name) {
    static float values[MAX_NUMEL]; // or smaller elements
    int64_t count;
    check(dsopt_optimizer_state_count(opt, &count));
    for (int64_t i = 0; i < count; ++i) {
        DSOPT_NEW(dsopt_state_info, info);
        check(dsopt_optimizer_state(opt, i, &info));
        if (strcmp(info.name, name) != 0) continue;
        const size_t bytes = (size_t)info.tensor.numel * size_of(info.tensor.dtype);
        check(dsopt_optimizer_export(opt, i, values, bytes));
        hash(digest, values, bytes);
    }
}

static void adamw(uint64_t *digest) {
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init(&m, 3, (const char *const[]){"a", "b", "c"}, (const int64_t[]){1, 7, 4099}, 12345, 1000);
    check(dsopt_context_create(NULL, &ctx));
    desc.max_norm = 1;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.015625;
    group.weight_decay = 0.125;
    check(dsopt_optimizer_add_group(opt, &group, m.params, m.count));
    train(&m, opt, 10);
    hash_weights(digest, &m);
    hash_state(digest, opt, "exp_avg");
    hash_state(digest, opt, "exp_avg_sq");
    dsopt_optimizer_destroy(opt);
    dsopt_context_destroy(ctx);
}

typedef struct rank {
    int rank;
    const unsigned char *id;
    size_t id_bytes;
    model m;
} rank;

static void *onebit_rank(void *argument) {
    rank *r = argument;
    dsopt_context *ctx;
    dsopt_comm *comm;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_comm_desc, local);
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init(&r->m, 2, (const char *const[]){"u", "v"}, (const int64_t[]){5, 130}, 54321, 2000 + (uint32_t)r->rank);
    check(dsopt_context_create(NULL, &ctx));
    local.kind = DSOPT_COMM_KIND_LOCAL;
    local.rank = r->rank;
    local.ranks = RANKS;
    local.id = r->id;
    local.id_bytes = r->id_bytes;
    check(dsopt_comm_create(ctx, &local, &comm));
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
    unsigned char id[16];
    size_t bytes = sizeof id;
    pthread_t threads[RANKS];
    check(dsopt_comm_unique_id(DSOPT_COMM_KIND_LOCAL, id, &bytes));
    for (int r = 0; r < RANKS; ++r) {
        ranks[r].rank = r;
        ranks[r].id = id;
        ranks[r].id_bytes = bytes;
        if (pthread_create(&threads[r], NULL, onebit_rank, &ranks[r]) != 0) exit(1);
    }
    for (int r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
    if (memcmp(ranks[0].m.weights, ranks[1].m.weights, sizeof ranks[0].m.weights) != 0) {
        fprintf(stderr, "the ranks have different weights\n");
        exit(1);
    }
    hash_weights(digest, &ranks[0].m);
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); // to nearest, ties to even
}

static void low_precision(uint64_t *digest) {
    static const char *const names[] = {"remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"};
    static model m;
    dsopt_context *ctx;
    dsopt_optimizer *opt;
    dsopt_group group;
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    init(&m, 3, (const char *const[]){"a", "b", "c"}, (const int64_t[]){1, 7, 4099}, 12345, 1000);
    for (int i = 0; i < m.count; ++i) {
        dsopt_tensor *weights = &m.params[i].tensor;
        for (int64_t k = 0; k < weights->numel; ++k) m.bf16_weights[i][k] = to_bf16(m.weights[i][k]);
        *weights = (dsopt_tensor){m.bf16_weights[i], weights->numel, DSOPT_DTYPE_BF16, 0};
    }
    check(dsopt_context_create(NULL, &ctx));
    desc.masters = DSOPT_MASTERS_REMAINDER;
    desc.seed = 7;
    check(dsopt_optimizer_create(ctx, &desc, &opt));
    check(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    group.lr = 0.015625;
    group.weight_decay = 0.125;
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

int main(void) {
    uint64_t digest = UINT64_C(0xcbf29ce484222325);
    adamw(&digest);
    onebit(&digest);
    low_precision(&digest);
    printf("c %016llx\n", (unsigned long long)digest);
    return 0;
}
