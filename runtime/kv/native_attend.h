/* Attention over chunks of up to 256 tokens, for one instruction set: scores, online softmax, values.
 *
 * A work item is m query rows (query heads of one KV head, times the agents that share the block in a decode,
 * times query tokens in a prefill) against the same keys and values. Few rows multiply with the packed codes
 * directly, the scales folded into the queries and the probabilities; many rows share one dequantised tile of
 * 64 tokens. A query row's sums have one order, however many rows are beside it.
 */

/* 64 tokens' keys as floats, transposed: tile[channel][64]. Tokens from `tokens` on repeat the last one. */
static TARGET void FN(key_tile)(const struct layer *l, const struct chunk *c, int group, float *tile) {
    const uint8_t *keys = c->k[group];
    if (c->key_kind == U4 || c->key_kind == U8) {
        for (int64_t d = 0; d < l->dk; d++) {
            float scale = bf16(c->k_scales[4 * d + group]), bias = bf16(c->k_biases[4 * d + group]);
            __builtin_prefetch(keys + d * c->k_row + c->k_ahead);
            __builtin_prefetch(c->k_scales + c->k_scales_ahead + 4 * d);
            __builtin_prefetch(c->k_biases + c->k_scales_ahead + 4 * d);
            for (int t = 0; t < GROUP; t += VW) {
                vf x = c->key_kind == U4 ? FN(element)(U4, keys + d * c->k_row, t) : FN(element)(U8, keys + d * c->k_row, t);
                FN(store)(tile + d * GROUP + t, x * scale + bias);
            }
        }
        return;
    }
    int64_t last = c->tokens - group * GROUP - 1;
    for (int t = 0; t < GROUP; t += VW) {
        const uint8_t *row[VW];
        for (int i = 0; i < VW; i++) row[i] = keys + (t + i < last ? t + i : last) * c->k_row;
        int64_t d = 0;
        for (; d + VW <= l->dk; d += VW) {
            vf x[VW];
            UNROLL for (int i = 0; i < VW; i++) x[i] = FN(element)(BF16, row[i], d);
            FN(transpose)(x);
            UNROLL for (int i = 0; i < VW; i++) FN(store)(tile + (d + i) * GROUP + t, x[i]);
        }
        for (; d < l->dk; d++)
            for (int i = 0; i < VW; i++)
                tile[d * GROUP + t + i] = bf16(((const uint16_t *)row[i])[d]);
    }
}

/* Tokens [from, to) of a group's values as floats: tile[token][dv padded to 16]. */
static TARGET void FN(value_tile)(const struct layer *l, const struct chunk *c, int group, int64_t from, int64_t to,
                                  const float *key_tile, float *tile) {
    const int64_t wide = padded(l->dv);
    if (c->value_kind == LATENT) { /* the first channels of the dequantised keys */
        for (int64_t t = 0; t < GROUP; t += VW)
            for (int64_t d = 0; d < wide; d += VW) {
                vf x[VW];
                UNROLL for (int i = 0; i < VW; i++) x[i] = FN(load)(key_tile + (d + i) * GROUP + t);
                FN(transpose)(x);
                UNROLL for (int i = 0; i < VW; i++) FN(store)(tile + (t + i) * wide + d, x[i]);
            }
        return;
    }
    for (int64_t t = from; t < to; t++) {
        const uint8_t *row = c->v[group] + t * c->v_row;
        float *out = tile + t * wide;
        __builtin_prefetch(row + c->v_ahead);
        if (c->value_kind == U4 || c->value_kind == U8) {
            const int64_t per = l->dv / l->value_group, at = (group * GROUP + t) * per;
            for (int64_t g = 0; g < per; g++) {
                float scale = bf16(c->v_scales[at + g]), bias = bf16(c->v_biases[at + g]);
                for (int64_t d = g * l->value_group; d < (g + 1) * l->value_group; d += VW) {
                    vf x = c->value_kind == U4 ? FN(element)(U4, row, d) : FN(element)(U8, row, d);
                    FN(store)(out + d, x * scale + bias);
                }
            }
        } else {
            for (int64_t d = 0; d < l->dv; d++)
                out[d] = bf16(((const uint16_t *)row)[d]);
            for (int64_t d = l->dv; d < wide; d++) out[d] = 0;
        }
    }
}

/* Packed codes as floats, `rows` of `columns`: what `multiply` makes of them on its way, so that a product with
 * these has the same bits. Worth it for query rows that would unpack them several times, where vectors are
 * short; with AVX the unpacking costs less than the detour through memory (measured: +5 %). */
static TARGET void FN(codes)(int kind, const uint8_t *b, int64_t b_row, int64_t ahead, int64_t rows, int64_t columns, float *tile) {
    for (int64_t k = 0; k < rows; k++, b += b_row) {
        __builtin_prefetch(b + ahead);
        if (kind == U4)
            for (int64_t i = 0; i < columns; i += VW) FN(store)(tile + k * columns + i, FN(element)(U4, b, i));
        else
            for (int64_t i = 0; i < columns; i += VW) FN(store)(tile + k * columns + i, FN(element)(U8, b, i));
    }
}

/* Queries times the scales of every channel and group, and their products with the biases: with the codes q,
 * a score is folded[r][d][group] * q[d][token] summed over d, plus constant[r][group]. */
static TARGET void FN(fold_queries)(const struct layer *l, const struct chunk *c, const struct work *w) {
    const int64_t n = 4 * l->dk;
    for (int64_t i = 0; i < n; i += 32) {
        __builtin_prefetch(c->k_scales + c->k_scales_ahead + i);
        __builtin_prefetch(c->k_biases + c->k_scales_ahead + i);
    }
    for (int64_t r = 0; r < w->m; r++) {
        vf constant = {0};
        for (int64_t i = 0; i < n; i += VW) {
            vf q = FN(load)(w->spread + r * n + i);
            FN(store)(w->folded + r * n + i, q * FN(widen)(c->k_scales + i));
            constant += q * FN(widen)(c->k_biases + i);
        }
        for (int g = 0; g < 4; g++) {
            float sum = 0;
            for (int i = g; i < VW; i += 4) sum += constant[i];
            w->constant[4 * r + g] = sum;
        }
    }
}

static TARGET void FN(scores)(const struct layer *l, const struct chunk *c, const struct work *w, int64_t from, int64_t to) {
    const int fold = w->few && (c->key_kind == U4 || c->key_kind == U8) && c->value_kind != LATENT;
    if (fold) FN(fold_queries)(l, c, w);
    for (int64_t g = from / GROUP; g * GROUP < to; g++) {
        struct product p = {.depth = l->dk, .columns = GROUP, .c = w->scores + g * GROUP, .c_row = BLOCK};
        if (fold) {
            int kind = c->key_kind;
            p.a = w->folded + g, p.a_row = 4 * l->dk, p.a_column = 4, p.b = c->k[g], p.b_row = c->k_row, p.ahead = c->k_ahead;
            if (VW == 4 && w->m > ROWS) {
                FN(codes)(kind, p.b, p.b_row, p.ahead, p.depth, GROUP, w->key_tile);
                p.b = (const uint8_t *)w->key_tile, p.b_row = GROUP * 4, p.ahead = 0, kind = F32;
            }
            FN(multiply)(kind, w->m, p);
        } else {
            FN(key_tile)(l, c, (int)g, w->key_tile);
            p.a = w->queries, p.a_row = l->dk, p.a_column = 1, p.b = (const uint8_t *)w->key_tile, p.b_row = GROUP * 4;
            FN(multiply)(F32, w->m, p);
        }
    }
    if (fold)
        for (int64_t r = 0; r < w->m; r++)
            for (int64_t t = from / GROUP * GROUP; t < to; t += VW) {
                float *s = w->scores + r * BLOCK + t;
                FN(store)(s, FN(load)(s) + w->constant[4 * r + t / GROUP]);
            }
}

/* Scores to probabilities relative to the running maximum; alpha = what the sums so far shrink by. */
static TARGET void FN(softmax)(const struct layer *l, const struct chunk *c, const struct work *w, int64_t from, int64_t to) {
    const int64_t begin = from / VW * VW, end = (to + VW - 1) / VW * VW;
    for (int64_t r = 0; r < w->m; r++) {
        float *s = w->scores + r * BLOCK;
        int64_t low = w->low[r] - c->first, high = w->high[r] - c->first;
        low = low < from ? from : low;
        high = high > to ? to : high;
        if (l->softcap > 0)
            for (int64_t t = begin; t < end; t += VW) {
                /* cap * tanh(s / cap) in units of log 2; s = 2^-x form keeps it finite for any s */
                vf x = FN(load)(s + t) * (2 * LOG2E / l->softcap), sign = (vf)((vi)x & (vi)FN(splat)(-0.0f));
                vf e = FN(exp2)(-(vf)((vi)x & 0x7fffffff));
                FN(store)(s + t, (vf)((vi)((1.0f - e) / (1.0f + e) * (l->softcap * LOG2E)) ^ (vi)sign));
            }
        if (low >= high) {
            memset(s + begin, 0, (size_t)(end - begin) * sizeof *s);
            w->alpha[r] = 1;
            continue;
        }
        for (int64_t t = begin; t < low; t++) s[t] = -INFINITY;
        for (int64_t t = high; t < end; t++) s[t] = -INFINITY;
        vf top = FN(load)(s + begin);
        for (int64_t t = begin + VW; t < end; t += VW) top = FN(max)(top, FN(load)(s + t));
        float max = FN(top)(top);
        if (max < w->max[r]) max = w->max[r];
        vf sum = {0};
        for (int64_t t = begin; t < end; t += VW) {
            vf p = FN(exp2)(FN(load)(s + t) - max);
            FN(store)(s + t, p);
            sum += p;
        }
        w->alpha[r] = FN(exp2_scalar)(w->max[r] - max);
        w->sum[r] = w->sum[r] * w->alpha[r] + FN(sum)(sum);
        w->max[r] = max;
    }
}

/* Packed values of few rows: scales and biases of a token folded into its probabilities. */
static TARGET void FN(values_folded)(const struct layer *l, const struct chunk *c, const struct work *w, int64_t from, int64_t to) {
    const int64_t per = l->dv / l->value_group, wide = padded(l->dv), begin = from / VW * VW, end = (to + VW - 1) / VW * VW;
    for (int64_t g = 0; g < per; g++) {
        float *scales = w->token, *biases = w->token + BLOCK;
        if (per == 1)
            for (int64_t t = begin; t < end; t += VW) {
                __builtin_prefetch(c->v_scales + c->v_scales_ahead + t);
                __builtin_prefetch(c->v_biases + c->v_scales_ahead + t);
                FN(store)(scales + t, FN(widen)(c->v_scales + t));
                FN(store)(biases + t, FN(widen)(c->v_biases + t));
            }
        else
            for (int64_t t = begin; t < end; t++) {
                __builtin_prefetch(c->v_scales + c->v_scales_ahead + t * per);
                __builtin_prefetch(c->v_biases + c->v_scales_ahead + t * per);
                scales[t] = bf16(c->v_scales[t * per + g]);
                biases[t] = bf16(c->v_biases[t * per + g]);
            }
        for (int64_t r = 0; r < w->m; r++) {
            vf constant = {0};
            for (int64_t t = begin; t < end; t += VW) {
                vf p = FN(load)(w->scores + r * BLOCK + t);
                FN(store)(w->weighted + r * BLOCK + t, p * FN(load)(scales + t));
                constant += p * FN(load)(biases + t);
            }
            w->constant[r] = FN(sum)(constant);
        }
        struct product p = {.a = w->weighted + from, .a_row = BLOCK, .a_column = 1, .b_row = c->v_row,
                            .b = c->v[0] + from * c->v_row + (c->value_kind == U4 ? g * l->value_group / 2 : g * l->value_group),
                            .depth = to - from, .columns = l->value_group, .c = w->out + g * l->value_group, .c_row = wide,
                            .alpha = w->alpha, .ahead = c->v_ahead};
        int kind = c->value_kind;
        if (VW == 4 && w->m > ROWS) {
            FN(codes)(kind, p.b, p.b_row, p.ahead, p.depth, p.columns, w->value_tile);
            p.b = (const uint8_t *)w->value_tile, p.b_row = p.columns * 4, p.ahead = 0, kind = F32;
        }
        FN(multiply)(kind, w->m, p);
        for (int64_t r = 0; r < w->m; r++)
            for (int64_t d = g * l->value_group; d < (g + 1) * l->value_group; d += VW) {
                float *o = w->out + r * wide + d;
                FN(store)(o, FN(load)(o) + w->constant[r]);
            }
    }
}

static TARGET void FN(values)(const struct layer *l, const struct chunk *c, const struct work *w, int64_t from, int64_t to) {
    const int64_t wide = padded(l->dv);
    if (w->few && (c->value_kind == U4 || c->value_kind == U8)) {
        FN(values_folded)(l, c, w, from, to);
        return;
    }
    for (int64_t g = from / GROUP; g * GROUP < to; g++) {
        int64_t first = from > g * GROUP ? from - g * GROUP : 0, last = to - g * GROUP < GROUP ? to - g * GROUP : GROUP;
        struct product p = {.a = w->scores + g * GROUP + first, .a_row = BLOCK, .a_column = 1, .depth = last - first,
                            .columns = wide, .c = w->out, .c_row = wide, .alpha = w->alpha};
        if (c->value_kind == BF16 && wide == l->dv) {
            p.b = c->v[g] + first * c->v_row, p.b_row = c->v_row, p.ahead = c->v_ahead;
            FN(multiply)(BF16, w->m, p);
        } else {
            FN(value_tile)(l, c, (int)g, first, last, w->key_tile, w->value_tile);
            p.b = (const uint8_t *)(w->value_tile + first * wide), p.b_row = wide * 4;
            FN(multiply)(F32, w->m, p);
        }
        for (int64_t r = 0; r < w->m; r++) w->alpha[r] = 1; /* later groups add up */
    }
}

/* Take the visible part of a chunk into the running state of a work item. */
static TARGET void FN(attend)(const struct layer *l, const struct chunk *c, const struct work *w) {
    int64_t from = w->lowest - c->first, to = w->highest - c->first;
    if (from < 0) from = 0;
    if (to > c->tokens) to = c->tokens;
    while (from < to) {
        /* Packed latents: values come from the tile of the keys, one group at a time. */
        int64_t stop = c->value_kind == LATENT && (from / GROUP + 1) * GROUP < to ? (from / GROUP + 1) * GROUP : to;
        FN(scores)(l, c, w, from, stop);
        FN(softmax)(l, c, w, from, stop);
        FN(values)(l, c, w, from, stop);
        from = stop;
    }
}

/* Add a part of m rows to those before it: both are out[dv padded] of each row, then max and sum of each. */
static TARGET void FN(merge)(const struct layer *l, int64_t m, const float *part, float *to) {
    const int64_t wide = padded(l->dv);
    const float *max = part + m * wide, *sum = max + m;
    float *to_max = to + m * wide, *to_sum = to_max + m;
    for (int64_t r = 0; r < m; r++) {
        const float top = max[r] > to_max[r] ? max[r] : to_max[r];
        if (top == -INFINITY) continue; /* nothing seen yet */
        const float keep = FN(exp2_scalar)(to_max[r] - top), add = FN(exp2_scalar)(max[r] - top);
        to_max[r] = top;
        to_sum[r] = to_sum[r] * keep + sum[r] * add;
        for (int64_t d = r * wide; d < (r + 1) * wide; d += VW)
            FN(store)(to + d, FN(load)(to + d) * keep + FN(load)(part + d) * add);
    }
}

/* Join the parts of m rows, in order: part p of row r is out[dv padded], max, sum. */
static TARGET void FN(join)(const struct layer *l, const float *parts, int64_t count, int64_t m, const float *sinks, int64_t heads,
                            struct rows out) {
    const int64_t wide = padded(l->dv), size = m * (wide + 2);
    for (int64_t r = 0; r < m; r++) {
        /* row r is query head r % heads of token r / heads */
        const float *first = parts + r * wide, *state = parts + m * wide + r;
        float max = sinks ? sinks[r % heads] * LOG2E : -INFINITY, sum = 0;
        for (int64_t p = 0; p < count; p++)
            if (state[p * size] > max) max = state[p * size];
        if (sinks) sum = FN(exp2_scalar)(sinks[r % heads] * LOG2E - max);
        for (int64_t p = 0; p < count; p++) sum += state[p * size + m] * FN(exp2_scalar)(state[p * size] - max);
        float *to = out.data + r / heads * out.token + r % heads * out.head;
        for (int64_t p = 0; p < count; p += GROUP) { /* some parts at a time: as many as there is room for weights */
            float weight[GROUP];
            const int64_t some = count - p < GROUP ? count - p : GROUP;
            for (int64_t i = 0; i < some; i++) weight[i] = FN(exp2_scalar)(state[(p + i) * size] - max) / sum;
            int64_t d = 0;
            for (; d + VW <= l->dv; d += VW) {
                vf x = p ? FN(load)(to + d) : (vf){0};
                for (int64_t i = 0; i < some; i++) x += FN(load)(first + (p + i) * size + d) * weight[i];
                FN(store)(to + d, x);
            }
            for (; d < l->dv; d++) {
                float x = p ? to[d] : 0;
                for (int64_t i = 0; i < some; i++) x += first[(p + i) * size + d] * weight[i];
                to[d] = x;
            }
        }
    }
}
