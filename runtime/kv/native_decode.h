/* Decode: one new token for each row, cut into tasks of (rows that share, KV head, some blocks).
 *
 * A row's parts are its blocks and its tail: each is attended to on its own, and the parts are joined in order
 * by whichever task ends last. A task computes a block's part for all the rows that share it, with each row's
 * arithmetic as it is alone; so neither other rows nor the threads' timing change a row's bits. Included by
 * native.c. */

struct unit { /* of work, for each head: blocks [block, last) for some rows; no blocks: one row's tail */
    int32_t block, last, count;
    const int32_t *members;
};

struct decode {
    const struct layer *l;
    const struct step *s;
    struct rows q, k, v, out;
    const float *sinks;
    struct unit *units;
    int64_t unit_count, threads;
    int64_t *first;        /* [rows]: where each row's parts begin, [heads, parts] */
    _Atomic int32_t *left; /* [rows, heads]: parts that are not done */
    float *parts;
};

static int64_t parts_of(const struct step *s, int64_t row) {
    int64_t from, blocks = visible_blocks(s, row, &from);
    return blocks - from + 1;
}

static float *part_at(const struct decode *d, int64_t row, int64_t head, int64_t part) {
    int64_t size = d->l->rep * (padded(d->l->dv) + 2);
    return d->parts + (d->first[row] + head * parts_of(d->s, row) + part) * size;
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

static void find_block(const struct decode *d, const struct unit *u, int64_t head, int64_t block, int64_t sealed,
                       struct chunk *c) {
    int32_t slot = d->s->blocks[d->s->block_at[u->members[0]] + block];
    block_chunk(d->l, head, slot, least(BLOCK, sealed - block * BLOCK), block * BLOCK, c);
}

/* Some blocks of a unit's rows, each into its part. */
static void attend_blocks(const struct decode *d, const struct unit *u, int64_t head, const struct unit *then,
                          int64_t then_head, struct work *w) {
    const struct layer *l = d->l;
    const int64_t wide = padded(l->dv), rep = l->rep;
    float *own = w->out;
    for (int64_t b = u->block; b < u->last; b++) {
        struct chunk c, next;
        find_block(d, u, head, b, w->highest, &c);
        if (b + 1 < u->last) {
            find_block(d, u, head, b + 1, w->highest, &next);
            look_ahead(l, &c, &next);
        } else if (then && then->block < then->last) {
            find_block(d, then, then_head, then->block, w->highest, &next);
            look_ahead(l, &c, &next);
        }
        int64_t from;
        if (u->count == 1) visible_blocks(d->s, u->members[0], &from);
        restart(l, w, u->count == 1 ? part_at(d, u->members[0], head, b - from) : own);
        isa->attend(l, &c, w);
        for (int64_t i = 0; i < u->count && u->count > 1; i++) {
            visible_blocks(d->s, u->members[i], &from);
            float *to = part_at(d, u->members[i], head, b - from);
            memcpy(to, w->out + i * rep * wide, (size_t)(rep * wide) * sizeof *to);
            memcpy(to + rep * wide, w->max + i * rep, (size_t)rep * sizeof *to);
            memcpy(to + rep * (wide + 1), w->sum + i * rep, (size_t)rep * sizeof *to);
        }
    }
}

static void attend_tail(const struct decode *d, int64_t row, int64_t head, struct work *w) {
    const struct step *s = d->s;
    int64_t sealed = s->sealed[row], length = s->length[row];
    append(d, row, head);
    restart(d->l, w, part_at(d, row, head, parts_of(s, row) - 1));
    for (int64_t at = sealed; at < length; at += BLOCK) {
        struct chunk c = {0};
        page_chunk(d->l, head, s->pages + s->page_at[row] + (at - sealed) / GROUP, least(BLOCK, length - at), at, &c);
        isa->attend(d->l, &c, w);
    }
}

static void decode_task(void *job, int64_t index, int worker) {
    const struct decode *d = job;
    const struct layer *l = d->l;
    const struct step *s = d->s;
    const struct unit *u = d->units + index / l->heads;
    const int64_t head = index % l->heads, rep = l->rep, done = most(1, u->last - u->block);

    struct work w;
    lay_out(l, u->count * rep, rep, private[worker].data, &w);
    w.lowest = INT64_MAX, w.highest = 0;
    for (int64_t i = 0; i < u->count; i++) {
        int64_t row = u->members[i], low = s->start[row], high = u->block < u->last ? s->sealed[row] : s->length[row];
        for (int64_t r = 0; r < rep; r++) {
            memcpy(w.queries + (i * rep + r) * l->dk, d->q.data + row * d->q.token + (head * rep + r) * d->q.head, (size_t)l->dk * 4);
            w.low[i * rep + r] = low, w.high[i * rep + r] = high;
        }
        w.lowest = least(w.lowest, low), w.highest = most(w.highest, high);
    }
    begin(l, &w);
    if (u->block < u->last) {
        int64_t then = index + d->threads; /* what this thread will probably draw next */
        attend_blocks(d, u, head, then < d->unit_count * l->heads ? d->units + then / l->heads : NULL, then % l->heads, &w);
    } else {
        attend_tail(d, u->members[0], head, &w);
    }
    for (int64_t i = 0; i < u->count; i++) {
        int64_t row = u->members[i];
        if (atomic_fetch_sub_explicit(&d->left[row * l->heads + head], (int32_t)done, memory_order_acq_rel) != done) continue;
        struct rows out = d->out;
        out.data += row * out.token + head * rep * out.head;
        isa->join(l, part_at(d, row, head, 0), parts_of(s, row), rep, d->sinks ? d->sinks + head * rep : NULL, rep, out);
    }
}

/* Cut the runs into units of similar work, then the tails (`members` numbers the rows). Returns how many;
 * with `units` NULL that is all. `most_rows`: of a unit. */
static int64_t cut(const struct layer *l, const struct step *s, const int32_t *members, struct unit *units, int64_t *most_rows) {
    const int64_t limit = most(1, TILE_ROWS / l->rep), threads = 1 + atomic_load(&pool.wanted);
    int64_t count = 0, pairs = 0;
    for (int64_t i = 0; i < s->run_count; i++) pairs += (int64_t)s->runs[i].count * (s->runs[i].last - s->runs[i].block);
    const int64_t share = pairs * l->heads / (threads * SPLIT);
    *most_rows = 1;
    for (int64_t i = 0; i < s->run_count; i++) {
        const struct run *run = &s->runs[i];
        int64_t slices = over(run->count, limit), rows = over(run->count, slices);
        int64_t per = most(1, least(TASK_BLOCKS, share / rows));
        *most_rows = most(*most_rows, rows);
        for (int64_t at = 0; at < run->count; at += rows)
            for (int64_t b = run->block; b < run->last; b += per, count++)
                if (units)
                    units[count] = (struct unit){(int32_t)b, (int32_t)least(run->last, b + per), (int32_t)least(rows, run->count - at),
                                                 s->members + run->at + at};
    }
    for (int64_t r = 0; r < s->rows; r++, count++)
        if (units) units[count] = (struct unit){0, 0, 1, members + r};
    return count;
}

API int offbook_decode(const struct layer *l, const struct step *s, const float *q, int64_t q_row, int64_t q_head,
                       const float *k, int64_t k_row, int64_t k_head, const float *v, int64_t v_row, int64_t v_head,
                       float *out, int64_t out_row, int64_t out_head, const float *sinks) {
    struct decode d = {l, s, {(float *)q, q_row, q_head}, {(float *)k, k_row, k_head}, {(float *)v, v_row, v_head},
                       {out, out_row, out_head}, sinks, NULL, 0, 1, NULL, NULL, NULL};
    struct work w;
    int64_t parts = 0, tokens = 0, most_rows;
    for (int64_t r = 0; r < s->rows; r++) {
        parts += parts_of(s, r) * l->heads;
        tokens += s->length[r] - s->start[r];
    }
    pthread_mutex_lock(&pool.gate);
    d.unit_count = cut(l, s, NULL, NULL, &most_rows);
    size_t rows = (size_t)s->rows, heads = (size_t)l->heads, size = (size_t)(l->rep * (padded(l->dv) + 2));
    size_t bytes = (size_t)d.unit_count * sizeof(struct unit) + rows * 12 + rows * heads * 4 + (size_t)parts * size * 4;
    int failed = reserve(&shared, bytes + 5 * 64) || reserve_private((size_t)lay_out(l, most_rows * l->rep, l->rep, NULL, &w));
    if (!failed) {
        char *at = shared.data;
        d.units = take(&at, (size_t)d.unit_count, sizeof(struct unit));
        int32_t *members = take(&at, rows, 4);
        d.first = take(&at, rows, 8);
        d.left = take(&at, rows * heads, 4);
        d.parts = take(&at, (size_t)parts * size, 4);
        parts = 0;
        for (int64_t r = 0; r < s->rows; r++) {
            int64_t mine = parts_of(s, r);
            members[r] = (int32_t)r;
            d.first[r] = parts;
            parts += mine * l->heads;
            for (int64_t h = 0; h < l->heads; h++) atomic_init(&d.left[r * l->heads + h], (int32_t)mine);
        }
        cut(l, s, members, d.units, &most_rows);
        int64_t tasks = d.unit_count * l->heads;
        int alone = small(l, tokens * l->rep);
        d.threads = alone ? 1 : least(1 + atomic_load(&pool.wanted), tasks);
        pool_run(decode_task, &d, (uint32_t)tasks, alone);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
