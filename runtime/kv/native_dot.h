#include "native_pack.h"

/* Four weight rows times several rows of x, for one instruction set: the inner part of a linear layer.
 *
 * A dot product keeps one vector of partial sums, element k going to lane k % VW in order of k, and joins its
 * lanes by halves (i with i + VW/2, and so on). That order is the same however many rows are computed
 * together and wherever sums are put aside between panels, so neither the number of rows nor how the work is
 * cut changes a result's bits.
 */

#if defined(ISA_AVX512)
#define XR 6 /* rows of x at once: 4 x 6 sums and the loaded values fill the registers */
#elif defined(__aarch64__)
#define XR 5
#else
#define XR 2
#endif

/* Join the lanes of four vectors of partial sums: four sums. */
SIMD void FN(join_lanes)(const vf *s, float *out) {
#if defined(ISA_AVX512)
    __m512 a = (__m512)s[0], b = (__m512)s[1], c = (__m512)s[2], d = (__m512)s[3];
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 v = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, v)));
#elif defined(ISA_AVX2)
    __m256 a = (__m256)s[0], b = (__m256)s[1], c = (__m256)s[2], d = (__m256)s[3];
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    __m256 v = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)); /* a a c c, b b d d */
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_shuffle_ps(_mm256_castps256_ps128(v), _mm256_castps256_ps128(v), 0x88),
                                       _mm_shuffle_ps(_mm256_extractf128_ps(v, 1), _mm256_extractf128_ps(v, 1), 0x88)));
#else
    for (int r = 0; r < 4; r++) out[r] = (s[r][0] + s[r][2]) + (s[r][1] + s[r][3]);
#endif
}

/* `xr` rows of x (`x_row` floats apart, zero behind the last element) times four weight rows, k elements of
 * both. The sums go on from `from` (NULL: from zero) and are put aside at `aside`, or joined into `out` if that
 * is NULL. `next`: `lines` weight rows to fetch from memory meanwhile. */
SIMD void FN(dots)(const int xr, const int lines, const float *const *w, const float *x, int64_t x_row, int64_t k,
                   const float *const *next, const float *from, float *aside, float (*out)[4]) {
    vf sum[XR][4], a[4];
    int64_t i = 0;
    UNROLL for (int c = 0; c < xr; c++)
        UNROLL for (int r = 0; r < 4; r++) sum[c][r] = from ? FN(load)(from + (4 * c + r) * VW) : (vf){0};
    for (; i + VW <= k; i += VW) {
        UNROLL for (int r = 0; r < 4; r++) a[r] = FN(load)(w[r] + i);
        if (VW == 16 || i % 16 == 0)
            UNROLL for (int j = 0; j < lines; j++) __builtin_prefetch(next[j] + i);
        UNROLL for (int c = 0; c < xr; c++) {
            vf b = FN(load)(x + c * x_row + i);
            UNROLL for (int r = 0; r < 4; r++) sum[c][r] += a[r] * b;
        }
    }
    if (i < k) {
        UNROLL for (int r = 0; r < 4; r++) {
            a[r] = (vf){0};
            memcpy(&a[r], w[r] + i, (size_t)(k - i) * 4);
        }
        UNROLL for (int c = 0; c < xr; c++) {
            vf b = FN(load)(x + c * x_row + i);
            UNROLL for (int r = 0; r < 4; r++) sum[c][r] += a[r] * b;
        }
    }
    UNROLL for (int c = 0; c < xr; c++) {
        if (aside)
            UNROLL for (int r = 0; r < 4; r++) FN(store)(aside + (4 * c + r) * VW, sum[c][r]);
        else
            FN(join_lanes)(sum[c], out[c]);
    }
}

#define DOTS(xr, lines)                                                                                            \
    static __attribute__((noinline)) TARGET void FN(dots_##xr##_##lines)(                                          \
        const float *const *w, const float *x, int64_t x_row, int64_t k, const float *const *next,                 \
        const float *from, float *aside, float (*out)[4]) {                                                        \
        FN(dots)(xr, lines, w, x, x_row, k, next, from, aside, out);                                               \
    }
#define DOTS_ANY(xr) DOTS(xr, 0) DOTS(xr, 1) DOTS(xr, 2) DOTS(xr, 4)
#define DOTS_OF(xr) {FN(dots_##xr##_0), FN(dots_##xr##_1), FN(dots_##xr##_2), NULL, FN(dots_##xr##_4)}
typedef void (*FN(dots_function))(const float *const *, const float *, int64_t, int64_t, const float *const *,
                                  const float *, float *, float (*)[4]);
DOTS_ANY(1) DOTS_ANY(2)
#if XR > 2
DOTS_ANY(3) DOTS_ANY(4) DOTS_ANY(5)
#endif
#if XR > 5
DOTS_ANY(6)
#endif
static const FN(dots_function) FN(dots_functions)[XR][5] = {
    DOTS_OF(1), DOTS_OF(2),
#if XR > 2
    DOTS_OF(3), DOTS_OF(4), DOTS_OF(5),
#endif
#if XR > 5
    DOTS_OF(6),
#endif
};

#if defined(ISA_AVX512)
/* Up to so many rows of x the weights are unpacked again for every XR of them, in registers: so long that takes less
 * than the detour through memory. */
enum { DIRECT_4 = 10, DIRECT_8 = 24 };

/* `dots` with packed weights, which are multiplied as they are unpacked. `w`: the block's first piece of the panel; k
 * is a multiple of PACKED. The same order of sums. */
SIMD void FN(packed_dots)(const int xr, const int bits, const uint8_t *w, const float *x, int64_t x_row, int64_t k,
                          const float *from, float *aside, float (*out)[4]) {
    const int64_t piece = piece_bytes(bits), row = PACKED / 8 * bits;
    vf sum[XR][4];
    UNROLL for (int c = 0; c < xr; c++)
        UNROLL for (int r = 0; r < 4; r++) sum[c][r] = from ? FN(load)(from + (4 * c + r) * VW) : (vf){0};
    for (int64_t i = 0; i < k; i += PACKED, w += piece) {
        __builtin_prefetch(w + 16 * piece);
        __builtin_prefetch(w + 16 * piece + 64);
        __builtin_prefetch(w + 16 * piece + 128);
        UNROLL for (int r = 0; r < 4; r++)
            UNROLL for (int j = 0; j < 4; j++) {
                const vf a = FN(sixteen)(bits, (const float *)w + 2 * r, w + 64 + r * row, j);
                UNROLL for (int c = 0; c < xr; c++) sum[c][r] += a * FN(load)(x + c * x_row + i + 16 * j);
            }
    }
    UNROLL for (int c = 0; c < xr; c++) {
        if (aside)
            UNROLL for (int r = 0; r < 4; r++) FN(store)(aside + (4 * c + r) * VW, sum[c][r]);
        else
            FN(join_lanes)(sum[c], out[c]);
    }
}

#define PACKED_DOTS(xr, bits)                                                                                      \
    static __attribute__((noinline)) TARGET void FN(packed_dots_##xr##_##bits)(                                    \
        const uint8_t *w, const float *x, int64_t x_row, int64_t k, const float *from, float *aside, float (*out)[4]) { \
        FN(packed_dots)(xr, bits, w, x, x_row, k, from, aside, out);                                               \
    }
#define PACKED_DOTS_ANY(bits)                                                                                      \
    PACKED_DOTS(1, bits) PACKED_DOTS(2, bits) PACKED_DOTS(3, bits) PACKED_DOTS(4, bits) PACKED_DOTS(5, bits) PACKED_DOTS(6, bits)
#define PACKED_DOTS_OF(bits)                                                                                       \
    {FN(packed_dots_1_##bits), FN(packed_dots_2_##bits), FN(packed_dots_3_##bits),                                 \
     FN(packed_dots_4_##bits), FN(packed_dots_5_##bits), FN(packed_dots_6_##bits)}
PACKED_DOTS_ANY(4) PACKED_DOTS_ANY(8)
static void (*const FN(packed_dots_functions)[2][XR])(const uint8_t *, const float *, int64_t, int64_t, const float *, float *,
                                                      float (*)[4]) = {PACKED_DOTS_OF(4), PACKED_DOTS_OF(8)};
#undef PACKED_DOTS
#undef PACKED_DOTS_ANY
#undef PACKED_DOTS_OF
#endif

/* Weight rows [from, to) of one layer, all m rows of x: y[m][to - from], rows `y_row` apart. `sums`: room for
 * 16 floats for each of these results, and for four panels of weights.
 *
 * All of x that a run over the weight rows touches should stay in the first-level cache, so long rows are
 * taken in panels. Each block of four weight rows fetches the one that follows it. */
static TARGET void FN(linear)(const struct linear *l, const struct input *x, int64_t from, int64_t to, float *y,
                              int64_t y_row, float *sums) {
    const int64_t k = x->k, m = x->m, passes = over(m, XR);
    const int64_t panel = most(MIN_PANEL, over(over(k, over(m * k * 4, PANEL_BYTES)), PACKED) * PACKED);
    float *unpacked = sums + over(to - from, 4) * 4 * m * VW;
#if defined(ISA_AVX512)
    const int direct = l->bits && m <= (l->bits == 8 ? DIRECT_8 : DIRECT_4);
#else
    const int direct = 0;
#endif
    for (int64_t at = 0; at < k; at += panel) {
        const int64_t width = least(panel, k - at), last = at + width == k;
        for (int64_t n = from; n < to; n += 4) {
            const float *w[4], *next[4];
            const int64_t have = least(4, to - n), ends = n + 4 >= to;
            const int64_t then = !ends ? n + 4 : last ? to : from, then_at = !ends ? at : last ? 0 : at + width;
            if (l->bits && !direct) FN(unpack)(l, k, n / 4, at, width, unpacked);
            for (int r = 0; r < 4; r++) {
                w[r] = l->bits ? unpacked + r * width : (const float *)l->w + (n + least(r, have - 1)) * k + at;
                /* what is packed comes in one stream, which the processor fetches ahead by itself */
                next[r] = l->bits ? w[r] : (const float *)l->w + least(then + r, l->n - 1) * k + then_at;
            }
            for (int64_t pass = 0, row = 0; pass < passes; pass++) {
                float out[XR][4], *aside = sums + ((n - from) * m + 4 * row) * VW;
                const int64_t rows = over(m - row, passes - pass), fetch = pass * 4 / passes;
#if defined(ISA_AVX512)
                if (direct)
                    FN(packed_dots_functions)[l->bits == 8][rows - 1](
                        (const uint8_t *)l->w + (n / 4 * (k / PACKED) + at / PACKED) * piece_bytes(l->bits),
                        x->data + row * x->row + at, x->row, width, at ? aside : NULL, last ? NULL : aside, out);
                else
#endif
                FN(dots_functions)[rows - 1][l->bits ? 0 : (pass + 1) * 4 / passes - fetch](
                    w, x->data + row * x->row + at, x->row, width, next + fetch, at ? aside : NULL, last ? NULL : aside, out);
                for (int64_t c = 0; c < rows && last; c++)
                    for (int64_t r = 0; r < have; r++)
                        y[(row + c) * y_row + n - from + r] = l->bias ? out[c][r] + l->bias[n + r] : out[c][r];
                row += rows;
            }
        }
    }
}

/* out = activation(gate) * up, for `n` elements. Both activations are x times a logistic function. */
static TARGET void FN(gate)(int kind, int64_t n, const float *gate, const float *up, float *out) {
    for (int64_t i = 0; i < n; i += VW) {
        const size_t bytes = (size_t)least(VW, n - i) * 4;
        vf g = {0}, u = {0};
        memcpy(&g, gate + i, bytes);
        memcpy(&u, up + i, bytes);
        vf z = kind == SILU ? g : (g + g * g * g * 0.044715f) * 1.5957691216057308f; /* 2 sqrt(2 / pi) */
        vf y = g / (FN(exp2)(-FN(max)(z * LOG2E, FN(splat)(-126.0f))) + 1.0f) * u;
        memcpy(out + i, &y, bytes);
    }
}

#undef XR
#undef DOTS
#undef DOTS_ANY
#undef DOTS_OF
