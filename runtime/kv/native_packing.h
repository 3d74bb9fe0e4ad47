/* Packing weights without loss: finding the scale and the bias of every group of 32 inputs whose codes give back
 * the floats, bit for bit. Weights that were quantised once (GGUF's Q4_0, Q4_1, Q8_0) are of this kind.
 * Included by native.c. */

enum { PACK_GROUP = 32 };

struct packing {
    const float *w;
    int64_t n, k, bits;
    uint8_t *out;
    _Atomic int failed;
};

/* Codes from the least value, 0, up: the largest value may have any code to `most`. */
static int find_affine(const float *w, int most, float *scale, float *bias, uint8_t *codes) {
    float low = w[0], high = w[0];
    for (int i = 1; i < PACK_GROUP; i++) low = w[i] < low ? w[i] : low, high = w[i] > high ? w[i] : high;
    *bias = low;
    for (int top = most; top > 0; top--) {
        float step = (high - low) / (float)top;
        int i = 0;
        if (step == 0) memset(codes, 0, PACK_GROUP), *scale = 0, i = PACK_GROUP;
        for (; i < PACK_GROUP; i++) {
            float code = rintf((w[i] - low) / step);
            if (!(code >= 0 && code <= most) || (double)code * step != (float)(code * step) || code * step + low != w[i]) break;
            codes[i] = (uint8_t)code;
        }
        if (i == PACK_GROUP) return *scale = step, 1;
    }
    return 0;
}

static int find_4(const float *w, float *scale, float *bias, uint8_t *codes) { return find_affine(w, 15, scale, bias, codes); }

/* Multiples of a step from -128 to 127, the largest of them having any code from 127 down; else codes from the
 * least value up, which take more trying. */
static int find_8(const float *w, float *scale, float *bias, uint8_t *codes) {
    float top = 0;
    for (int i = 0; i < PACK_GROUP; i++) top = fabsf(w[i]) > top ? fabsf(w[i]) : top;
    for (int tried = 0; tried < 128; tried++) {
        const int largest = tried == 0 ? 127 : tried == 1 ? 128 : 128 - tried; /* mostly 127 */
        float step = top / (float)largest;
        int i = 0;
        if (step == 0) memset(codes, 128, PACK_GROUP), i = PACK_GROUP;
        for (; i < PACK_GROUP; i++) {
            float code = rintf(w[i] / step) + 128;
            if (!(code >= 0 && code <= 255) || (double)code * step != (float)(code * step) || code * step - 128 * step != w[i]) break;
            codes[i] = (uint8_t)code;
        }
        if (i == PACK_GROUP) return *scale = step, *bias = -128 * step, 1;
    }
    return find_affine(w, 255, scale, bias, codes);
}

static void packing_task(void *job, int64_t block, int worker) {
    struct packing *d = job;
    const int64_t pieces = d->k / PACKED, piece = piece_bytes(d->bits);
    float *check = (float *)private[worker].data;
    for (int64_t p = 0; p < pieces && !atomic_load(&d->failed); p++) {
        uint8_t *to = d->out + (block * pieces + p) * piece;
        float *factors = (float *)to;
        to += 64;
        for (int r = 0; r < 4; r++, to += PACKED / 8 * d->bits) {
            const float *w = d->w + least(block * 4 + r, d->n - 1) * d->k + p * PACKED;
            uint8_t codes[PACKED];
            for (int g = 0; g < PACKED / PACK_GROUP; g++) {
                float *factor = factors + 8 * g + 2 * r;
                if (!(d->bits == 4 ? find_4 : find_8)(w + g * PACK_GROUP, factor, factor + 1, codes + g * PACK_GROUP)) {
                    atomic_store(&d->failed, 1);
                    return;
                }
            }
            if (d->bits == 8) {
                memcpy(to, codes, PACKED);
                continue;
            }
            for (int i = 0; i < 16; i++) {
                int word = codes[i] | codes[16 + i] << 4 | codes[32 + i] << 8 | codes[48 + i] << 12;
                to[2 * i] = (uint8_t)word, to[2 * i + 1] = (uint8_t)(word >> 8);
            }
        }
    }
    /* What the kernel will make of it is what counts. */
    const struct linear l = {d->out, NULL, d->n, d->bits};
    isa->unpack(&l, d->k, block, 0, d->k, check);
    for (int64_t r = 0; r < 4 && block * 4 + r < d->n; r++)
        for (int64_t i = 0; i < d->k; i++)
            if (check[r * d->k + i] != d->w[(block * 4 + r) * d->k + i]) atomic_store(&d->failed, 1);
}

/* Bytes of a packed matrix. */
API int64_t offbook_packed_bytes(int64_t n, int64_t k, int64_t bits) { return over(n, 4) * (k / PACKED) * piece_bytes(bits); }

/* Pack w [n, k], k a multiple of 64, into `out`: 1, or 0 where that would change a weight (out is then spoiled). */
API int offbook_pack(const float *w, int64_t n, int64_t k, int64_t bits, uint8_t *out) {
    struct packing d = {.w = w, .n = n, .k = k, .bits = bits, .out = out};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve_private((size_t)k * 16);
    if (!failed) pool_run(packing_task, &d, (uint32_t)over(n, 4), 0);
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : !d.failed;
}

struct unpacking {
    struct linear l;
    int64_t k;
    const int64_t *rows;
    float *out;
};

static void unpacking_task(void *job, int64_t index, int worker) {
    const struct unpacking *d = job;
    const int64_t k = d->k, block = d->rows ? d->rows[index] / 4 : index;
    float *scratch = (float *)private[worker].data;
    if (d->rows) {
        isa->unpack(&d->l, k, block, 0, k, scratch);
        memcpy(d->out + index * k, scratch + d->rows[index] % 4 * k, (size_t)k * 4);
    } else if (block * 4 + 4 <= d->l.n) {
        isa->unpack(&d->l, k, block, 0, k, d->out + block * 4 * k);
    } else {
        isa->unpack(&d->l, k, block, 0, k, scratch);
        memcpy(d->out + block * 4 * k, scratch, (size_t)((d->l.n - block * 4) * k) * 4);
    }
}

/* Unpack a matrix [n, k], or `count` of its rows, into out. */
API int offbook_unpack(const struct linear *l, int64_t k, const int64_t *rows, int64_t count, float *out) {
    struct unpacking d = {*l, k, rows, out};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve_private((size_t)k * 16);
    if (!failed) pool_run(unpacking_task, &d, (uint32_t)(rows ? count : over(l->n, 4)), rows && count * k < 100000);
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
