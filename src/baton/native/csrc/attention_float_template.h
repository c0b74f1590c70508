/* Attention for one type of keys and values: attention.h includes this once for each (KV, OF_KV, LOAD_KV, TO_KV, FROM_KV). */

/* ---- storing ---- */

static void OF_KV(store_token)(const AttentionArgs *layer, int64_t sequence, int64_t token) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t size = shape->block_size, dim = shape->head_dim;
    int64_t position = step->contexts[sequence] + token - step->starts[sequence], place = position % size;
    int64_t number = step->tables[step->slots[sequence] * step->table_stride + position / size];
    KV *block = (KV *)layer->pool + number * shape->block_stride;
    const float *k = layer->qkv + token * layer->qkv_stride + shape->heads * dim, *v = k + shape->kv_heads * dim;
    for (int64_t head = 0; head < shape->kv_heads; head++, k += dim, v += dim) {
        KV *restrict keys = block + head * dim * size + place;
        KV *restrict values = block + shape->values_at + (head * size + place) * dim;
        for (int64_t d = 0; d < dim; d++) keys[d * size] = TO_KV(k[d]);
        for (int64_t d = 0; d < dim; d++) values[d] = TO_KV(v[d]);
    }
}

/* ---- scores: q . k for `rows` rows and `columns` vectors of keys ---- */

ALWAYS void OF_KV(score_columns)(const int rows, const int columns, const float *q, int64_t dim, const KV *const *keys,
                                 int64_t size, float *scores, int64_t width) {
    f32v sum[ROWS_AT_ONCE][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = broadcast(0.0f);
    for (int64_t d = 0; d < dim; d++) {
#if ROWS_OUTSIDE
        f32v key[COLUMNS_MAX];
        for (int c = 0; c < columns; c++) key[c] = LOAD_KV(keys[c] + d * size);
        for (int r = 0; r < rows; r++) {
            SCHED_FENCE;
            for (int c = 0; c < columns; c++) sum[r][c] = fma_lanes(broadcast(q[r * dim + d]), key[c], sum[r][c]);
        }
#else
        for (int c = 0; c < columns; c++) {
            f32v key = LOAD_KV(keys[c] + d * size);
            for (int r = 0; r < rows; r++) sum[r][c] = fma_lanes(broadcast(q[r * dim + d]), key, sum[r][c]);
        }
#endif
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(scores + r * width + c * LANES, sum[r][c]);
}

ALWAYS void OF_KV(score_rows)(const int rows, const int at_once, const float *q, int64_t dim, const KV *const *keys,
                              int64_t columns, int64_t size, float *scores, int64_t width) {
    int64_t c = 0;
    for (; c + at_once <= columns; c += at_once)
        OF_KV(score_columns)(rows, at_once, q, dim, keys + c, size, scores + c * LANES, width);
    for (; c < columns; c++) OF_KV(score_columns)(rows, 1, q, dim, keys + c, size, scores + c * LANES, width);
}

/* Blocks that are not whole vectors: the same sums, key by key. */
static void OF_KV(score_odd)(int64_t rows, const float *q, int64_t dim, const KV *const *blocks, int64_t count, int64_t size,
                             int64_t head, float *scores, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < count; b++) {
            float *row = scores + r * width + b * size;
            const KV *keys = blocks[b] + head * dim * size;
            for (int64_t t = 0; t < size; t++) row[t] = 0.0f;
            for (int64_t d = 0; d < dim; d++)
                for (int64_t t = 0; t < size; t++) row[t] = FMA(q[r * dim + d], FROM_KV(keys[d * size + t]), row[t]);
        }
}

/* ---- weights times values ---- */

ALWAYS void OF_KV(add_columns)(const int rows, const int columns, const float *weights, int64_t width, const float *keep,
                               const KV *const *values, int64_t size, int64_t tokens, int64_t dim, int64_t from, float *out) {
    f32v sum[ROWS_AT_ONCE][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = broadcast(keep[r]) * load(out + r * dim + from + c * LANES);
    for (int64_t b = 0, t = 0; t < tokens; b++) {
        const KV *value = values[b] + from;
        for (int64_t end = min_int(t + size, tokens); t < end; t++, value += dim) {
#if ROWS_OUTSIDE
            f32v v[COLUMNS_MAX];
            for (int c = 0; c < columns; c++) v[c] = LOAD_KV(value + c * LANES);
            for (int r = 0; r < rows; r++) {
                SCHED_FENCE;
                for (int c = 0; c < columns; c++) sum[r][c] = fma_lanes(broadcast(weights[r * width + t]), v[c], sum[r][c]);
            }
#else
            for (int c = 0; c < columns; c++) {
                f32v v = LOAD_KV(value + c * LANES);
                for (int r = 0; r < rows; r++) sum[r][c] = fma_lanes(broadcast(weights[r * width + t]), v, sum[r][c]);
            }
#endif
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(out + r * dim + from + c * LANES, sum[r][c]);
}

ALWAYS void OF_KV(add_rows)(const int rows, const int at_once, const float *weights, int64_t width, const float *keep,
                            const KV *const *values, int64_t size, int64_t tokens, int64_t dim, float *out) {
    int64_t from = 0;
    for (; from + at_once * LANES <= dim; from += at_once * LANES)
        OF_KV(add_columns)(rows, at_once, weights, width, keep, values, size, tokens, dim, from, out);
    for (; from + LANES <= dim; from += LANES)
        OF_KV(add_columns)(rows, 1, weights, width, keep, values, size, tokens, dim, from, out);
    for (; from < dim; from++)  /* what is left of an odd head_dim */
        for (int r = 0; r < rows; r++) {
            float sum = keep[r] * out[r * dim + from];
            for (int64_t b = 0, t = 0; t < tokens; b++) {
                const KV *value = values[b] + from;
                for (int64_t end = min_int(t + size, tokens); t < end; t++, value += dim)
                    sum = FMA(weights[r * width + t], FROM_KV(*value), sum);
            }
            out[r * dim + from] = sum;
        }
}

/* ---- one tile of rows against the key tile that starts at `start`; `blocks` are the key tile's ---- */

static void OF_KV(tile_against_segment)(const Item *item, int64_t group, int64_t start, const KV *const *blocks, int64_t tile,
                                        int64_t rows, const float *q, float *out, float *maxima, float *totals,
                                        float *scores) {
    const Shape *shape = item->layer->shape;
    int64_t size = shape->block_size, dim = shape->head_dim, width = item->width;
    int64_t end = position_of(item, group, tile + rows - 1) + 1;
    if (start >= end || start + item->key_tile <= first_seen(item, position_of(item, group, tile))) return;
    int64_t tokens = min_int(item->key_tile, end - start);
    int64_t count = (tokens + size - 1) / size, filled;
    float keep[ROWS_AT_ONCE];
    const KV *values[count];
    for (int64_t b = 0; b < count; b++) values[b] = blocks[b] + shape->values_at + item->head * size * dim;
    if (size % LANES) {
        OF_KV(score_odd)(rows, q, dim, blocks, count, size, item->head, scores, width);
        filled = round_up(count * size, LANES);
    } else {
        int64_t columns = (tokens + LANES - 1) / LANES;
        const KV *keys[columns];
        for (int64_t c = 0; c < columns; c++)
            keys[c] = blocks[c * LANES / size] + item->head * dim * size + c * LANES % size;
        filled = columns * LANES;
#define CASE(n) case n: OF_KV(score_rows)(n, COLUMNS(n), q, dim, keys, columns, size, scores, width); break;
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = position_of(item, group, tile + r);
        int64_t low = min_int(max_int(first_seen(item, position) - start, 0), tokens);
        int64_t high = min_int(max_int(position + 1 - start, 0), tokens);
        keep[r] = softmax(scores + r * width, filled, low, high, maxima + r, totals + r * LANES);
    }
#define CASE(n) case n: OF_KV(add_rows)(n, COLUMNS(n), scores, width, keep, values, size, tokens, dim, out); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static void OF_KV(attend)(const Item *item) {
    const AttentionArgs *layer = item->layer;
    const Shape *shape = layer->shape;
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads, rows = item->rows;
    float q[rows * dim], out[rows * dim], maxima[rows], totals[rows * LANES], scores[ROWS_AT_ONCE * item->width];
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        const float *from = layer->qkv + token * layer->qkv_stride + head * dim;
        for (int64_t d = 0; d < dim; d++) q[r * dim + d] = from[d] * shape->scale, out[r * dim + d] = 0.0f;
        maxima[r] = LOWEST, store(totals + r * LANES, broadcast(0.0f));
    }
    int64_t end = position_of(item, group, rows - 1) + 1;
    int64_t begin = first_seen(item, position_of(item, group, 0)) / item->key_tile * item->key_tile;
    const KV *blocks[item->key_tile / shape->block_size];
    for (int64_t start = begin; start < end; start += item->key_tile) {
        int64_t here = min_int(item->key_tile, end - start);
        for (int64_t b = 0; b * shape->block_size < here; b++)
            blocks[b] = (const KV *)layer->pool + item->table[start / shape->block_size + b] * shape->block_stride;
        for (int64_t tile = 0; tile < rows; tile += ROWS_AT_ONCE)
            OF_KV(tile_against_segment)(item, group, start, blocks, tile, min_int(ROWS_AT_ONCE, rows - tile), q + tile * dim,
                                        out + tile * dim, maxima + tile, totals + tile * LANES, scores);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float *to = layer->out + (token * shape->heads + head) * dim;
        float total = sum_of_lanes(load(totals + r * LANES));
        if (layer->sinks) store_beside_sink(layer->sinks[head], maxima[r], total, out + r * dim, dim, to);
        else for (int64_t d = 0; d < dim; d++) to[d] = out[r * dim + d] / total;
    }
}
