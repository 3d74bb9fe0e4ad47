/* Decode: one new token for each row, cut into tasks of (row, KV head, run of blocks).
 *
 * The cut of a row depends on its own length and window alone, and its parts are joined in order by whichever
 * task ends last, so other rows and the threads' timing do not change its bits. Included by native.c. */

struct decode {
    const struct layer *l;
    const struct step *s;
    struct rows q, k, v, out;
    const float *sinks;
    int64_t *first;        /* [rows + 1]: the first task of each row */
    _Atomic int32_t *left; /* [rows, heads]: parts that are not done */
    float *parts;          /* a part per task */
    int64_t threads;
};

/* How a row's blocks are cut: `per` blocks to a part, the tail being one more part. */
static void cut(const struct step *s, int64_t row, int64_t *from, int64_t *per, int64_t *parts) {
    int64_t blocks = over(s->sealed[row], BLOCK);
    *from = least(s->start[row] / BLOCK, blocks);
    *per = most(1, over(blocks - *from, SPLIT));
    *parts = over(blocks - *from, *per) + 1;
}

static void append(const struct decode *d, int64_t row, int64_t head) {
    const struct layer *l = d->l;
    int64_t at = d->s->length[row] - 1 - d->s->sealed[row];
    int64_t page = d->s->pages[d->s->page_at[row] + at / GROUP], slot = (page * l->heads + head) * GROUP + at % GROUP;
    const float *k = d->k.data + row * d->k.token + head * d->k.head;
    for (int64_t i = 0; i < l->dk; i++) l->tail_k[slot * l->dk + i] = to_bf16(k[i]);
    if (l->latent) return;
    const float *v = d->v.data + row * d->v.token + head * d->v.head;
    for (int64_t i = 0; i < l->dv; i++) l->tail_v[slot * l->dv + i] = to_bf16(v[i]);
}

struct place {
    int64_t row, head, part, parts, block, last; /* blocks [block, last); the last part is the tail */
};

static struct place find(const struct decode *d, int64_t index) {
    struct place p = {0};
    int64_t end = d->s->rows, from, per;
    while (end - p.row > 1) { /* the row whose tasks `index` is among */
        int64_t middle = (p.row + end) / 2;
        if (d->first[middle] <= index) p.row = middle;
        else end = middle;
    }
    cut(d->s, p.row, &from, &per, &p.parts);
    p.head = (index - d->first[p.row]) / p.parts;
    p.part = (index - d->first[p.row]) % p.parts;
    p.block = from + p.part * per;
    p.last = least(p.block + per, over(d->s->sealed[p.row], BLOCK));
    return p;
}

static void find_block(const struct decode *d, const struct place *p, int64_t block, struct chunk *c) {
    int32_t slot = d->s->blocks[d->s->block_at[p->row] + block];
    block_chunk(d->l, p->head, slot, least(BLOCK, d->s->sealed[p->row] - block * BLOCK), block * BLOCK, c);
}

static void decode_task(void *job, int64_t index, int worker) {
    const struct decode *d = job;
    const struct layer *l = d->l;
    const struct step *s = d->s;
    struct place p = find(d, index);
    int64_t row = p.row, head = p.head, part = p.part, parts = p.parts;
    int64_t size = l->rep * (padded(l->dv) + 2), start = s->start[row], length = s->length[row], sealed = s->sealed[row];

    struct work w;
    lay_out(l, l->rep, private[worker].data, &w);
    for (int64_t r = 0; r < l->rep; r++) {
        memcpy(w.queries + r * l->dk, d->q.data + row * d->q.token + (head * l->rep + r) * d->q.head, (size_t)l->dk * 4);
        w.low[r] = start, w.high[r] = length;
    }
    w.lowest = start, w.highest = length;
    begin(l, &w, d->parts + index * size);

    struct chunk c;
    if (part < parts - 1) {
        /* What this thread will probably draw next. */
        struct place then = index + d->threads < d->first[s->rows] ? find(d, index + d->threads) : p;
        for (int64_t b = p.block; b < p.last; b++) {
            struct chunk next;
            find_block(d, &p, b, &c);
            if (b + 1 < p.last) {
                find_block(d, &p, b + 1, &next);
                look_ahead(l, &c, &next);
            } else if (then.part < then.parts - 1) {
                find_block(d, &then, then.block, &next);
                look_ahead(l, &c, &next);
            }
            isa->attend(l, &c, &w);
        }
    } else {
        append(d, row, head);
        for (int64_t at = sealed; at < length; at += BLOCK) {
            page_chunk(l, head, s->pages + s->page_at[row] + (at - sealed) / GROUP, least(BLOCK, length - at), at, &c);
            isa->attend(l, &c, &w);
        }
    }
    if (atomic_fetch_sub_explicit(&d->left[row * l->heads + head], 1, memory_order_acq_rel) == 1) {
        struct rows out = d->out;
        out.data += row * out.token + head * l->rep * out.head;
        isa->join(l, d->parts + (d->first[row] + head * parts) * size, parts, l->rep,
                  d->sinks ? d->sinks + head * l->rep : NULL, l->rep, out);
    }
}

API int offbook_decode(const struct layer *l, const struct step *s, const float *q, int64_t q_row, int64_t q_head,
                       const float *k, int64_t k_row, int64_t k_head, const float *v, int64_t v_row, int64_t v_head,
                       float *out, int64_t out_row, int64_t out_head, const float *sinks) {
    struct decode d = {l, s, {(float *)q, q_row, q_head}, {(float *)k, k_row, k_head}, {(float *)v, v_row, v_head},
                       {out, out_row, out_head}, sinks, NULL, NULL, NULL, 1};
    struct work w;
    int64_t tasks = 0, tokens = 0, from, per, parts;
    for (int64_t r = 0; r < s->rows; r++) {
        cut(s, r, &from, &per, &parts);
        tasks += parts * l->heads;
        tokens += s->length[r] - s->start[r];
    }
    pthread_mutex_lock(&pool.gate);
    size_t rows = (size_t)s->rows, heads = (size_t)l->heads, size = (size_t)(l->rep * (padded(l->dv) + 2));
    int failed = reserve(&shared, (rows + 1) * 8 + rows * heads * 4 + (size_t)tasks * size * 4 + 3 * 64) ||
                 reserve_private((size_t)lay_out(l, l->rep, NULL, &w));
    if (!failed) {
        char *at = shared.data;
        d.first = take(&at, rows + 1, 8);
        d.left = take(&at, rows * heads, 4);
        d.parts = take(&at, (size_t)tasks * size, 4);
        d.first[0] = 0;
        for (int64_t r = 0; r < s->rows; r++) {
            cut(s, r, &from, &per, &parts);
            d.first[r + 1] = d.first[r] + parts * l->heads;
            for (int64_t h = 0; h < l->heads; h++) atomic_init(&d.left[r * l->heads + h], (int32_t)parts);
        }
        int alone = small(l, tokens * l->rep);
        d.threads = alone ? 1 : least(1 + atomic_load(&pool.wanted), tasks);
        pool_run(decode_task, &d, (uint32_t)tasks, alone);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
