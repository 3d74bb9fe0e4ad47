/* A decoder layer of few rows, but for its attention, as two calls: what leads to queries, keys and values, and
 * what follows attention. Norms, rotary positions and residual sums are done between the products, so the
 * layer costs two calls instead of some thirty operations. Included by native.c. */

struct block { /* decoder.py mirrors it; norms are [hidden] or, of queries and keys, [width]; NULL: none */
    struct linear qkv[3], o, gated[3];
    const float *before_attention, *of_queries, *of_keys, *after_attention, *before_gated, *after_gated;
    int64_t hidden, heads, kv_heads, width;
    int64_t turned, neighbours, activation; /* channels of a head that are turned; pairs are neighbours */
    float eps;
};

/* Normed rows at whole cache lines, with zeros behind. */
static struct input arrange_normed(const float *x, const float *weight, float eps, int64_t m, int64_t k, float *to) {
    struct input in = {to, m, k, padded(k)};
    for (int64_t r = 0; r < m; r++, to += in.row) {
        isa->norm(k, x + r * k, weight, eps, to);
        memset(to + k, 0, (size_t)(in.row - k) * 4);
    }
    return in;
}

/* x += y, each row of y normed before if there is a weight. */
static void add_rows(int64_t m, int64_t k, float *y, const float *weight, float eps, float *x) {
    for (int64_t r = 0; r < m; r++) {
        if (weight) isa->norm(k, y + r * k, weight, eps, y + r * k);
        isa->add(k, y + r * k, x + r * k);
    }
}

static void finish_heads(const struct block *b, int64_t m, int64_t heads, const float *weight, const float *cosines,
                         const float *sines, float *x) {
    const int64_t pairs = b->turned / 2;
    for (int64_t r = 0; r < m; r++)
        for (int64_t h = 0; h < heads; h++, x += b->width) {
            if (weight) isa->norm(b->width, x, weight, b->eps, x);
            isa->turn(pairs, (int)b->neighbours, cosines + r * pairs, sines + r * pairs, x);
        }
}

static void round_to_bf16(int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++) x[i] = bf16(to_bf16(x[i]));
}

/* x [m, hidden]; cosines and sines [m, turned / 2]; out: queries [m, heads, width], then keys and values
 * [m, kv_heads, width] each; these rounded to bfloat16 if `rounded`. */
API int offbook_block_in(const struct block *b, int64_t m, const float *x, const float *cosines, const float *sines,
                         int rounded, float *out) {
    struct linear_call c = {b->qkv, {NULL, m, b->hidden, 0}, 3, task_rows(1, b->hidden), out};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * padded(b->hidden)) * 4) ||
                 reserve_private(task_floats(c.rows, m, b->hidden) * 4);
    if (!failed) {
        c.x = arrange_normed(x, b->before_attention, b->eps, m, b->hidden, (float *)shared.data);
        linear_run(&c);
    }
    pthread_mutex_unlock(&pool.gate);
    if (failed) return -1;
    float *keys = out + m * b->qkv[0].n, *values = keys + m * b->qkv[1].n;
    finish_heads(b, m, b->heads, b->of_queries, cosines, sines, out);
    finish_heads(b, m, b->kv_heads, b->of_keys, cosines, sines, keys);
    if (rounded) {
        round_to_bf16(m * b->qkv[1].n, keys);
        round_to_bf16(m * b->qkv[2].n, values);
    }
    return 0;
}

/* attended [m, heads * width]; x [m, hidden] becomes what leaves the layer. */
API int offbook_block_out(const struct block *b, int64_t m, const float *attended, float *x) {
    const int64_t k = b->o.n, wide = b->heads * b->width, inner = b->gated[0].n, row = padded(inner);
    const int64_t widest = most(padded(wide), padded(k));
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * (widest + row + k)) * 4) ||
                 reserve_private(task_floats(most(task_rows(2, k), most(task_rows(1, wide), task_rows(1, inner))), m,
                                             most(widest, row)) * 4);
    if (!failed) {
        float *input = (float *)shared.data, *hidden = input + m * widest, *y = hidden + m * row;
        struct linear_call o = {&b->o, arrange(attended, m, wide, input), 1, task_rows(1, wide), y};
        linear_run(&o);
        add_rows(m, k, y, b->after_attention, b->eps, x);
        gated_run(b->gated, (int)b->activation, arrange_normed(x, b->before_gated, b->eps, m, k, input), hidden, y);
        add_rows(m, k, y, b->after_gated, b->eps, x);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

/* The last norm and the head: y [m, n of head]. */
API int offbook_head(const struct linear *head, const float *norm, float eps, int64_t m, int64_t k, const float *x, float *y) {
    struct linear_call c = {head, {NULL, m, k, 0}, 1, task_rows(1, k), y};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * padded(k)) * 4) || reserve_private(task_floats(c.rows, m, k) * 4);
    if (!failed) {
        c.x = arrange_normed(x, norm, eps, m, k, (float *)shared.data);
        linear_run(&c);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
