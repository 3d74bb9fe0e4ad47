/* Prefill: several new tokens of one row, causal among themselves and not written, cut into tasks of (tile of
 * query tokens, KV head), and a few tiles further into parts of the history. Included by native.c. */

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
    lay_out(l, queries * l->rep, queries * l->rep, private[worker].data, &w);
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
    begin(l, &w);
    restart(l, &w, d->parts > 1 ? sums + part * w.m * width : w.out);

    int64_t in_blocks = over(sealed, BLOCK), in_pages = over(history - sealed, BLOCK);
    int64_t all = in_blocks + in_pages + over(d->tokens, BLOCK), per = over(all, d->parts);
    for (int64_t i = part * per; i < least(all, (part + 1) * per); i++) {
        struct chunk c = {0}; /* no look-ahead from the new tokens */
        if (i < in_blocks) {
            if ((i + 1) * BLOCK <= w.lowest) continue; /* left the window; its slot may be gone */
            block_chunk(l, head, blocks[i], least(BLOCK, sealed - i * BLOCK), i * BLOCK, &c);
            if (i + 1 < in_blocks) {
                struct chunk next;
                block_chunk(l, head, blocks[i + 1], BLOCK, (i + 1) * BLOCK, &next);
                look_ahead(l, &c, &next);
            }
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
                 reserve_private((size_t)lay_out(l, d.step * l->rep, d.step * l->rep, NULL, &w));
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
