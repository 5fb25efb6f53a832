// SPDX-License-Identifier: Apache-2.0
#include "demo_pool.h"
#include <pthread.h>
#include <stdlib.h>

enum { MAX_WORKERS = 63 };

struct pool {
    pthread_mutex_t lock; // guards everything below
    pthread_cond_t work, done;
    void (*body)(void *arg, int i);
    void *arg;
    int n, next, finished; // of the current job
    int stop, workers;
    pthread_t thread[MAX_WORKERS];
};

// Runs pieces until none is left. The lock is held when the function is called and when it returns. If a worker is not
// scheduled, other threads run its pieces and no thread waits for it: on a loaded machine that is much faster than
// fixed shares and a barrier.
static void run_pieces(struct pool *pool) {
    while (pool->next < pool->n) {
        const int i = pool->next++;
        pthread_mutex_unlock(&pool->lock);
        pool->body(pool->arg, i);
        pthread_mutex_lock(&pool->lock);
        if (++pool->finished == pool->n) pthread_cond_signal(&pool->done);
    }
}

static void *work(void *argument) {
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    while (!pool->stop) {
        run_pieces(pool);
        if (!pool->stop) pthread_cond_wait(&pool->work, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

struct pool *pool_create(int threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    while (pool->workers < threads - 1 && pool->workers < MAX_WORKERS &&
           !pthread_create(&pool->thread[pool->workers], NULL, work, pool))
        ++pool->workers;
    return pool;
}

void pool_destroy(struct pool *pool) {
    if (!pool) return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->workers; ++i) pthread_join(pool->thread[i], NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

void pool_run(struct pool *pool, int n, void (*body)(void *arg, int i), void *arg) {
    pthread_mutex_lock(&pool->lock);
    pool->body = body;
    pool->arg = arg;
    pool->n = n;
    pool->next = pool->finished = 0;
    pthread_cond_broadcast(&pool->work);
    run_pieces(pool);
    while (pool->finished < pool->n) pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
