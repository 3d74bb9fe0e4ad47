/* XXH3-128 of more than 240 bytes with seed 0, for one instruction set: the checksum of the store's tensors.
 *
 * After the specification of XXH3 by Yann Collet (github.com/Cyan4973/xxHash); little-endian machines.
 */

#ifndef OFFBOOK_HASH_SECRET
#define OFFBOOK_HASH_SECRET
enum { HASH_STRIPE = 64, HASH_STRIPES = 16, HASH_LEAST = 241 };

static const uint8_t hash_secret[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t hash_start[8] = {0xc2b2ae3dull,         0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
                                       0x85ebca77c2b2ae63ull, 0x85ebca77ull,         0x27d4eb2f165667c5ull, 0x9e3779b1ull};

static uint64_t hash_word(const uint8_t *at) {
    uint64_t x;
    memcpy(&x, at, sizeof x);
    return x;
}

static uint64_t hash_end(const uint64_t *sums, const uint8_t *secret, uint64_t start) {
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 x = (unsigned __int128)(sums[i] ^ hash_word(secret + 8 * i)) * (sums[i + 1] ^ hash_word(secret + 8 * i + 8));
        start += (uint64_t)x ^ (uint64_t)(x >> 64);
    }
    start ^= start >> 37;
    start *= 0x165667919e3779f9ull;
    return start ^ start >> 32;
}

static void hash_store(uint64_t x, uint8_t *to) { /* canonical: big-endian */
    for (int i = 0; i < 8; i++) to[i] = (uint8_t)(x >> (56 - 8 * i));
}
#endif

#define HASH_LANES (VW / 2) /* 64-bit words in a vector */
typedef uint64_t FN(words) __attribute__((vector_size(VW * 4)));

SIMD void FN(stripe)(FN(words) *sums, const uint8_t *data, const uint8_t *secret) {
    UNROLL for (int v = 0; v < 8 / HASH_LANES; v++) {
        FN(words) x, key, swapped;
        memcpy(&x, data + v * VW * 4, sizeof x);
        memcpy(&key, secret + v * VW * 4, sizeof key);
        key ^= x;
#if defined(ISA_AVX512)
        swapped = (FN(words))_mm512_shuffle_epi32((__m512i)x, _MM_PERM_BADC);
        key = (FN(words))_mm512_mul_epu32((__m512i)key, (__m512i)(key >> 32));
#elif defined(ISA_AVX2)
        swapped = (FN(words))_mm256_shuffle_epi32((__m256i)x, 0x4e);
        key = (FN(words))_mm256_mul_epu32((__m256i)key, (__m256i)(key >> 32));
#else
        swapped = (FN(words)){x[1], x[0]};
        key = (key & 0xffffffffull) * (key >> 32);
#endif
        sums[v] += swapped + key;
    }
}

/* 16 bytes of checksum of `size` (at least HASH_LEAST) bytes. */
static TARGET void FN(hash)(const uint8_t *data, int64_t size, uint8_t *out) {
    const uint64_t prime = 0x9e3779b1ull;
    const int64_t whole = HASH_STRIPE * HASH_STRIPES, blocks = (size - 1) / whole;
    FN(words) sums[8 / HASH_LANES];
    memcpy(sums, hash_start, sizeof hash_start);
    for (int64_t b = 0; b < blocks; b++, data += whole) {
        for (int i = 0; i < HASH_STRIPES; i++) FN(stripe)(sums, data + i * HASH_STRIPE, hash_secret + 8 * i);
        UNROLL for (int v = 0; v < 8 / HASH_LANES; v++) {
            FN(words) key;
            memcpy(&key, hash_secret + 128 + v * VW * 4, sizeof key);
            sums[v] = (sums[v] ^ sums[v] >> 47 ^ key) * prime;
        }
    }
    const int64_t rest = size - blocks * whole;
    for (int64_t i = 0; i < (rest - 1) / HASH_STRIPE; i++) FN(stripe)(sums, data + i * HASH_STRIPE, hash_secret + 8 * i);
    FN(stripe)(sums, data + rest - HASH_STRIPE, hash_secret + 121);
    uint64_t words[8];
    memcpy(words, sums, sizeof words);
    hash_store(hash_end(words, hash_secret + 117, ~((uint64_t)size * 0xc2b2ae3d27d4eb4full)), out);
    hash_store(hash_end(words, hash_secret + 11, (uint64_t)size * 0x9e3779b185ebca87ull), out + 8);
}
#undef HASH_LANES
