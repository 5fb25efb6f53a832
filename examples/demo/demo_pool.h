// SPDX-License-Identifier: Apache-2.0
// A pool of threads.
#ifndef DEMO_POOL_H
#define DEMO_POOL_H

struct pool;
// `threads` includes the caller. Returns NULL if out of memory. The pool may have fewer threads, which only makes it
// slower.
struct pool *pool_create(int threads);
void pool_destroy(struct pool *pool);

// Runs body(arg, i) for every i in [0, n) on any thread, and returns when all are done.
void pool_run(struct pool *pool, int n, void (*body)(void *arg, int i), void *arg);

#endif
