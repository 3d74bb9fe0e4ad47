/* Linear layers of few rows: y = x w^T + bias, the weights read where they are and once.
 *
 * Weight rows are cut into tasks; each computes all rows of x, so that weights come from memory once. A call
 * may have several layers that share x, or be a whole gated feed-forward block. What is computed, and in which
 * order, is in native_dot.h. Included by native.c. */

struct linear_call {
    const struct linear *layers;
    struct input x;
    int64_t count, rows; /* layers; weight rows of a task */
    float *y;
};

/* Weight rows of a task, when it reads that many of `layers` layers. */
static int64_t task_rows(int64_t layers, int64_t k) { return most(4, TASK_BYTES / (4 * k * layers) / 4 * 4); }

/* Memory for the sums of `rows` weight rows of k inputs, for the results of the two halves of a gated task, and
 * for four unpacked weight rows. */
static size_t task_floats(int64_t rows, int64_t m, int64_t k) { return (size_t)((rows + 3) * m * (16 + 2) + 4 * k + 64); }

static int few_products(int64_t weights, int64_t m) { return weights < 100000 && weights * m < 1000000; }

/* Rows at whole cache lines, with zeros behind. */
static struct input arrange(const float *x, int64_t m, int64_t k, float *to) {
    struct input in = {to, m, k, padded(k)};
    for (int64_t r = 0; r < m; r++, to += in.row) {
        memcpy(to, x + r * k, (size_t)k * 4);
        memset(to + k, 0, (size_t)(in.row - k) * 4);
    }
    return in;
}

static void linear_task(void *job, int64_t index, int worker) {
    const struct linear_call *c = job;
    const struct linear *l = c->layers;
    float *y = c->y;
    for (int64_t tasks; index >= (tasks = over(l->n, c->rows)); l++) {
        index -= tasks;
        y += c->x.m * l->n;
    }
    int64_t from = index * c->rows, to = least(from + c->rows, l->n);
    isa->linear(l, &c->x, from, to, y + from, l->n, (float *)private[worker].data);
}

static void linear_run(struct linear_call *c) {
    int64_t tasks = 0, weights = 0;
    for (int64_t i = 0; i < c->count; i++) {
        tasks += over(c->layers[i].n, c->rows);
        weights += c->layers[i].n * c->x.k;
    }
    pool_run(linear_task, c, (uint32_t)tasks, few_products(weights, c->x.m));
}

/* `count` layers over x [m, k]; y is their results, [m, n] each, one after the other. */
API int offbook_linear(int64_t count, const struct linear *layers, int64_t m, int64_t k, const float *x, float *y) {
    struct linear_call c = {layers, {NULL, m, k, 0}, count, task_rows(1, k), y};
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * padded(k)) * 4) || reserve_private(task_floats(c.rows, m, k) * 4);
    if (!failed) {
        c.x = arrange(x, m, k, (float *)shared.data);
        linear_run(&c);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}

struct gated_call {
    const struct linear *gate, *up;
    struct input x;
    int64_t rows;
    int kind;
    float *hidden; /* [m, padded(n)] */
};

static void gated_task(void *job, int64_t index, int worker) {
    const struct gated_call *c = job;
    int64_t m = c->x.m, from = index * c->rows, to = least(from + c->rows, c->gate->n), n = to - from;
    float *gate = (float *)private[worker].data, *up = gate + m * n, *sums = up + m * n;
    isa->linear(c->gate, &c->x, from, to, gate, n, sums);
    isa->linear(c->up, &c->x, from, to, up, n, sums);
    for (int64_t r = 0; r < m; r++)
        isa->gate(c->kind, n, gate + r * n, up + r * n, c->hidden + r * padded(c->gate->n) + from);
}

/* y [m, n of down] = down(activation(gate(x)) * up(x)), the three layers given in this order. `hidden`: room for
 * [m, padded n of gate]; the private regions hold what `task_floats` says of both tasks' rows. */
static void gated_run(const struct linear *layers, int kind, struct input x, float *hidden, float *y) {
    const int64_t m = x.m, inner = layers->n, row = padded(inner);
    struct gated_call g = {layers, layers + 1, x, task_rows(2, x.k), kind, hidden};
    struct linear_call d = {layers + 2, {hidden, m, inner, row}, 1, task_rows(1, inner), y};
    for (int64_t r = 0; r < m; r++) memset(hidden + r * row + inner, 0, (size_t)(row - inner) * 4);
    pool_run(gated_task, &g, (uint32_t)over(inner, g.rows), few_products(2 * inner * x.k, m));
    linear_run(&d);
}

API int offbook_gated(const struct linear *layers, int kind, int64_t m, int64_t k, const float *x, float *y) {
    const int64_t inner = layers->n, row = padded(inner);
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * (padded(k) + row)) * 4) ||
                 reserve_private(task_floats(most(task_rows(2, k), task_rows(1, inner)), m, most(k, inner)) * 4);
    if (!failed) {
        float *hidden = (float *)shared.data;
        gated_run(layers, kind, arrange(x, m, k, hidden + m * row), hidden, y);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
