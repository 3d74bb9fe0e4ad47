/* Prefill: several new tokens of one row, causal among themselves and not written, cut into tasks of (tile of
 * query tokens, KV head), and a few tiles further into parts of the history. Included by native.c.
 *
 * The new tokens' keys and values become pages that follow the row's own, and the history's parts depend on what
 * is sealed alone. So where nothing is sealed between them, tokens read in two lots have the bits they have in one. */

enum { PART_BLOCKS = 2, PARTS = 16, SUMS_BYTES = 8 << 20 };

struct prefill {
    const struct layer *l;
    const struct step *s;
    int64_t row, tokens, asked, window;  /* new tokens, and how many of them, the last ones, attend */
    struct rows q, k, v, out;
    const float *sinks;
    uint16_t *new_k, *new_v;           /* [pages, heads, 64, width] from page `whole` of the tail on */
    int64_t whole;                     /* pages of the tail that have no new token */
    int64_t step, tiles;               /* query tokens to a tile */
    int64_t part, parts, split;        /* blocks to a part; parts, the last one being the tail; tasks to a tile and head */
    _Atomic int32_t *left;             /* [tiles, heads] */
    float *sums;                       /* a part per task, unless split is 1 */
};

/* The rest of the tail, as pages: what a part-filled page holds, and the new tokens behind it. */
static void add_pages(const struct prefill *d, int64_t heads, int64_t width, const uint16_t *tail, struct rows x, uint16_t *to) {
    const int64_t history = d->s->length[d->row], held = (history - d->s->sealed[d->row]) % GROUP;
    const int64_t page = held ? d->s->pages[d->s->page_at[d->row] + d->whole] : 0;
    for (int64_t at = 0; at < held + d->tokens; at += GROUP)
        for (int64_t h = 0; h < heads; h++, to += GROUP * width) {
            const int64_t old = most(0, least(GROUP, held - at)), end = least(GROUP, held + d->tokens - at);
            if (old) memcpy(to, tail + (page * heads + h) * GROUP * width, (size_t)(old * width) * sizeof *to);
            for (int64_t t = old; t < end; t++) {
                const float *from = x.data + (at + t - held) * x.token + h * x.head;
                for (int64_t i = 0; i < width; i++) to[t * width + i] = to_bf16(from[i]);
            }
        }
}

/* Up to four pages of the tail and of the new tokens, from page `first` on. */
static void tail_chunk(const struct prefill *d, int64_t head, int64_t first, struct chunk *c) {
    const struct layer *l = d->l;
    const int64_t sealed = d->s->sealed[d->row], end = d->s->length[d->row] + d->tokens;
    const int32_t *pages = d->s->pages + d->s->page_at[d->row];
    const int64_t at = sealed + first * GROUP, own = most(0, least(d->whole - first, GROUPS));
    page_chunk(l, head, pages + first, least(own * GROUP, end - at), at, c);
    c->tokens = least(BLOCK, end - at);
    for (int64_t g = own; g * GROUP < c->tokens; g++) {
        const int64_t from = ((first + g - d->whole) * l->heads + head) * GROUP;
        c->k[g] = (const uint8_t *)(d->new_k + from * l->dk);
        c->v[g] = l->latent ? c->k[g] : (const uint8_t *)(d->new_v + from * l->dv);
    }
}

/* Part `part` of what a tile's rows see of one head, into the work's running state. */
static void attend_part(const struct prefill *d, int64_t head, int64_t part, struct work *w) {
    const struct layer *l = d->l;
    const int64_t sealed = d->s->sealed[d->row], in_blocks = over(sealed, BLOCK);
    const int32_t *blocks = d->s->blocks + d->s->block_at[d->row];
    struct chunk c, next;
    if (part == d->parts - 1) {
        for (int64_t page = 0; sealed + page * GROUP < w->highest; page += GROUPS) {
            tail_chunk(d, head, page, &c);
            if (c.first + c.tokens > w->lowest) isa->attend(l, &c, w);
        }
        return;
    }
    const int64_t end = least(in_blocks, (part + 1) * d->part);
    for (int64_t b = part * d->part; b < end; b++) {
        if ((b + 1) * BLOCK <= w->lowest) continue; /* left the window; its slot may be gone */
        block_chunk(l, head, blocks[b], least(BLOCK, sealed - b * BLOCK), b * BLOCK, &c);
        if (b + 1 < in_blocks) {
            block_chunk(l, head, blocks[b + 1], BLOCK, (b + 1) * BLOCK, &next);
            look_ahead(l, &c, &next);
        }
        isa->attend(l, &c, w);
    }
}

/* Rows for one part's result: see `restart`. */
static int64_t part_floats(const struct layer *l, int64_t m) { return m * (padded(l->dv) + 2); }

static void prefill_task(void *job, int64_t index, int worker) {
    const struct prefill *d = job;
    const struct layer *l = d->l;
    const int64_t history = d->s->length[d->row] + d->tokens - d->asked; /* of the first that attends */
    int64_t part = index % d->split, head = index / d->split % l->heads, tile = d->tiles - 1 - index / d->split / l->heads;
    int64_t query = tile * d->step, queries = least(d->step, d->asked - query), m = queries * l->rep;

    struct work w;
    float *all = (float *)lay_out(l, m, FEW + 1, private[worker].data, &w); /* how many rows there are must not show */
    for (int64_t r = 0; r < m; r++) {
        int64_t t = query + r / l->rep, position = history + t;
        memcpy(w.queries + r * l->dk, d->q.data + t * d->q.token + (head * l->rep + r % l->rep) * d->q.head, (size_t)l->dk * 4);
        w.low[r] = d->window ? most(0, position - d->window + 1) : 0;
        w.high[r] = position + 1;
    }
    w.lowest = w.low[0];
    w.highest = w.high[m - 1];
    begin(l, &w);

    float *sums = all;
    if (d->split == 1) { /* one part after the other, each added to those before it */
        float *own = w.out;
        restart(l, &w, all);
        for (int64_t p = 0; p < d->parts; p++) {
            if (p) restart(l, &w, own);
            attend_part(d, head, p, &w);
            if (p) isa->merge(l, m, own, all);
        }
    } else {
        const int64_t size = part_floats(l, d->step * l->rep);
        sums = d->sums + (tile * l->heads + head) * d->parts * size;
        restart(l, &w, sums + part * size);
        attend_part(d, head, part, &w);
        if (atomic_fetch_sub_explicit(&d->left[tile * l->heads + head], 1, memory_order_acq_rel) != 1) return;
        for (int64_t p = 1; p < d->parts; p++) isa->merge(l, m, sums + p * size, sums);
    }
    struct rows out = d->out;
    out.data += query * out.token + head * l->rep * out.head;
    isa->join(l, sums, 1, m, d->sinks ? d->sinks + head * l->rep : NULL, l->rep, out);
}

API int offbook_prefill(const struct layer *l, const struct step *s, int64_t row, int64_t tokens, int64_t asked,
                        int64_t window, const float *q, int64_t q_token, int64_t q_head, const float *k, int64_t k_token, int64_t k_head,
                        const float *v, int64_t v_token, int64_t v_head, float *out, int64_t out_token, int64_t out_head,
                        const float *sinks) {
    struct prefill d = {.l = l, .s = s, .row = row, .tokens = tokens, .asked = asked, .window = window, .sinks = sinks};
    d.q = (struct rows){(float *)q, q_token, q_head};
    d.k = (struct rows){(float *)k, k_token, k_head};
    d.v = (struct rows){(float *)v, v_token, v_head};
    d.out = (struct rows){out, out_token, out_head};
    int64_t sealed = s->sealed[row], history = s->length[row], in_blocks = over(sealed, BLOCK);
    d.whole = (history - sealed) / GROUP;
    d.part = most(PART_BLOCKS, over(in_blocks, PARTS));
    d.parts = over(in_blocks, d.part) + 1;
    d.step = least(most(1, least(GROUP, TILE_ROWS / l->rep)), asked);
    d.tiles = over(asked, d.step);
    struct work w;
    pthread_mutex_lock(&pool.gate);
    size_t items = (size_t)(d.tiles * l->heads), rows = (size_t)(d.step * l->rep), part = (size_t)part_floats(l, d.step * l->rep);
    size_t floats = items * (size_t)d.parts * part;
    size_t pages = (size_t)(over(history + tokens - sealed, GROUP) - d.whole), places = pages * (size_t)l->heads * GROUP;
    int few = items < 4 * (size_t)(1 + most(0, atomic_load(&pool.wanted)));
    d.split = few && floats * 4 <= SUMS_BYTES ? d.parts : 1;
    if (d.split == 1) floats = 0;
    int failed = reserve(&shared, items * 4 + floats * 4 + places * (size_t)(l->dk + l->dv) * 2 + 4 * 64) ||
                 reserve_private((size_t)lay_out(l, (int64_t)rows, FEW + 1, NULL, &w) + part * 4);
    if (!failed) {
        char *at = shared.data;
        d.left = take(&at, items, 4);
        d.sums = take(&at, floats, 4);
        d.new_k = take(&at, places * (size_t)l->dk, 2);
        d.new_v = take(&at, l->latent ? 0 : places * (size_t)l->dv, 2);
        for (size_t i = 0; i < items; i++) atomic_init(&d.left[i], (int32_t)d.parts);
        add_pages(&d, l->heads, l->dk, l->tail_k, d.k, d.new_k);
        if (!l->latent) add_pages(&d, l->heads, l->dv, l->tail_v, d.v, d.new_v);
        pool_run(prefill_task, &d, (uint32_t)(items * (size_t)d.split), small(l, (history + tokens) * asked * l->rep));
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
