// SPDX-License-Identifier: Apache-2.0
// A pool of threads.
#ifndef DEMO_POOL_H
#define DEMO_POOL_H

struct pool;
struct pool *
pool_create(int threads); // the caller counts as one; NULL = out of memory. Fewer threads only make it slower
void pool_destroy(struct pool *pool);

// Runs body(arg, i) for every i in [0, n) on any thread, and returns when all are done.
void pool_run(struct pool *pool, int n, void (*body)(void *arg, int i), void *arg);

#endif
