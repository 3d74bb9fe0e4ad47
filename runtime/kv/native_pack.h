/* Packed weights as floats, for one instruction set.
 *
 * A packed matrix [n, k] has k a multiple of 64 and is one stream: blocks of four rows (the last one filled up),
 * in each a piece for every 64 inputs: first scale and bias of its two groups of 32 inputs, [2][4 rows][2] floats,
 * then the codes of the four rows. 4-bit codes: 16 little-endian 16-bit words, input 16 j + i being nibble j of
 * word i; 8-bit codes: 64 bytes in order. A weight is code * scale + bias, and packing is done only where that
 * is the float it was, bit for bit (native_packing.h), so results do not depend on it.
 */

#if defined(ISA_AVX512)
/* Inputs 16 j to 16 j + 15 of one row of a piece, the row's factors [2][4 rows][2] and its codes given. */
SIMD vf FN(sixteen)(const int bits, const float *factors, const uint8_t *codes, const int j) {
    const float scale = factors[j / 2 * 8], bias = factors[j / 2 * 8 + 1];
    if (bits == 8) return FN(element)(U8, codes, 16 * j) * scale + bias;
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)codes));
    const vf of = FN(digits) * scale + bias; /* every code's float, to be picked by the low 4 bits */
    return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * j), (__m512)of);
}
#endif

/* Inputs [at, at + width) of the four rows of a block: out[4][width]. */
static TARGET void FN(unpack)(const struct linear *l, int64_t k, int64_t block, int64_t at, int64_t width, float *out) {
    const int64_t piece = piece_bytes(l->bits), row = PACKED / 8 * l->bits;
    const uint8_t *from = (const uint8_t *)l->w + (block * (k / PACKED) + at / PACKED) * piece;
    for (int64_t i = 0; i < width; i += PACKED, from += piece) {
        const float *factors = (const float *)from;
        const uint8_t *codes = from + 64;
        __builtin_prefetch(from + 16 * piece);
        __builtin_prefetch(from + 16 * piece + 64);
        __builtin_prefetch(from + 16 * piece + 128);
        UNROLL for (int r = 0; r < 4; r++, codes += row) {
            float *to = out + r * width + i;
#if defined(ISA_AVX512)
            if (l->bits == 4)
                UNROLL for (int j = 0; j < 4; j++) FN(store)(to + 16 * j, FN(sixteen)(4, factors + 2 * r, codes, j));
            else
                UNROLL for (int j = 0; j < 4; j++) FN(store)(to + 16 * j, FN(sixteen)(8, factors + 2 * r, codes, j));
#else
            for (int j = 0; j < PACKED; j += VW) {
                const float *factor = factors + j / 32 * 8 + 2 * r;
                vf code;
                if (l->bits == 8) {
                    code = FN(element)(U8, codes, j);
                } else {
                    uint16_t words[VW];
                    FN(vu_) wide;
                    memcpy(words, codes + j % 16 * 2, sizeof words);
                    for (int t = 0; t < VW; t++) wide[t] = words[t];
                    code = __builtin_convertvector((vi)(wide >> (uint32_t)(j / 16 * 4)) & 15, vf);
                }
                FN(store)(to + j, code * factor[0] + factor[1]);
            }
#endif
        }
    }
}
