/* offbook's CPU attention kernel: reads the block pool in place, packed as it is.
 *
 * This file owns the plain-C interface native.py calls, the layout of the pool as chunks, and the cutting
 * of a call into tasks. What a task computes is in native_attend.h, compiled once per instruction set and
 * chosen when the library is first used; the threads are in native_threads.h.
 *
 * Determinism: the cut of a row depends on its own length and window alone, every sum has a fixed order, and
 * parts are joined in order. So a row's result has the same bits alone or in a batch, on any number of
 * threads (on one machine: other instruction sets round differently).
 */
#if defined(__has_include)
#if __has_include(<Python.h>)
#define Py_LIMITED_API 0x030b0000
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
#undef ISA_AVX512
#endif

struct isa {
    const char *name;
    void (*attend)(const struct layer *, const struct chunk *, const struct work *);
    void (*join)(const struct layer *, const float *, int64_t, int64_t, const float *, int64_t, struct rows);
    void (*seal)(const struct layer *, int64_t, int32_t, int32_t, int, float *);
    void (*dequantise)(const struct layer *, const struct chunk *, int64_t, int64_t, float *, float *, float *);
};

#define SET(n) {#n, attend_##n, join_##n, seal_##n, dequantise_##n}
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

/* Lay out a work item for m rows at `at`; with `at` 0 the end is its size. */
static char *lay_out(const struct layer *l, int64_t m, char *at, struct work *w) {
    size_t rows = (size_t)m, dk = (size_t)l->dk, dv = (size_t)padded(l->dv);
    size_t few = m <= ROWS && !l->latent ? rows : 0;
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
    w->value_tile = take(&at, dv * GROUP, 4);
    return at;
}

/* Start a work item whose result goes to `out` ([m, dv padded], max, sum). */
static void begin(const struct layer *l, struct work *w, float *out) {
    w->out = out;
    w->max = out + w->m * padded(l->dv);
    w->sum = w->max + w->m;
    memset(out, 0, (size_t)(w->m * (padded(l->dv) + 2)) * sizeof *out);
    for (int64_t r = 0; r < w->m; r++) w->max[r] = -INFINITY;
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

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- decode: one new token for each row */

struct decode {
    const struct layer *l;
    const struct step *s;
    struct rows q, k, v, out;
    const float *sinks;
    int64_t *first;        /* [rows + 1]: the first task of each row */
    _Atomic int32_t *left; /* [rows, heads]: parts that are not done */
    float *parts;          /* a part per task */
    int64_t threads;
};

/* How a row's blocks are cut: `per` blocks to a part, the tail being one more part. */
static void cut(const struct step *s, int64_t row, int64_t *from, int64_t *per, int64_t *parts) {
    int64_t blocks = over(s->sealed[row], BLOCK);
    *from = least(s->start[row] / BLOCK, blocks);
    *per = most(1, over(blocks - *from, SPLIT));
    *parts = over(blocks - *from, *per) + 1;
}

static void append(const struct decode *d, int64_t row, int64_t head) {
    const struct layer *l = d->l;
    int64_t at = d->s->length[row] - 1 - d->s->sealed[row];
    int64_t page = d->s->pages[d->s->page_at[row] + at / GROUP], slot = (page * l->heads + head) * GROUP + at % GROUP;
    const float *k = d->k.data + row * d->k.token + head * d->k.head;
    for (int64_t i = 0; i < l->dk; i++) l->tail_k[slot * l->dk + i] = to_bf16(k[i]);
    if (l->latent) return;
    const float *v = d->v.data + row * d->v.token + head * d->v.head;
    for (int64_t i = 0; i < l->dv; i++) l->tail_v[slot * l->dv + i] = to_bf16(v[i]);
}

struct place {
    int64_t row, head, part, parts, block, last; /* blocks [block, last); the last part is the tail */
};

static struct place find(const struct decode *d, int64_t index) {
    struct place p = {0};
    int64_t end = d->s->rows, from, per;
    while (end - p.row > 1) { /* the row whose tasks `index` is among */
        int64_t middle = (p.row + end) / 2;
        if (d->first[middle] <= index) p.row = middle;
        else end = middle;
    }
    cut(d->s, p.row, &from, &per, &p.parts);
    p.head = (index - d->first[p.row]) / p.parts;
    p.part = (index - d->first[p.row]) % p.parts;
    p.block = from + p.part * per;
    p.last = least(p.block + per, over(d->s->sealed[p.row], BLOCK));
    return p;
}

static void find_block(const struct decode *d, const struct place *p, int64_t block, struct chunk *c) {
    int32_t slot = d->s->blocks[d->s->block_at[p->row] + block];
    block_chunk(d->l, p->head, slot, least(BLOCK, d->s->sealed[p->row] - block * BLOCK), block * BLOCK, c);
}

static void decode_task(void *job, int64_t index, int worker) {
    const struct decode *d = job;
    const struct layer *l = d->l;
    const struct step *s = d->s;
    struct place p = find(d, index);
    int64_t row = p.row, head = p.head, part = p.part, parts = p.parts;
    int64_t size = l->rep * (padded(l->dv) + 2), start = s->start[row], length = s->length[row], sealed = s->sealed[row];

    struct work w;
    lay_out(l, l->rep, private[worker].data, &w);
    for (int64_t r = 0; r < l->rep; r++) {
        memcpy(w.queries + r * l->dk, d->q.data + row * d->q.token + (head * l->rep + r) * d->q.head, (size_t)l->dk * 4);
        w.low[r] = start, w.high[r] = length;
    }
    w.lowest = start, w.highest = length;
    begin(l, &w, d->parts + index * size);

    struct chunk c;
    if (part < parts - 1) {
        /* What this thread will probably draw next. */
        struct place then = index + d->threads < d->first[s->rows] ? find(d, index + d->threads) : p;
        for (int64_t b = p.block; b < p.last; b++) {
            struct chunk next;
            find_block(d, &p, b, &c);
            if (b + 1 < p.last) {
                find_block(d, &p, b + 1, &next);
                look_ahead(l, &c, &next);
            } else if (then.part < then.parts - 1) {
                find_block(d, &then, then.block, &next);
                look_ahead(l, &c, &next);
            }
            isa->attend(l, &c, &w);
        }
    } else {
        append(d, row, head);
        for (int64_t at = sealed; at < length; at += BLOCK) {
            page_chunk(l, head, s->pages + s->page_at[row] + (at - sealed) / GROUP, least(BLOCK, length - at), at, &c);
            isa->attend(l, &c, &w);
        }
    }
    if (atomic_fetch_sub_explicit(&d->left[row * l->heads + head], 1, memory_order_acq_rel) == 1) {
        struct rows out = d->out;
        out.data += row * out.token + head * l->rep * out.head;
        isa->join(l, d->parts + (d->first[row] + head * parts) * size, parts, l->rep,
                  d->sinks ? d->sinks + head * l->rep : NULL, l->rep, out);
    }
}

API int offbook_decode(const struct layer *l, const struct step *s, const float *q, int64_t q_row, int64_t q_head,
                       const float *k, int64_t k_row, int64_t k_head, const float *v, int64_t v_row, int64_t v_head,
                       float *out, int64_t out_row, int64_t out_head, const float *sinks) {
    struct decode d = {l, s, {(float *)q, q_row, q_head}, {(float *)k, k_row, k_head}, {(float *)v, v_row, v_head},
                       {out, out_row, out_head}, sinks, NULL, NULL, NULL, 1};
    struct work w;
    int64_t tasks = 0, tokens = 0, from, per, parts;
    for (int64_t r = 0; r < s->rows; r++) {
        cut(s, r, &from, &per, &parts);
        tasks += parts * l->heads;
        tokens += s->length[r] - s->start[r];
    }
    pthread_mutex_lock(&pool.gate);
    size_t rows = (size_t)s->rows, heads = (size_t)l->heads, size = (size_t)(l->rep * (padded(l->dv) + 2));
    int failed = reserve(&shared, (rows + 1) * 8 + rows * heads * 4 + (size_t)tasks * size * 4 + 3 * 64) ||
                 reserve_private((size_t)lay_out(l, l->rep, NULL, &w));
    if (!failed) {
        char *at = shared.data;
        d.first = take(&at, rows + 1, 8);
        d.left = take(&at, rows * heads, 4);
        d.parts = take(&at, (size_t)tasks * size, 4);
        d.first[0] = 0;
        for (int64_t r = 0; r < s->rows; r++) {
            cut(s, r, &from, &per, &parts);
            d.first[r + 1] = d.first[r] + parts * l->heads;
            for (int64_t h = 0; h < l->heads; h++) atomic_init(&d.left[r * l->heads + h], (int32_t)parts);
        }
        int alone = small(l, tokens * l->rep);
        d.threads = alone ? 1 : least(1 + atomic_load(&pool.wanted), tasks);
        pool_run(decode_task, &d, (uint32_t)tasks, alone);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

/* ---- prefill: several new tokens of one row, causal among themselves, not written */

struct prefill {
    const struct layer *l;
    const struct step *s;
    int64_t row, tokens, window;
    struct rows q, k, v, out;
    const float *sinks;
    int64_t step, tiles, parts; /* query tokens to a tile; parts of the history to a tile */
    _Atomic int32_t *left;      /* [tiles, heads] */
    float *sums;                /* a part per task, unless parts is 1 */
};

static void prefill_task(void *job, int64_t index, int worker) {
    const struct prefill *d = job;
    const struct layer *l = d->l;
    const struct step *s = d->s;
    const int64_t sealed = s->sealed[d->row], history = s->length[d->row];
    int64_t part = index % d->parts, head = index / d->parts % l->heads, tile = d->tiles - 1 - index / d->parts / l->heads;
    int64_t query = tile * d->step, queries = least(d->step, d->tokens - query);
    const int32_t *blocks = s->blocks + s->block_at[d->row], *pages = s->pages + s->page_at[d->row];

    struct work w;
    lay_out(l, queries * l->rep, private[worker].data, &w);
    for (int64_t r = 0; r < w.m; r++) {
        int64_t t = query + r / l->rep, position = history + t;
        memcpy(w.queries + r * l->dk, d->q.data + t * d->q.token + (head * l->rep + r % l->rep) * d->q.head, (size_t)l->dk * 4);
        w.low[r] = d->window ? most(0, position - d->window + 1) : 0;
        w.high[r] = position + 1;
    }
    w.lowest = w.low[0];
    w.highest = w.high[w.m - 1];
    int64_t width = padded(l->dv) + 2;
    float *sums = d->sums + (tile * l->heads + head) * d->parts * d->step * l->rep * width;
    begin(l, &w, d->parts > 1 ? sums + part * w.m * width : w.out);

    int64_t in_blocks = over(sealed, BLOCK), in_pages = over(history - sealed, BLOCK);
    int64_t all = in_blocks + in_pages + over(d->tokens, BLOCK), per = over(all, d->parts);
    for (int64_t i = part * per; i < least(all, (part + 1) * per); i++) {
        struct chunk c;
        if (i < in_blocks) {
            if ((i + 1) * BLOCK <= w.lowest) continue; /* left the window; its slot may be gone */
            block_chunk(l, head, blocks[i], least(BLOCK, sealed - i * BLOCK), i * BLOCK, &c);
        } else if (i < in_blocks + in_pages) {
            int64_t at = sealed + (i - in_blocks) * BLOCK;
            page_chunk(l, head, pages + (at - sealed) / GROUP, least(BLOCK, history - at), at, &c);
        } else {
            int64_t at = (i - in_blocks - in_pages) * BLOCK;
            const struct rows *v = l->latent ? &d->k : &d->v;
            c.first = history + at;
            c.tokens = least(BLOCK, d->tokens - at);
            c.key_kind = c.value_kind = F32;
            c.k_row = d->k.token * 4;
            c.v_row = v->token * 4;
            for (int g = 0; g < GROUPS; g++) {
                c.k[g] = (const uint8_t *)(d->k.data + (at + g * GROUP) * d->k.token + head * d->k.head);
                c.v[g] = (const uint8_t *)(v->data + (at + g * GROUP) * v->token + head * v->head);
            }
        }
        isa->attend(l, &c, &w);
    }
    struct rows out = d->out;
    out.data += query * out.token + head * l->rep * out.head;
    const float *sinks = d->sinks ? d->sinks + head * l->rep : NULL;
    if (d->parts == 1)
        isa->join(l, w.out, 1, w.m, sinks, l->rep, out);
    else if (atomic_fetch_sub_explicit(&d->left[tile * l->heads + head], 1, memory_order_acq_rel) == 1)
        isa->join(l, sums, d->parts, w.m, sinks, l->rep, out);
}

API int offbook_prefill(const struct layer *l, const struct step *s, int64_t row, int64_t tokens, int64_t window,
                        const float *q, int64_t q_token, int64_t q_head, const float *k, int64_t k_token, int64_t k_head,
                        const float *v, int64_t v_token, int64_t v_head, float *out, int64_t out_token, int64_t out_head,
                        const float *sinks) {
    struct prefill d = {.l = l, .s = s, .row = row, .tokens = tokens, .window = window, .sinks = sinks};
    d.q = (struct rows){(float *)q, q_token, q_head};
    d.k = (struct rows){(float *)k, k_token, k_head};
    d.v = (struct rows){(float *)v, v_token, v_head};
    d.out = (struct rows){out, out_token, out_head};
    int64_t sealed = s->sealed[row], history = s->length[row];
    int64_t chunks = over(sealed, BLOCK) + over(history - sealed, BLOCK) + over(tokens, BLOCK);
    d.step = most(1, least(GROUP, TILE_ROWS / l->rep));
    d.step = least(d.step, tokens);
    d.tiles = over(tokens, d.step);
    d.parts = most(1, least(chunks, SPLIT / (d.tiles * l->heads)));
    struct work w;
    pthread_mutex_lock(&pool.gate);
    size_t items = (size_t)(d.tiles * l->heads);
    size_t floats = d.parts > 1 ? items * (size_t)(d.parts * d.step * l->rep * (padded(l->dv) + 2)) : 0;
    int failed = reserve(&shared, items * 4 + floats * 4 + 2 * 64) ||
                 reserve_private((size_t)lay_out(l, d.step * l->rep, NULL, &w));
    if (!failed) {
        char *at = shared.data;
        d.left = take(&at, items, 4);
        d.sums = take(&at, floats, 4);
        for (size_t i = 0; i < items; i++) atomic_init(&d.left[i], (int32_t)d.parts);
        pool_run(prefill_task, &d, (uint32_t)(items * (size_t)d.parts), small(l, (history + tokens) * tokens * l->rep));
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

/* ---- sealing, and history as float32 */

struct seal {
    const struct layer *l;
    const int32_t *pages, *slots, *groups;
};

static void seal_task(void *job, int64_t index, int worker) {
    const struct seal *d = job;
    int64_t item = index / d->l->heads;
    isa->seal(d->l, index % d->l->heads, d->pages[item], d->slots[item], d->groups[item], (float *)private[worker].data);
}

static size_t tile_bytes(const struct layer *l) { return (size_t)(most(padded(l->dk), padded(l->dv)) * GROUP) * 4; }

API int offbook_seal(const struct layer *l, int64_t count, const int32_t *pages, const int32_t *slots, const int32_t *groups) {
    struct seal d = {l, pages, slots, groups};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve_private(tile_bytes(l));
    if (!failed) pool_run(seal_task, &d, (uint32_t)(count * l->heads), small(l, count * GROUP * 8));
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

API int offbook_abi(void) { return 1; }

API void offbook_threads(int threads) {
    pool_resize(threads);
}

/* Use the named instruction set (NULL or "": the best). Returns its name, or NULL if this CPU lacks it. */
API const char *offbook_isa(const char *name) {
    pool.forget = forget;
    for (int set = set_count - 1; set >= 0; set--)
        if (supported(set) && (!name || !*name || !strcmp(name, sets[set].name))) {
            isa = &sets[set];
            return isa->name;
        }
    return NULL;
}

#ifdef HAVE_PYTHON
/* An importable, empty module: the functions are called through ctypes, which releases the GIL. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "offbook's CPU attention kernel", 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
#endif
