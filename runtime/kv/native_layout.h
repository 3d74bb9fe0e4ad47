/* The structs native.py fills, and the layout of the pool seen as chunks of up to 256 tokens. */
#ifndef OFFBOOK_NATIVE_LAYOUT_H
#define OFFBOOK_NATIVE_LAYOUT_H

#include <stdint.h>

#define LOG2E 1.44269504088896340736f

enum { GROUP = 64, BLOCK = 256, GROUPS = 4, ROWS = 6 /* query rows that share an unpacking in registers */ };
enum { F32, BF16, U4, U8, LATENT }; /* kinds of rows; LATENT: values are channels of the keys */
enum { SPLIT = 16, TILE_ROWS = 96, TASK_BLOCKS = 8 };
#if defined(__x86_64__) /* this many query rows multiply packed codes directly */
enum { FEW = 12 };
#else
enum { FEW = ROWS };
#endif
enum { TASK_BYTES = 96 << 10, PANEL_BYTES = 32 << 10, MIN_PANEL = 256 }; /* of linear layers: see native_dot.h */
enum { SILU, GELU }; /* activations of a gated block; GELU: its approximation with tanh */

/* ---- the interface: native.py mirrors these structs */

struct layer {
    int64_t heads, rep, dk, dv;         /* KV heads, query heads per KV head, widths */
    int64_t key_bits, value_bits;       /* 4, 8 or 16 */
    int64_t value_group, latent;
    int64_t slots, pages;
    const uint8_t *k, *v;               /* packed or raw, [slots, ...] */
    const uint16_t *k_scales, *k_biases, *v_scales, *v_biases;
    uint16_t *tail_k, *tail_v;          /* [pages, heads, 64, width] */
    float scale, softcap;               /* softcap 0: none */
};

struct step {
    int64_t rows;
    const int32_t *blocks, *pages;      /* all rows' tables, one after another */
    const int64_t *block_at, *page_at;  /* where each row's begins */
    const int64_t *sealed, *length, *start;
    struct run *runs;                   /* for a decode: see native_share.h */
    int32_t *members;
    int64_t run_count;
};

struct run { /* blocks [block, last), which `count` rows, members[at ...], read from the same slots */
    int32_t block, last, at, count;
};

struct rows { /* [tokens, heads, width] with any strides (in floats) of the first two axes */
    float *data;
    int64_t token, head;
};

struct linear { /* one layer's weights [n, k]; bias [n] or NULL */
    const void *w; /* floats as nn.Linear keeps them, or packed to `bits`: see native_pack.h */
    const float *bias;
    int64_t n, bits;
};

enum { PACKED = 64 }; /* inputs of a piece of packed weights */

/* Four rows' scales, biases and codes of 64 inputs. */
static inline int64_t piece_bytes(int64_t bits) { return 64 + 4 * PACKED / 8 * bits; }

/* ---- the pool as chunks of up to 256 tokens of one KV head */

struct chunk {
    int key_kind, value_kind;
    int64_t first, tokens;              /* position of the first token, how many hold data */
    const uint8_t *k[GROUPS], *v[GROUPS];
    int64_t k_row, v_row;               /* bytes per channel (packed keys) or per token */
    const uint16_t *k_scales, *k_biases, *v_scales, *v_biases;
    int64_t k_ahead, v_ahead, k_scales_ahead, v_scales_ahead; /* see look_ahead */
};

struct work { /* query rows of one KV head, and one thread's memory for them */
    int64_t m;
    int few;                            /* multiply with packed codes directly */
    float *queries, *spread, *folded;   /* [m, dk]; each value four times; times the scales */
    float *out, *max, *sum;             /* the running result: [m, dv padded], [m], [m] */
    int64_t *low, *high, lowest, highest; /* visible positions of each row, and of all */
    float *scores, *weighted, *alpha, *constant, *token, *key_tile, *value_tile;
};

struct product { /* see FN(multiply) */
    const float *a;
    int64_t a_row, a_column;
    const uint8_t *b;
    int64_t b_row, depth, columns;
    float *c;
    int64_t c_row;
    const float *alpha;
    int64_t ahead;                      /* where b's bytes of the next chunk are, relative to this one's */
};

struct input { /* x of a linear layer: m rows of k floats, `row` floats apart, zero behind the k-th */
    const float *data;
    int64_t m, k, row;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t over(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }

static inline float bf16(uint16_t x) {
    union { uint32_t bits; float value; } u = {.bits = (uint32_t)x << 16};
    return u.value;
}

static inline uint16_t to_bf16(float x) { /* to nearest even; NaN stays NaN */
    union { float value; uint32_t bits; } u = {.value = x};
    if (x != x) return 0x7fc0;
    return (uint16_t)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

static void block_chunk(const struct layer *l, int64_t head, int64_t slot, int64_t tokens, int64_t first, struct chunk *c) {
    int64_t at = slot * l->heads + head;
    c->first = first;
    c->tokens = tokens;
    c->k_ahead = c->v_ahead = c->k_scales_ahead = c->v_scales_ahead = 0;
    if (l->key_bits == 16) {
        c->key_kind = BF16;
        c->k_row = l->dk * 2;
        for (int g = 0; g < GROUPS; g++) c->k[g] = l->k + (at * BLOCK + g * GROUP) * c->k_row;
    } else {
        c->key_kind = l->key_bits == 4 ? U4 : U8;
        c->k_row = BLOCK * l->key_bits / 8;
        for (int g = 0; g < GROUPS; g++) c->k[g] = l->k + at * l->dk * c->k_row + g * GROUP * l->key_bits / 8;
        c->k_scales = l->k_scales + at * l->dk * GROUPS;
        c->k_biases = l->k_biases + at * l->dk * GROUPS;
    }
    if (l->latent) {
        c->value_kind = l->key_bits == 16 ? BF16 : LATENT;
        c->v_row = c->k_row;
        for (int g = 0; g < GROUPS; g++) c->v[g] = c->k[g];
        return;
    }
    c->value_kind = l->value_bits == 16 ? BF16 : l->value_bits == 4 ? U4 : U8;
    c->v_row = l->dv * l->value_bits / 8;
    for (int g = 0; g < GROUPS; g++) c->v[g] = l->v + (at * BLOCK + g * GROUP) * c->v_row;
    if (l->value_bits != 16) {
        c->v_scales = l->v_scales + at * BLOCK * (l->dv / l->value_group);
        c->v_biases = l->v_biases + at * BLOCK * (l->dv / l->value_group);
    }
}

/* While `c` is computed, fetch `next` from memory: byte for byte as far on as its block is. Both packed, of one
 * layer. A pool is larger than the caches, so each block is cold, and its pieces are too short for the
 * hardware to notice a pattern (3 KV heads, width 64, 4096 tokens: 0.22 ms without, see the benchmark). */
static void look_ahead(const struct layer *l, struct chunk *c, const struct chunk *next) {
    if (l->key_bits != 16) {
        c->k_ahead = next->k[0] - c->k[0];
        c->k_scales_ahead = next->k_scales - c->k_scales;
    }
    if (!l->latent) c->v_ahead = next->v[0] - c->v[0];
    if (!l->latent && l->value_bits != 16) c->v_scales_ahead = next->v_scales - c->v_scales;
}

/* Up to four pages of the tail. */
static void page_chunk(const struct layer *l, int64_t head, const int32_t *pages, int64_t tokens, int64_t first,
                       struct chunk *c) {
    const uint16_t *values = l->latent ? l->tail_k : l->tail_v;
    int64_t dv = l->latent ? l->dk : l->dv;
    c->first = first;
    c->tokens = tokens;
    c->k_ahead = c->v_ahead = c->k_scales_ahead = c->v_scales_ahead = 0;
    c->key_kind = c->value_kind = BF16;
    c->k_row = l->dk * 2;
    c->v_row = dv * 2;
    for (int g = 0; g < GROUPS && g * GROUP < tokens; g++) {
        c->k[g] = (const uint8_t *)(l->tail_k + (pages[g] * l->heads + head) * GROUP * l->dk);
        c->v[g] = (const uint8_t *)(values + (pages[g] * l->heads + head) * GROUP * dv);
    }
}

#endif
