/* Vectors and the one matrix product everything is made of, for one instruction set.
 *
 * Included by native.c once per instruction set with VW (floats per vector), NV (vectors per column tile),
 * FN(name) (adds the set's suffix) and TARGET (function attribute) defined. Written in GNU vector extensions,
 * at the set's own vector width, because compilers keep wider ones in memory; intrinsics only where those say
 * less than the instruction does (4-bit unpacking with AVX-512, max).
 */
#define vf FN(vf_)
#define vi FN(vi_)
typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t FN(vu_) __attribute__((vector_size(VW * 4)));

#define SIMD static inline __attribute__((always_inline)) TARGET

#if defined(ISA_AVX512)
static const vf FN(digits) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#endif

SIMD vf FN(load)(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

SIMD void FN(store)(float *p, vf x) { memcpy(p, &x, sizeof x); }

SIMD vf FN(splat)(float x) { return x - (vf){0}; }

SIMD vf FN(max)(vf x, vf y) {
#if defined(ISA_AVX512)
    return _mm512_max_ps(x, y);
#elif defined(ISA_AVX2)
    return _mm256_max_ps(x, y);
#elif defined(__aarch64__)
    return (vf)vmaxq_f32((float32x4_t)x, (float32x4_t)y);
#else
    vi m = (vi)(x > y);
    return (vf)(((vi)x & m) | ((vi)y & ~m));
#endif
}

/* Halves are combined until one element is left: a chain of single elements takes as long as the products of a
 * row with a block's channels. */
#if defined(ISA_AVX512)
SIMD float FN(sum)(vf x) { return _mm512_reduce_add_ps((__m512)x); }
SIMD float FN(top)(vf x) { return _mm512_reduce_max_ps((__m512)x); }
#else
#if defined(ISA_AVX2)
#define HALVES(op)                                                                                          \
    __m128 h = op(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));                  \
    h = op(h, _mm_movehl_ps(h, h));                                                                         \
    return _mm_cvtss_f32(op(h, _mm_movehdup_ps(h)));
SIMD float FN(sum)(vf x) { HALVES(_mm_add_ps) }
SIMD float FN(top)(vf x) { HALVES(_mm_max_ps) }
#undef HALVES
#elif defined(__aarch64__)
SIMD float FN(sum)(vf x) { return vaddvq_f32((float32x4_t)x); }
SIMD float FN(top)(vf x) { return vmaxvq_f32((float32x4_t)x); }
#else
SIMD float FN(sum)(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
SIMD float FN(top)(vf x) {
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}
#endif
#endif

/* 2^x within 2e-7, 0 below 2^-126. Coefficients of Cephes' exp2f, for |fraction| <= 1/2. */
SIMD vf FN(exp2)(vf x) {
    vi alive = (vi)(x >= FN(splat)(-126.0f));
    vf t = x + 12582912.0f, f = x - (t - 12582912.0f); /* 1.5 * 2^23: rounds to the nearest integer */
    vf y = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    y = y * f + 9.618437357674640e-3f;
    y = y * f + 5.550332471162809e-2f;
    y = y * f + 2.402264791363012e-1f;
    y = y * f + 6.931472028550421e-1f;
    y = y * f + 1.0f;
    return (vf)((vi)((FN(vu_))y + ((FN(vu_))t << 23)) & alive);
}

SIMD float FN(exp2_scalar)(float x) { return FN(exp2)(FN(splat)(x))[0]; }

SIMD vf FN(widen)(const uint16_t *p) { /* bfloat16 */
#if defined(ISA_AVX512)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(ISA_AVX2)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    uint16_t h __attribute__((vector_size(8)));
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, FN(vu_)) << 16);
#endif
}

/* VW elements of a row of the given kind, from element `column` (a multiple of VW) on. */
SIMD vf FN(element)(const int kind, const uint8_t *row, int64_t column) {
    if (kind == F32) return FN(load)((const float *)row + column);
    if (kind == BF16) return FN(widen)((const uint16_t *)row + column);
    if (kind == U8) {
#if defined(ISA_AVX512)
        return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + column))));
#elif defined(ISA_AVX2)
        return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(row + column))));
#else
        int32_t word;
        const FN(vu_) shift = {0, 8, 16, 24};
        memcpy(&word, row + column, 4);
        return __builtin_convertvector((vi)((((FN(vu_)){0} + (uint32_t)word) >> shift) & 255), vf);
#endif
    }
#if VW == 4
    uint16_t word;
    const vi shift = {0, 4, 8, 12};
    memcpy(&word, row + column / 2, 2);
    return __builtin_convertvector((((vi){0} + (int32_t)word) >> shift) & 15, vf);
#elif VW == 8
    int32_t word;
    const FN(vu_) shift = {0, 4, 8, 12, 16, 20, 24, 28};
    memcpy(&word, row + column / 2, 4);
    return __builtin_convertvector((vi)(((FN(vu_)){0} + (uint32_t)word) >> shift) & 15, vf);
#else
    uint64_t words;
    const vi shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const vi pick = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    memcpy(&words, row + column / 2, 8);
    __m512i w = _mm512_permutexvar_epi32((__m512i)pick, _mm512_set1_epi64((long long)words));
    w = _mm512_srlv_epi32(w, (__m512i)shift);
    return (vf)_mm512_permutexvar_ps(w, (__m512)FN(digits)); /* the low 4 bits pick the float */
#endif
}

/* `nv` vectors of a row. With 4-bit codes and AVX-512 they come in the order of `settle`, which saves a
 * permutation each: lane a*W+i of vector j is nibble j*16/W+a of word i, W = 2 nv words in all. */
SIMD void FN(elements)(const int kind, const int nv, const uint8_t *row, int64_t column, vf *x) {
#if defined(ISA_AVX512)
    if (kind == U4) {
        __m512i w;
        if (nv == 4) {
            const vi step = {0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4};
            w = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(row + column / 2)));
            UNROLL for (int j = 0; j < 4; j++)
                x[j] = (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(w, (__m512i)(step + 8 * j)), (__m512)FN(digits));
            return;
        }
        if (nv == 2) {
            const vi step = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
            w = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(row + column / 2)));
            UNROLL for (int j = 0; j < 2; j++)
                x[j] = (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(w, (__m512i)(step + 16 * j)), (__m512)FN(digits));
            return;
        }
    }
#endif
    UNROLL for (int j = 0; j < nv; j++) x[j] = FN(element)(kind, row, column + j * VW);
}

/* Natural order for what `elements` left out of it. */
SIMD void FN(settle)(const int kind, const int nv, vf *x) {
#if defined(ISA_AVX512)
    if (kind == U4 && nv == 4) {
        const vi nibble = {0, 8, 16, 24, 0, 0, 0, 0, 1, 9, 17, 25, 0, 0, 0, 0};
        const vi join = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
        vf y[4];
        UNROLL for (int o = 0; o < 4; o++) {
            __m512 low = _mm512_permutex2var_ps((__m512)x[0], (__m512i)(nibble + 2 * o), (__m512)x[1]);
            __m512 high = _mm512_permutex2var_ps((__m512)x[2], (__m512i)(nibble + 2 * o), (__m512)x[3]);
            y[o] = (vf)_mm512_permutex2var_ps(low, (__m512i)join, high);
        }
        UNROLL for (int o = 0; o < 4; o++) x[o] = y[o];
    } else if (kind == U4 && nv == 2) {
        const vi nibble = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
        __m512 a = (__m512)x[0], b = (__m512)x[1];
        x[0] = (vf)_mm512_permutex2var_ps(a, (__m512i)nibble, b);
        x[1] = (vf)_mm512_permutex2var_ps(a, (__m512i)(nibble + 2), b);
    }
#else
    (void)kind, (void)nv, (void)x;
#endif
}

/* c[0..mr) of one column tile: the sum over k of a[r][k] * b[k], added to c times alpha where asked. Each
 * element's sum has one order, whatever mr and nv are. */
SIMD void FN(tile)(const int kind, const int mr, const int nv, const struct product *p, int64_t column) {
    vf sum[ROWS][4], x[4];
    const uint8_t *b = p->b;
    const float *a = p->a;
    const int64_t a_row = p->a_row, a_column = p->a_column, b_row = p->b_row;
    const int64_t ahead = p->ahead + (kind == U4 ? column / 2 : kind == U8 ? column : kind == BF16 ? 2 * column : 4 * column);
    UNROLL for (int r = 0; r < mr; r++)
        UNROLL for (int j = 0; j < nv; j++) sum[r][j] = (vf){0};
    for (int64_t k = p->depth; k > 0; k--, b += b_row, a += a_column) {
        FN(elements)(kind, nv, b, column, x);
        __builtin_prefetch(b + ahead);
        UNROLL for (int r = 0; r < mr; r++) {
            vf w = FN(splat)(a[r * a_row]);
            UNROLL for (int j = 0; j < nv; j++) sum[r][j] += w * x[j];
        }
    }
    UNROLL for (int r = 0; r < mr; r++) {
        float *c = p->c + r * p->c_row + column;
        FN(settle)(kind, nv, sum[r]);
        UNROLL for (int j = 0; j < nv; j++) {
            vf y = sum[r][j];
            if (p->alpha) y += FN(load)(c + j * VW) * p->alpha[r];
            FN(store)(c + j * VW, y);
        }
    }
}

#define PRODUCT(kind, mr)                                                                                   \
    static __attribute__((noinline)) TARGET void FN(product_##kind##_##mr)(const struct product *p) {        \
        int64_t column = 0;                                                                                    \
        for (; column + NV * VW <= p->columns; column += NV * VW) FN(tile)(kind, mr, NV, p, column);        \
        if (NV > 2)                                                                                         \
            for (; column + 2 * VW <= p->columns; column += 2 * VW) FN(tile)(kind, mr, 2, p, column);       \
        if (NV > 1)                                                                                         \
            for (; column < p->columns; column += VW) FN(tile)(kind, mr, 1, p, column);                     \
    }
#define PRODUCTS(kind) PRODUCT(kind, 1) PRODUCT(kind, 2) PRODUCT(kind, 3) PRODUCT(kind, 4) PRODUCT(kind, 5) PRODUCT(kind, 6)
PRODUCTS(F32) PRODUCTS(BF16) PRODUCTS(U4) PRODUCTS(U8)

#define ENTRIES(kind)                                                                                       \
    [kind] = {FN(product_##kind##_1), FN(product_##kind##_2), FN(product_##kind##_3),                       \
              FN(product_##kind##_4), FN(product_##kind##_5), FN(product_##kind##_6)}
static void (*const FN(products)[4][ROWS])(const struct product *) = {ENTRIES(F32), ENTRIES(BF16), ENTRIES(U4),
                                                                      ENTRIES(U8)};

/* c[m][columns] = a[m][depth] b[depth][columns] (+ alpha[m] c), b's rows of the given kind; columns padded
 * to 16. */
static TARGET void FN(multiply)(int kind, int64_t m, struct product p) {
    if (p.depth <= 0 && !p.alpha) return;
    int64_t calls = (m + ROWS - 1) / ROWS;
    for (int64_t i = 0, r = 0; i < calls; i++) {
        int64_t rows = (m - r + (calls - i) - 1) / (calls - i);
        FN(products)[kind][rows - 1](&p);
        r += rows;
        p.a += rows * p.a_row;
        p.c += rows * p.c_row;
        if (p.alpha) p.alpha += rows;
        p.ahead = 0; /* the first fetched it */
    }
}

/* Transpose VW x VW elements: rounds of interleaving rows i and i + VW/2. */
SIMD void FN(transpose)(vf *x) {
#if defined(ISA_AVX512)
    const vi low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
#endif
    vf y[VW];
    UNROLL for (int round = 1; round < VW; round *= 2) {
        UNROLL for (int i = 0; i < VW / 2; i++) {
            vf a = x[i], b = x[i + VW / 2];
#if defined(ISA_AVX512)
            y[2 * i] = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)low, (__m512)b);
            y[2 * i + 1] = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)(low + 8), (__m512)b);
#elif VW == 8
            __m256 l = _mm256_unpacklo_ps((__m256)a, (__m256)b), h = _mm256_unpackhi_ps((__m256)a, (__m256)b);
            y[2 * i] = (vf)_mm256_permute2f128_ps(l, h, 0x20);
            y[2 * i + 1] = (vf)_mm256_permute2f128_ps(l, h, 0x31);
#else
            y[2 * i] = (vf){a[0], b[0], a[1], b[1]};
            y[2 * i + 1] = (vf){a[2], b[2], a[3], b[3]};
#endif
        }
        UNROLL for (int i = 0; i < VW; i++) x[i] = y[i];
    }
}
