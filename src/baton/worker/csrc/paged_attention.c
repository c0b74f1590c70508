/* Paged attention over a flat batch, float32. Reads the KV blocks in place, through the block table.
 *
 * One call is one layer of one step: first every new token's key and value go to their place in the pool, then, behind a
 * barrier, every new token looks at its own sequence up to itself. A chunk of a prompt and a single decoded token are the
 * same thing here, of different length.
 *
 * A block of one layer (see worker/kv_pool.py), for each kv head:
 *
 *   keys     [head_dim][block_size]    turned: the scores of neighbouring tokens lie in one vector, no sum across lanes
 *   values   [block_size][head_dim]    as they come: the output of one token lies in one vector
 *
 * A *row* is one (token, query head). The rows that share a kv head are handled together, TILE at a time, so that a key
 * that was loaded serves all of them: the heads of a group when decoding, several tokens as well in a prompt.
 *
 * The answer of a row does not depend on what else is in the batch, on the chunk it came in, or on the number of threads:
 * keys are taken in segments that start at fixed positions; within one, each score is one chain of products over head_dim,
 * each output one chain over tokens, and sums over tokens go through lanes of fixed meaning. What another row of the tile
 * needs and this one may not see has weight zero, and adding zero times something finite changes nothing.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define TILE 6         /* rows whose running sums stay in registers; the switches below have a case for each number */
#define ITEM 48        /* rows of a work item: one segment of keys and values stays in the first cache for all of them */
#define SEGMENT 64     /* keys between two rescalings, rounded to whole blocks */
#define COLUMNS_MAX 4  /* vectors of keys, or of head_dim, that are worked on at once */

/* As many running sums as there are registers for: each is a chain, and only many chains keep the adders busy. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define COLUMNS(rows) 4
#else
#define COLUMNS(rows) ((rows) <= 3 ? 4 : 2)
#endif

#define LOWEST -1e30f  /* the maximum of nothing; finite, so that no inf - inf appears */

#define ALWAYS static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* a * b + c, rounded once where the processor can. Said outright, and -ffp-contract=off: left to itself the compiler fuses
 * in one copy of a loop and not in the next, and a row's bits would depend on the tile that it was in. */
#if defined(__AVX512F__)
ALWAYS lanes fused(lanes a, lanes b, lanes c) { return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX__) && defined(__FMA__)
ALWAYS lanes fused(lanes a, lanes b, lanes c) { return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#elif defined(__aarch64__)
ALWAYS lanes fused(lanes a, lanes b, lanes c) { return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
ALWAYS lanes fused(lanes a, lanes b, lanes c) { return a * b + c; }
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif
#define SPREAD(x) ((x) - (lanes){0})  /* minus zero is nothing at all, plus zero would be an addition */

typedef struct {
    int64_t sequences, heads, kv_heads, head_dim, block_size;
    int64_t block_stride;        /* floats from one block of this layer to the next */
    int64_t values_at;           /* floats from a block's keys to its values */
    int64_t table_stride;        /* entries from one slot's table to the next */
    const int32_t *tables;       /* [slots][table_stride] block numbers */
    const int64_t *slots;        /* [sequences] whose table */
    const int64_t *starts;       /* [sequences + 1] first row of each sequence in the flat batch */
    const int64_t *contexts;     /* [sequences] tokens that were in the pool before this step */
    const int64_t *item_starts;  /* [sequences + 1] first work item of each sequence */
} Step;

typedef struct {
    const float *data;
    int64_t token_stride, head_stride;
} Heads;

typedef struct {
    const Step *step;
    float *pool;  /* this layer of block 0 */
    Heads q, k, v;
    float *out;   /* [tokens][heads][head_dim] */
    int64_t window;  /* 0: none */
    float scale;
    int64_t next_item;
} Layer;

int64_t baton_rows_per_item(void) { return ITEM; }

ALWAYS int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Which of `count` runs holds `index`; run i is [starts[i], starts[i + 1]). */
static int64_t run_of(const int64_t *starts, int64_t count, int64_t index) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (starts[middle] <= index) low = middle; else high = middle;
    }
    return low;
}

/* e^x for x <= 0; exactly 0 far below, so that a masked key leaves no trace. Two units in the last place. */
ALWAYS float exp_negative(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float n = (y * 1.44269504089f + 12582912.0f) - 12582912.0f;
    float r = FUSED(n, -0.693359375f, y);
    r = FUSED(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = FUSED(p, r, 1.3981999507e-3f);
    p = FUSED(p, r, 8.3334519073e-3f);
    p = FUSED(p, r, 4.1665795894e-2f);
    p = FUSED(p, r, 1.6666665459e-1f);
    p = FUSED(p, r, 5.0000001201e-1f);
    p = FUSED(p, r * r, r) + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.f;
}

/* ---- storing ---- */

static void store_tokens(const Layer *layer, int64_t begin, int64_t end) {
    const Step *s = layer->step;
    int64_t size = s->block_size, dim = s->head_dim;
    if (begin >= end) return;
    int64_t sequence = run_of(s->starts, s->sequences, begin);
    for (int64_t token = begin; token < end; token++) {
        while (token >= s->starts[sequence + 1]) sequence++;
        int64_t position = s->contexts[sequence] + token - s->starts[sequence];
        int64_t number = s->tables[s->slots[sequence] * s->table_stride + position / size];
        int64_t place = position % size;
        float *block = layer->pool + number * s->block_stride;
        for (int64_t head = 0; head < s->kv_heads; head++) {
            const float *k = layer->k.data + token * layer->k.token_stride + head * layer->k.head_stride;
            const float *v = layer->v.data + token * layer->v.token_stride + head * layer->v.head_stride;
            float *keys = block + head * dim * size + place;
            for (int64_t d = 0; d < dim; d++) keys[d * size] = k[d];
            memcpy(block + s->values_at + (head * size + place) * dim, v, (size_t)dim * sizeof(float));
        }
    }
}

/* ---- scores: q . k for `rows` rows and `columns` vectors of keys ---- */

ALWAYS void score_columns(const int rows, const int columns, const float *q, int64_t dim, const float *const *keys,
                          int64_t size, float *scores, int64_t width) {
    lanes sum[TILE][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = (lanes){0};
    for (int64_t d = 0; d < dim; d++)
        for (int c = 0; c < columns; c++) {
            lanes key = *(const lanes *)(keys[c] + d * size);
            for (int r = 0; r < rows; r++) sum[r][c] = fused(SPREAD(q[r * dim + d]), key, sum[r][c]);
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(lanes *)(scores + r * width + c * LANES) = sum[r][c];
}

ALWAYS void score_rows(const int rows, const int at_once, const float *q, int64_t dim, const float *const *keys,
                       int64_t columns, int64_t size, float *scores, int64_t width) {
    int64_t c = 0;
    for (; c + at_once <= columns; c += at_once)
        score_columns(rows, at_once, q, dim, keys + c, size, scores + c * LANES, width);
    for (; c < columns; c++) score_columns(rows, 1, q, dim, keys + c, size, scores + c * LANES, width);
}

/* Blocks that are not whole vectors: the same sums, key by key. */
static void score_odd(int64_t rows, const float *q, int64_t dim, float *const *blocks, int64_t count, int64_t size,
                      int64_t head, float *scores, int64_t width) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < count; b++) {
            float *row = scores + r * width + b * size;
            const float *keys = blocks[b] + head * dim * size;
            for (int64_t t = 0; t < size; t++) row[t] = 0.0f;
            for (int64_t d = 0; d < dim; d++)
                for (int64_t t = 0; t < size; t++) row[t] = FUSED(q[r * dim + d], keys[d * size + t], row[t]);
        }
}

/* ---- softmax of one row over one segment: scores become weights; returns what the sums so far must be multiplied by ---- */

static float soften(float *restrict scores, int64_t width, int64_t low, int64_t high, float *maximum, float *total) {
    float best[LANES], sum[LANES];
    for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int64_t t = high; t < width; t++) scores[t] = -INFINITY;
    for (int j = 0; j < LANES; j++) best[j] = *maximum, sum[j] = 0.0f;
    for (int64_t t = 0; t < width; t += LANES)
        for (int j = 0; j < LANES; j++) best[j] = scores[t + j] > best[j] ? scores[t + j] : best[j];
    float top = best[0];
    for (int j = 1; j < LANES; j++) top = best[j] > top ? best[j] : top;
    for (int64_t t = 0; t < width; t += LANES)
        for (int j = 0; j < LANES; j++) {
            float weight = exp_negative(scores[t + j] - top);
            scores[t + j] = weight;
            sum[j] += weight;
        }
    float keep = exp_negative(*maximum - top), added = sum[0];
    for (int j = 1; j < LANES; j++) added += sum[j];
    *total = *total * keep + added;
    *maximum = top;
    return keep;
}

/* ---- weights times values ---- */

ALWAYS void add_columns(const int rows, const int columns, const float *weights, int64_t width, const float *keep,
                        float *const *values, int64_t size, int64_t tokens, int64_t dim, int64_t from, float *out) {
    lanes sum[TILE][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = keep[r] * *(const lanes *)(out + r * dim + from + c * LANES);
    for (int64_t b = 0, t = 0; t < tokens; b++) {
        const float *value = values[b] + from;
        for (int64_t end = smaller(t + size, tokens); t < end; t++, value += dim)
            for (int c = 0; c < columns; c++) {
                lanes v = *(const lanes *)(value + c * LANES);
                for (int r = 0; r < rows; r++) sum[r][c] = fused(SPREAD(weights[r * width + t]), v, sum[r][c]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(lanes *)(out + r * dim + from + c * LANES) = sum[r][c];
}

ALWAYS void add_rows(const int rows, const int at_once, const float *weights, int64_t width, const float *keep,
                     float *const *values, int64_t size, int64_t tokens, int64_t dim, float *out) {
    int64_t from = 0;
    for (; from + at_once * LANES <= dim; from += at_once * LANES)
        add_columns(rows, at_once, weights, width, keep, values, size, tokens, dim, from, out);
    for (; from + LANES <= dim; from += LANES)
        add_columns(rows, 1, weights, width, keep, values, size, tokens, dim, from, out);
    for (; from < dim; from++)  /* what is left of an odd head_dim */
        for (int r = 0; r < rows; r++) {
            float sum = keep[r] * out[r * dim + from];
            for (int64_t b = 0, t = 0; t < tokens; b++) {
                const float *value = values[b] + from;
                for (int64_t end = smaller(t + size, tokens); t < end; t++, value += dim)
                    sum = FUSED(weights[r * width + t], *value, sum);
            }
            out[r * dim + from] = sum;
        }
}

/* ---- one work item: up to ITEM rows of one sequence and one kv head ---- */

typedef struct {
    const Layer *layer;
    const int32_t *table;
    int64_t head;          /* kv head */
    int64_t context;       /* position of the sequence's first token of this step */
    int64_t first_token;   /* its row in the flat batch */
    int64_t first, rows;   /* rows of the item, counted within (sequence, kv head) */
    int64_t segment, width;
} Item;

ALWAYS int64_t position_of(const Item *item, int64_t group, int64_t row) {
    return item->context + (item->first + row) / group;
}

ALWAYS int64_t first_seen(const Item *item, int64_t position) {
    int64_t window = item->layer->window;
    return window ? larger(0, position - window + 1) : 0;
}

/* One tile of rows against the segment that starts at `start`. `blocks` are the segment's. */
static void tile_against_segment(const Item *item, int64_t group, int64_t start, float *const *blocks, int64_t tile,
                                 int64_t rows, const float *q, float *out, float *maxima, float *totals, float *scores) {
    const Step *s = item->layer->step;
    int64_t size = s->block_size, dim = s->head_dim, width = item->width;
    int64_t end = position_of(item, group, tile + rows - 1) + 1;
    if (start >= end || start + item->segment <= first_seen(item, position_of(item, group, tile))) return;
    int64_t tokens = smaller(item->segment, end - start);
    int64_t count = (tokens + size - 1) / size, filled;
    float keep[TILE];
    float *values[count];
    for (int64_t b = 0; b < count; b++) values[b] = blocks[b] + s->values_at + item->head * size * dim;
    if (size % LANES) {
        score_odd(rows, q, dim, blocks, count, size, item->head, scores, width);
        filled = (count * size + LANES - 1) / LANES * LANES;
    } else {
        int64_t columns = (tokens + LANES - 1) / LANES;
        const float *keys[columns];
        for (int64_t c = 0; c < columns; c++)
            keys[c] = blocks[c * LANES / size] + item->head * dim * size + c * LANES % size;
        filled = columns * LANES;
#define CASE(n) case n: score_rows(n, COLUMNS(n), q, dim, keys, columns, size, scores, width); break;
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = position_of(item, group, tile + r);
        int64_t low = smaller(larger(first_seen(item, position) - start, 0), tokens);
        int64_t high = smaller(larger(position + 1 - start, 0), tokens);
        keep[r] = soften(scores + r * width, filled, low, high, maxima + r, totals + r);
    }
#define CASE(n) case n: add_rows(n, COLUMNS(n), scores, width, keep, values, size, tokens, dim, out); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static void attend(const Item *item) {
    const Layer *layer = item->layer;
    const Step *s = layer->step;
    int64_t dim = s->head_dim, group = s->heads / s->kv_heads, rows = item->rows;
    float q[rows * dim], out[rows * dim], maxima[rows], totals[rows], scores[TILE * item->width];
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        const float *from = layer->q.data + token * layer->q.token_stride + head * layer->q.head_stride;
        for (int64_t d = 0; d < dim; d++) q[r * dim + d] = from[d] * layer->scale, out[r * dim + d] = 0.0f;
        maxima[r] = LOWEST, totals[r] = 0.0f;
    }
    int64_t end = position_of(item, group, rows - 1) + 1;
    int64_t begin = first_seen(item, position_of(item, group, 0)) / item->segment * item->segment;
    float *blocks[item->segment / s->block_size];
    for (int64_t start = begin; start < end; start += item->segment) {
        int64_t here = smaller(item->segment, end - start);
        for (int64_t b = 0; b * s->block_size < here; b++)
            blocks[b] = layer->pool + item->table[start / s->block_size + b] * s->block_stride;
        for (int64_t tile = 0; tile < rows; tile += TILE)
            tile_against_segment(item, group, start, blocks, tile, smaller(TILE, rows - tile), q + tile * dim,
                                 out + tile * dim, maxima + tile, totals + tile, scores);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float *to = layer->out + (token * s->heads + head) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = out[r * dim + d] / totals[r];
    }
}

static void take_items(Layer *layer) {
    const Step *s = layer->step;
    int64_t all = s->item_starts[s->sequences], group = s->heads / s->kv_heads;
    int64_t segment = s->block_size * larger(1, SEGMENT / s->block_size);
    for (;;) {
        /* From the last to the first: the end of a long prompt sees most keys and should not be begun last. */
        int64_t number = all - 1 - __atomic_fetch_add(&layer->next_item, 1, __ATOMIC_RELAXED);
        if (number < 0) return;
        int64_t sequence = run_of(s->item_starts, s->sequences, number);
        int64_t within = number - s->item_starts[sequence];
        int64_t tokens = s->starts[sequence + 1] - s->starts[sequence];
        int64_t first = within / s->kv_heads * ITEM;
        Item item = {
            .layer = layer,
            .table = s->tables + s->slots[sequence] * s->table_stride,
            .head = within % s->kv_heads,
            .context = s->contexts[sequence],
            .first_token = s->starts[sequence],
            .first = first,
            .rows = smaller(ITEM, tokens * group - first),
            .segment = segment,
            .width = (segment + LANES - 1) / LANES * LANES,
        };
        attend(&item);
    }
}

void baton_paged_attention(const Step *step, float *pool, const float *q, int64_t q_token, int64_t q_head, const float *k,
                           int64_t k_token, int64_t k_head, const float *v, int64_t v_token, int64_t v_head, float *out,
                           int64_t window, float scale, int64_t threads) {
    Layer layer = {step, pool, {q, q_token, q_head}, {k, k_token, k_head}, {v, v_token, v_head}, out, window, scale, 0};
    int64_t tokens = step->starts[step->sequences];
#ifdef _OPENMP
    if (threads > 1) {
        /* Only GOMP_parallel and a barrier are used: every OpenMP runtime that torch may bring has them. */
#pragma omp parallel num_threads(threads)
        {
            int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
            store_tokens(&layer, tokens * me / team, tokens * (me + 1) / team);
#pragma omp barrier
            take_items(&layer);
        }
        return;
    }
#endif
    (void)threads;
    store_tokens(&layer, 0, tokens);
    take_items(&layer);
}
