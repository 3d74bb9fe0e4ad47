/* What a decoder layer does to single rows besides products, for one instruction set: RMS norms and rotary
 * positions. A row's sums have a fixed order, so other rows do not change its bits. */

/* out = x / rms(x) * weight, for k elements; `out` may be `x`. */
static TARGET void FN(norm)(int64_t k, const float *x, const float *weight, float eps, float *out) {
    vf squares = {0};
    int64_t i = 0;
    for (; i + VW <= k; i += VW) {
        vf v = FN(load)(x + i);
        squares += v * v;
    }
    float sum = FN(sum)(squares);
    for (; i < k; i++) sum += x[i] * x[i];
    const float by = 1.0f / sqrtf(sum / (float)k + eps);
    for (i = 0; i + VW <= k; i += VW) FN(store)(out + i, FN(load)(x + i) * by * FN(load)(weight + i));
    for (; i < k; i++) out[i] = x[i] * by * weight[i];
}

/* to += x, for k elements. */
static TARGET void FN(add)(int64_t k, const float *x, float *to) {
    int64_t i = 0;
    for (; i + VW <= k; i += VW) FN(store)(to + i, FN(load)(to + i) + FN(load)(x + i));
    for (; i < k; i++) to[i] += x[i];
}

/* Turn `pairs` pairs of one head by the angles of its position: numbers i and i + pairs, or neighbours. */
static TARGET void FN(turn)(int64_t pairs, int neighbours, const float *cosines, const float *sines, float *x) {
    if (neighbours) {
        for (int64_t i = 0; i < pairs; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = a * sines[i] + b * cosines[i];
        }
        return;
    }
    int64_t i = 0;
    for (; i + VW <= pairs; i += VW) {
        vf a = FN(load)(x + i), b = FN(load)(x + pairs + i), c = FN(load)(cosines + i), s = FN(load)(sines + i);
        FN(store)(x + i, a * c - b * s);
        FN(store)(x + pairs + i, a * s + b * c);
    }
    for (; i < pairs; i++) {
        float a = x[i], b = x[pairs + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[pairs + i] = a * sines[i] + b * cosines[i];
    }
}
