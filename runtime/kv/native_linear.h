/* Linear layers of few rows: y = x w^T + bias, the weights read where they are and once.
 *
 * A call may have several layers that share x. Their weight rows are cut into tasks of about TASK_BYTES; each
 * task computes all rows of x, so weights come from memory once. What is computed and in which order is in
 * native_dot.h. Included by native.c. */

enum { TASK_BYTES = 96 << 10 };

struct linear_call {
    const struct linear *layers;
    struct input x;
    int64_t count, rows; /* layers; weight rows of a task */
    float *y;
};

static void linear_task(void *job, int64_t index, int worker) {
    const struct linear_call *c = job;
    const struct linear *l = c->layers;
    float *y = c->y;
    (void)worker;
    for (int64_t tasks; index >= (tasks = over(l->n, c->rows)); l++) {
        index -= tasks;
        y += c->x.m * l->n;
    }
    isa->linear(l, &c->x, index * c->rows, least((index + 1) * c->rows, l->n), y);
}

/* `count` layers over x [m, k]; y is their results, [m, n] each, one after the other. */
API int offbook_linear(int64_t count, const struct linear *layers, int64_t m, int64_t k, const float *x, float *y) {
    struct linear_call c = {layers, {NULL, m, k, padded(k)}, count, 0, y};
    int64_t tasks = 0, outputs = 0;
    if (m < 1) return 0;
    c.rows = most(4, TASK_BYTES / (4 * most(k, 1)) / 4 * 4);
    for (int64_t i = 0; i < count; i++) {
        tasks += over(layers[i].n, c.rows);
        outputs += layers[i].n;
    }
    pthread_mutex_lock(&pool.gate);
    int failed = reserve(&shared, (size_t)(m * c.x.row) * 4);
    if (!failed) {
        float *copy = (float *)shared.data; /* rows at whole cache lines, with zeros behind */
        c.x.data = copy;
        for (int64_t r = 0; r < m; r++, copy += c.x.row) {
            memcpy(copy, x + r * k, (size_t)k * 4);
            memset(copy + k, 0, (size_t)(c.x.row - k) * 4);
        }
        int alone = outputs * k < 100000 && outputs * k * m < 1000000;
        pool_run(linear_task, &c, (uint32_t)tasks, alone);
    }
    pthread_mutex_unlock(&pool.gate);
    return failed ? -1 : 0;
}
