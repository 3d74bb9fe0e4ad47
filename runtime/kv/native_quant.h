/* Sealing a page into a group of a block, and giving chunks back as float32, for one instruction set.
 * The quantisation is mx.quantize's affine rule, to the bit. */

/* Quantise n floats (a multiple of VW and of 32 / bits): codes into `packed`, scale and bias as bfloat16. */
static TARGET void FN(quantise)(const float *x, int64_t n, int bits, uint32_t *packed, uint16_t *scale_out, uint16_t *bias_out) {
    const float top = (float)((1 << bits) - 1);
    vf low = FN(load)(x), high = low;
    for (int64_t i = VW; i < n; i += VW) {
        low = -FN(max)(-low, -FN(load)(x + i));
        high = FN(max)(high, FN(load)(x + i));
    }
    float min = -FN(top)(-low), max = FN(top)(high);
    /* The end of the range that is larger in magnitude becomes the bias and so exact; the scale's sign says
     * which end that is, and the scale is adjusted so that 0 falls on a code. */
    int down = __builtin_fabsf(min) > __builtin_fabsf(max);
    float scale = (max - min) / top, edge = down ? min : max, bias = 0;
    if (!(scale > 1e-7f)) scale = 1e-7f;
    if (!down) scale = -scale;
    float steps = __builtin_rintf(edge / scale);
    if (steps != 0) scale = edge / steps, bias = edge;
    int32_t codes[2 * GROUP]; /* values have groups of up to 128 */
    for (int64_t i = 0; i < n; i += VW) {
        vf q = (FN(load)(x + i) - bias) / scale;
        q = FN(max)(q, (vf){0});
        q = -FN(max)(-q, FN(splat)(-top));
        vi code = (vi)(q + 12582912.0f) & 255;
        memcpy(codes + i, &code, sizeof code);
    }
    const int per = 32 / bits;
    for (int64_t word = 0; word < n / per; word++) {
        uint32_t bits_of = 0;
        for (int i = 0; i < per; i++) bits_of |= (uint32_t)codes[word * per + i] << (i * bits);
        packed[word] = bits_of;
    }
    *scale_out = to_bf16(scale);
    *bias_out = to_bf16(bias);
}

/* One head of a 64-token page into group `group` of a block. */
static TARGET void FN(seal)(const struct layer *l, int64_t head, int32_t page, int32_t slot, int group, float *tile) {
    struct chunk from, to;
    page_chunk(l, head, &page, GROUP, 0, &from);
    block_chunk(l, head, slot, BLOCK, 0, &to);
    if (l->key_bits == 16) {
        memcpy((uint8_t *)to.k[group], from.k[0], (size_t)(GROUP * l->dk * 2));
    } else {
        FN(key_tile)(l, &from, 0, tile);
        for (int64_t d = 0; d < l->dk; d++)
            FN(quantise)(tile + d * GROUP, GROUP, l->key_bits, (uint32_t *)(to.k[group] + d * to.k_row),
                         (uint16_t *)to.k_scales + 4 * d + group, (uint16_t *)to.k_biases + 4 * d + group);
    }
    if (l->latent) return;
    if (l->value_bits == 16) {
        memcpy((uint8_t *)to.v[group], from.v[0], (size_t)(GROUP * l->dv * 2));
        return;
    }
    const int64_t wide = padded(l->dv), per = l->dv / l->value_group;
    FN(value_tile)(l, &from, 0, 0, GROUP, NULL, tile);
    for (int64_t t = 0; t < GROUP; t++)
        for (int64_t g = 0; g < per; g++) {
            int64_t at = (group * GROUP + t) * per + g;
            FN(quantise)(tile + t * wide + g * l->value_group, l->value_group, l->value_bits,
                         (uint32_t *)(to.v[group] + t * to.v_row) + g * l->value_group * l->value_bits / 32,
                         (uint16_t *)to.v_scales + at, (uint16_t *)to.v_biases + at);
        }
}

/* Tokens [from, to) of a chunk as float32: keys [.., dk] and, unless latent, values [.., dv]. `keys` and
 * `values` point at the row of token `from`. */
static TARGET void FN(dequantise)(const struct layer *l, const struct chunk *c, int64_t from, int64_t to, float *keys,
                                  float *values, float *tile) {
    for (int64_t g = from / GROUP; g * GROUP < to; g++) {
        int64_t first = from > g * GROUP ? from - g * GROUP : 0, last = to - g * GROUP < GROUP ? to - g * GROUP : GROUP;
        float *k = keys + (g * GROUP + first - from) * l->dk;
        if (c->key_kind == BF16) {
            const uint16_t *row = (const uint16_t *)(c->k[g] + first * c->k_row);
            for (int64_t i = 0; i < (last - first) * l->dk; i++) k[i] = bf16(row[i]);
        } else {
            FN(key_tile)(l, c, (int)g, tile);
            int64_t t = first;
            for (; t + VW <= last; t += VW) {
                int64_t d = 0;
                for (; d + VW <= l->dk; d += VW) {
                    vf x[VW];
                    UNROLL for (int i = 0; i < VW; i++) x[i] = FN(load)(tile + (d + i) * GROUP + t);
                    FN(transpose)(x);
                    UNROLL for (int i = 0; i < VW; i++) FN(store)(k + (t - first + i) * l->dk + d, x[i]);
                }
                for (; d < l->dk; d++)
                    for (int i = 0; i < VW; i++) k[(t - first + i) * l->dk + d] = tile[d * GROUP + t + i];
            }
            for (; t < last; t++)
                for (int64_t d = 0; d < l->dk; d++) k[(t - first) * l->dk + d] = tile[d * GROUP + t];
        }
        if (l->latent) continue;
        const int64_t wide = padded(l->dv);
        float *v = values + (g * GROUP + first - from) * l->dv;
        FN(value_tile)(l, c, (int)g, first, last, NULL, tile);
        if (wide == l->dv)
            memcpy(v, tile + first * wide, (size_t)((last - first) * wide) * sizeof *v);
        else
            for (int64_t t = first; t < last; t++)
                memcpy(v + (t - first) * l->dv, tile + t * wide, (size_t)l->dv * sizeof *v);
    }
}
