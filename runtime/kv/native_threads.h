/* A small persistent thread pool: `pool_run` hands numbered tasks to the calling thread and to sleeping
 * workers, and returns when all are done.
 *
 * One job at a time (callers take turns on `gate`). Tasks are drawn from one 64-bit ticket holding the
 * job's generation and the tasks left, so a worker that wakes late finds either nothing left or the next
 * job, never a stale one. Idle workers spin briefly, since a decode step issues one job per layer in quick
 * succession, and then sleep; a pool that spun longer would take the cores from the matrix products between.
 * After fork() the child has none of the threads: the pool forgets them and starts new ones when used.
 */
#ifndef OFFBOOK_NATIVE_THREADS_H
#define OFFBOOK_NATIVE_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum { POOL_MAX = 256, POOL_SPINS = 2000 };

typedef void (*pool_task)(void *job, int64_t index, int worker);

static struct {
    pthread_mutex_t gate;     /* one job at a time */
    pthread_mutex_t lock;     /* guards sleeping and waking */
    pthread_cond_t work, done;
    _Atomic uint64_t ticket;  /* generation << 32 | tasks left to draw */
    _Atomic uint64_t unfinished;
    _Atomic int sleepers, waiting;
    int started;              /* worker threads that exist; guarded by gate */
    _Atomic int wanted;       /* workers that may take part */
    void (*forget)(void);     /* in a forked child: drop what the lost threads may have been changing */
    pool_task task;
    void *job;
    uint32_t count;
} pool = {.gate = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER,
          .wanted = -1};

static inline void pool_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Draw and run tasks of generation `generation` until none is left. */
static void pool_drain(uint32_t generation, int worker) {
    uint64_t seen = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    while ((uint32_t)(seen >> 32) == generation && (uint32_t)seen != 0) {
        if (!atomic_compare_exchange_weak_explicit(&pool.ticket, &seen, seen - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        /* The job cannot end before this task is counted as finished, so its fields are stable now. */
        pool.task(pool.job, (int64_t)pool.count - (int64_t)(uint32_t)seen, worker);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.waiting)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.done);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load_explicit(&pool.ticket, memory_order_acquire);
    }
}

static void *pool_worker(void *argument) {
    int worker = (int)(intptr_t)argument;
    uint32_t last = 0;
    for (;;) {
        uint64_t seen = 0;
        for (int spin = 0; spin < POOL_SPINS; spin++) {
            seen = atomic_load_explicit(&pool.ticket, memory_order_acquire);
            if ((uint32_t)(seen >> 32) != last && (uint32_t)seen != 0) break;
            pool_pause();
        }
        if ((uint32_t)(seen >> 32) == last || (uint32_t)seen == 0) {
            pthread_mutex_lock(&pool.lock);
            atomic_fetch_add(&pool.sleepers, 1);
            for (;;) {
                seen = atomic_load(&pool.ticket);
                if ((uint32_t)(seen >> 32) != last && (uint32_t)seen != 0) break;
                pthread_cond_wait(&pool.work, &pool.lock);
            }
            atomic_fetch_sub(&pool.sleepers, 1);
            pthread_mutex_unlock(&pool.lock);
        }
        last = (uint32_t)(seen >> 32);
        if (worker <= atomic_load(&pool.wanted)) pool_drain(last, worker);
    }
    return NULL;
}

static void pool_after_fork(void) {
    pthread_mutex_init(&pool.gate, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.unfinished, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.waiting, 0);
    pool.started = 0;
    if (pool.forget) pool.forget();
}

/* Start the workers that are missing. A thread that cannot be started is done without. */
static void pool_start(void) {
    static int registered = 0;
    if (!registered) registered = pthread_atfork(NULL, NULL, pool_after_fork) == 0;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals belong to the interpreter's threads */
    while (pool.started < pool.wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_worker, (void *)(intptr_t)(pool.started + 1))) {
            pool.wanted = pool.started;
            break;
        }
        pthread_detach(thread);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* How many threads a job may use, the caller among them. Surplus threads stay, idle. */
static void pool_resize(int threads) {
    pthread_mutex_lock(&pool.gate);
    atomic_store(&pool.wanted, threads < 1 ? 0 : threads > POOL_MAX ? POOL_MAX - 1 : threads - 1);
    pthread_mutex_unlock(&pool.gate);
}

/* Run task(job, 0..count-1, worker), worker 0 being the caller. `alone`: too little work to wake others.
 * The caller holds `gate`. */
static void pool_run(pool_task task, void *job, uint32_t count, int alone) {
    if (pool.wanted > 0 && count > 1 && !alone && pool.started < pool.wanted) pool_start();
    if (alone || count <= 1 || pool.wanted < 1) {
        for (uint32_t i = 0; i < count; i++) task(job, i, 0);
        return;
    }
    pool.task = task;
    pool.job = job;
    pool.count = count;
    atomic_store(&pool.unfinished, count);
    uint32_t generation = (uint32_t)(atomic_load(&pool.ticket) >> 32) + 1;
    if (generation == 0) generation = 1; /* 0 is what a new worker has seen last */
    atomic_store(&pool.ticket, (uint64_t)generation << 32 | count);
    if (atomic_load(&pool.sleepers) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.lock);
    }
    pool_drain(generation, 0);
    for (int spin = 0; spin < POOL_SPINS && atomic_load(&pool.unfinished); spin++) pool_pause();
    if (atomic_load(&pool.unfinished)) {
        pthread_mutex_lock(&pool.lock);
        atomic_store(&pool.waiting, 1);
        while (atomic_load(&pool.unfinished)) pthread_cond_wait(&pool.done, &pool.lock);
        atomic_store(&pool.waiting, 0);
        pthread_mutex_unlock(&pool.lock);
    }
}

#endif
