/* offbook's CPU kernels: attention that reads the block pool in place, packed as it is, and linear layers of
 * few rows.
 *
 * One library of several parts: native_layout.h (the pool as chunks), native_share.h (which rows read the same
 * slots), native_decode.h and native_prefill.h (how a call is cut into tasks), native_attend.h on native_simd.h
 * (what a task computes, compiled once per instruction set), native_quant.h (sealing, dequantising),
 * native_linear.h on native_dot.h (linear layers), native_block.h on native_rows.h (what else a decoder layer
 * does), native_packing.h and native_pack.h (weights in 4 or 8 bits), native_read.h on native_hash.h (a block's
 * file into its slot), native_threads.h. This file owns the choice of the instruction set, the working memory, and
 * sealing.
 *
 * Determinism: the cut of a row depends on its own length and window alone, every sum has a fixed order
 * whatever other rows are computed with it, and parts are joined in order. So a row's result has the same bits
 * alone or in a batch, sharing a prefix or not, on any number of threads (on one machine: other instruction
 * sets round differently).
 */
#if defined(__has_include)
#if __has_include(<Python.h>)
#include <Python.h>
#define HAVE_PYTHON 1
#endif
#endif

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "native_layout.h"
#include "native_threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define API __attribute__((visibility("default")))

/* ---- one compilation per instruction set */

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define VW 4
#if defined(__aarch64__)
#define NV 4
#else
#define NV 2
#endif
#define FN(name) name##_plain
#define TARGET
#include "native_simd.h"
#include "native_attend.h"
#include "native_quant.h"
#include "native_dot.h"
#include "native_rows.h"
#include "native_hash.h"
#undef VW
#undef NV
#undef FN
#undef TARGET
#undef SIMD

#if defined(__x86_64__)
#define VW 8
#define NV 2
#define FN(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define ISA_AVX2
#include "native_simd.h"
#include "native_attend.h"
#include "native_quant.h"
#include "native_dot.h"
#include "native_rows.h"
#include "native_hash.h"
#undef VW
#undef NV
#undef FN
#undef TARGET
#undef SIMD
#undef ISA_AVX2

#define VW 16
#define NV 4
#define FN(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define ISA_AVX512
#include "native_simd.h"
#include "native_attend.h"
#include "native_quant.h"
#include "native_dot.h"
#include "native_rows.h"
#include "native_hash.h"
#undef ISA_AVX512
#endif

struct isa {
    const char *name;
    void (*attend)(const struct layer *, const struct chunk *, const struct work *);
    void (*merge)(const struct layer *, int64_t, const float *, float *);
    void (*join)(const struct layer *, const float *, int64_t, int64_t, const float *, int64_t, struct rows);
    void (*seal)(const struct layer *, int64_t, int32_t, int32_t, int, float *);
    void (*dequantise)(const struct layer *, const struct chunk *, int64_t, int64_t, float *, float *, float *);
    void (*linear)(const struct linear *, const struct input *, int64_t, int64_t, float *, int64_t, float *);
    void (*gate)(int, int64_t, const float *, const float *, float *);
    void (*unpack)(const struct linear *, int64_t, int64_t, int64_t, int64_t, float *);
    void (*norm)(int64_t, const float *, const float *, float, float *);
    void (*add)(int64_t, const float *, float *);
    void (*turn)(int64_t, int, const float *, const float *, float *);
    void (*hash)(const uint8_t *, int64_t, uint8_t *);
};

#define SET(n) {#n, attend_##n, merge_##n, join_##n, seal_##n, dequantise_##n, linear_##n, gate_##n, unpack_##n, norm_##n, add_##n, turn_##n, hash_##n}
static const struct isa sets[] = {
    SET(plain),
#if defined(__x86_64__)
    SET(avx2), SET(avx512),
#endif
};
static const struct isa *isa = NULL;

static int supported(int set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set == 1) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (set == 2)
        return supported(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return set == 0;
}

static const int set_count = (int)(sizeof sets / sizeof *sets);

/* ---- memory: one region shared by a call's tasks, one per thread; they grow and stay */

struct region {
    char *data;
    size_t size;
};
static struct region shared, private[POOL_MAX + 1];

static int reserve(struct region *r, size_t size) {
    if (size <= r->size) return 0;
    void *data = NULL;
    free(r->data);
    r->data = NULL, r->size = 0;
    if (posix_memalign(&data, 64, size)) return -1;
    r->data = data, r->size = size;
    return 0;
}

static void forget(void) { /* in a forked child: another thread may have been changing these; leak them */
    memset(&shared, 0, sizeof shared);
    memset(private, 0, sizeof private);
}

static int reserve_private(size_t size) {
    for (int i = 0; i <= atomic_load(&pool.wanted); i++)
        if (reserve(&private[i], size)) return -1;
    return 0;
}

static void *take(char **at, size_t count, size_t item) {
    void *p = *at;
    *at += (count * item + 63) / 64 * 64;
    return p;
}

/* Lay out a work item for m rows at `at`; with `at` 0 the end is its size. Rows are multiplied with packed codes
 * where `alike`, the rows that are always computed together, are few: so that others beside them do not
 * change their bits. */
static char *lay_out(const struct layer *l, int64_t m, int64_t alike, char *at, struct work *w) {
    size_t rows = (size_t)m, dk = (size_t)l->dk, dv = (size_t)padded(l->dv);
    size_t few = alike <= FEW && !l->latent ? rows : 0;
    size_t codes = few && m > ROWS && l->value_bits != 16 ? (size_t)l->value_group * BLOCK : 0;
    w->m = m;
    w->few = few > 0;
    w->queries = take(&at, rows * dk, 4);
    w->spread = take(&at, few * dk * 4, 4);
    w->folded = take(&at, few * dk * 4, 4);
    w->out = take(&at, rows * (dv + 2), 4);
    w->max = w->out + rows * dv;
    w->sum = w->max + rows;
    w->low = take(&at, rows, 8);
    w->high = take(&at, rows, 8);
    w->scores = take(&at, rows * BLOCK, 4);
    w->weighted = take(&at, few * BLOCK, 4);
    w->alpha = take(&at, rows, 4);
    w->constant = take(&at, rows * GROUPS, 4);
    w->token = take(&at, 2 * BLOCK, 4);
    w->key_tile = take(&at, (size_t)padded(l->dk) * GROUP, 4);
    w->value_tile = take(&at, dv * GROUP > codes ? dv * GROUP : codes, 4);
    return at;
}

/* From here on the result goes to `out` ([m, dv padded], max, sum). */
static void restart(const struct layer *l, struct work *w, float *out) {
    w->out = out;
    w->max = out + w->m * padded(l->dv);
    w->sum = w->max + w->m;
    memset(out, 0, (size_t)(w->m * (padded(l->dv) + 2)) * sizeof *out);
    for (int64_t r = 0; r < w->m; r++) w->max[r] = -INFINITY;
}

/* Scale a work item's queries. */
static void begin(const struct layer *l, struct work *w) {
    float scale = l->softcap > 0 ? l->scale : l->scale * LOG2E;
    int64_t n = w->m * l->dk;
    for (int64_t i = 0; i < n; i++) w->queries[i] *= scale;
    if (w->few)
        for (int64_t i = 0; i < n; i++)
            for (int g = 0; g < GROUPS; g++) w->spread[GROUPS * i + g] = w->queries[i];
}

/* Worth waking other threads: some 20 microseconds of work for one. */
static int small(const struct layer *l, int64_t tokens_times_rows) {
    return tokens_times_rows * l->heads * (l->dk + l->dv) < 600000;
}

#include "native_share.h"
#include "native_decode.h"
#include "native_prefill.h"
#include "native_linear.h"
#include "native_block.h"
#include "native_packing.h"
#include "native_read.h"

/* ---- sealing, and history as float32 */

struct seal { /* item i is a page of layer i */
    const struct layer *const *layers;
    const int32_t *pages, *slots, *groups;
    int64_t heads;
};

static void seal_task(void *job, int64_t index, int worker) {
    const struct seal *d = job;
    const int64_t item = index / d->heads, head = index % d->heads;
    const struct layer *l = d->layers[item];
    if (head < l->heads) isa->seal(l, head, d->pages[item], d->slots[item], d->groups[item], (float *)private[worker].data);
}

static size_t tile_bytes(const struct layer *l) { return (size_t)(most(padded(l->dk), padded(l->dv)) * GROUP) * 4; }

API int offbook_seal(const struct layer *const *layers, int64_t count, const int32_t *pages, const int32_t *slots, const int32_t *groups) {
    struct seal d = {layers, pages, slots, groups, 1};
    size_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        d.heads = most(d.heads, layers[i]->heads);
        if (tile_bytes(layers[i]) > bytes) bytes = tile_bytes(layers[i]);
    }
    pthread_mutex_lock(&pool.gate);
    int failed = reserve_private(bytes);
    if (!failed && count) pool_run(seal_task, &d, (uint32_t)(count * d.heads), small(layers[0], count * GROUP * 8));
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

struct dequantise {
    const struct layer *l;
    const struct step *s;
    int64_t row, from, to, k_head, v_head;
    float *k, *v;
};

static void dequantise_task(void *job, int64_t index, int worker) {
    const struct dequantise *d = job;
    const struct layer *l = d->l;
    const struct step *s = d->s;
    int64_t sealed = s->sealed[d->row], length = s->length[d->row], in_blocks = over(sealed, BLOCK);
    int64_t head = index % l->heads, i = index / l->heads, first = most(least(d->from, sealed) / BLOCK, 0) + i;
    struct chunk c;
    if (first < in_blocks) {
        block_chunk(l, head, s->blocks[s->block_at[d->row] + first], least(BLOCK, sealed - first * BLOCK), first * BLOCK, &c);
    } else {
        int64_t at = sealed + (first - in_blocks) * BLOCK;
        page_chunk(l, head, s->pages + s->page_at[d->row] + (at - sealed) / GROUP, least(BLOCK, length - at), at, &c);
    }
    int64_t from = most(d->from - c.first, 0), to = least(d->to - c.first, c.tokens), row = c.first + from - d->from;
    if (from < to)
        isa->dequantise(l, &c, from, to, d->k + head * d->k_head + row * l->dk,
                        l->latent ? NULL : d->v + head * d->v_head + row * l->dv, (float *)private[worker].data);
}

API int offbook_dequantise(const struct layer *l, const struct step *s, int64_t row, int64_t from, int64_t to, float *k,
                           int64_t k_head, float *v, int64_t v_head) {
    struct dequantise d = {l, s, row, from, to, k_head, v_head, k, v};
    int64_t sealed = s->sealed[row], chunks = over(sealed, BLOCK) + over(s->length[row] - sealed, BLOCK);
    int64_t count = most(0, chunks - least(from, sealed) / BLOCK) * l->heads;
    pthread_mutex_lock(&pool.gate);
    int failed = reserve_private(tile_bytes(l));
    if (!failed) pool_run(dequantise_task, &d, (uint32_t)count, small(l, to - from));
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

/* ---- what the library is and may use */

API int offbook_abi(void) { return 10; }

API void offbook_threads(int threads) {
    pool_resize(threads);
}

/* Use the named instruction set (NULL or "": the best). Returns its name, or NULL if this CPU lacks it. */
API const char *offbook_isa(const char *name) {
    const char *chosen = NULL;
    pthread_mutex_lock(&pool.gate);
    pool.forget = forget;
    for (int set = set_count - 1; set >= 0 && !chosen; set--)
        if (supported(set) && (!name || !*name || !strcmp(name, sets[set].name))) {
            isa = &sets[set];
            chosen = isa->name;
        }
    pthread_mutex_unlock(&pool.gate);
    return chosen;
}

#ifdef HAVE_PYTHON
/* An importable, empty module: the functions are called through ctypes, which releases the GIL. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "offbook's CPU attention kernel", 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
#endif
