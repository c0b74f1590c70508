/* Attention for keys and values of 8 bits: the portable kernel for few rows, and the way through all segments of an item.
 *
 *   attention_int8_softmax.h   layouts, types, and what scores become
 *   attention_int8_neon.h      the products on ARM
 *   attention_int8_amx.h       the products of many rows on Intel's tiles
 */
#pragma once

#include "attention_int8_softmax.h"
#if defined(__aarch64__)
#include "attention_int8_neon.h"
#endif

/* ---- few rows: vectors ---- */

#if !defined(__aarch64__)

/* Column `column` of 16 numbers of four bytes: once for each line. */
ALWAYS void fetch(const int8_t *from, int64_t column) {
    if (LANES != 8 && column % (16 / LANES) == 0) __builtin_prefetch(from, 0, 2);  /* with AVX2 nobody has timed it */
}

ALWAYS void byte_scores(const int rows, const int columns, const ByteRows *x, int64_t first, const int8_t *const *keys,
                        const int8_t *const *next, const float *const *scales, ScoreRow *scores, int64_t at) {
    ints sum[BYTES_ROWS][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = spread_int(-WEIGHT8_OFFSET * x->sums[first + r]);
    const int8_t *from = x->queries + first * x->dim;
#pragma GCC unroll 4
    for (int64_t d = 0; d < x->dim; d += 4) {
        bytes key[COLUMNS_MAX];
        for (int c = 0; c < columns; c++) {
            key[c] = as_weights(load_bytes((const uint8_t *)keys[c] + d * BYTES_BLOCK));
            fetch(next[c] + d * BYTES_BLOCK, at / LANES + c);
        }
        for (int r = 0; r < rows; r++) {
            bytes four = spread_word(from + r * x->dim + d);
            for (int c = 0; c < columns; c++) sum[r][c] = dot_full(sum[r][c], key[c], four);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(scores[r].scores + at + c * LANES, as_floats(sum[r][c]) * load(scales[c]));
}

ALWAYS void byte_outputs(const int rows, const int columns, const ByteRows *x, int64_t first, const ByteSegment *segment,
                         const ByteWeights *weights, int64_t from) {
    ints high[BYTES_ROWS][COLUMNS_MAX], low[BYTES_ROWS][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) high[r][c] = low[r][c] = spread_int(0);
    for (int64_t b = 0; b < segment->count; b++)
        for (int64_t t = 0; t < BYTES_BLOCK; t += 4) {
            int64_t at = t * x->dim + from * 4;
            bytes value[COLUMNS_MAX];
            for (int c = 0; c < columns; c++) {
                value[c] = load_bytes((const uint8_t *)segment->values[b].numbers + at + c * LANES * 4);
                fetch(segment->next_values[b] + at + c * LANES * 4, from / LANES + c);
            }
            for (int r = 0; r < rows; r++) {
                bytes h = spread_word(&weights->high[r][b * BYTES_BLOCK + t]), l = spread_word(&weights->low[r][b * BYTES_BLOCK + t]);
                for (int c = 0; c < columns; c++)
                    high[r][c] = dot_small(high[r][c], h, value[c]), low[r][c] = dot_small(low[r][c], l, value[c]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *to = x->part.out + (first + r) * x->dim + from + c * LANES;
            floats sum = of_digits(as_floats(high[r][c]), as_floats(low[r][c]));
            store(to, fused(sum, spread(weights->units[r]), load(to) * spread(weights->keep[r])));
        }
}

ALWAYS void few_against_segment(const int rows, const Item *item, const ByteRows *x, int64_t first, const ByteSegment *segment) {
    const int at_once = BYTES_COLUMNS(rows), to_a_block = BYTES_BLOCK / LANES;
    _Alignas(64) ScoreRow scores[BYTES_ROWS];
    ByteWeights weights;
    const int8_t *keys[BYTES_SEGMENT / LANES], *next[BYTES_SEGMENT / LANES];
    const float *scales[BYTES_SEGMENT / LANES];
    int64_t columns = segment->count * to_a_block, c = 0, from = 0;
    for (int64_t i = 0; i < columns; i++) {
        keys[i] = segment->keys[i / to_a_block].numbers + i % to_a_block * LANES * 4;
        next[i] = segment->next_keys[i / to_a_block];
        scales[i] = segment->keys[i / to_a_block].scales + i % to_a_block * LANES;
    }
    for (; c + at_once <= columns; c += at_once) byte_scores(rows, at_once, x, first, keys + c, next + c, scales + c, scores, c * LANES);
    for (; c < columns; c++) byte_scores(rows, 1, x, first, keys + c, next + c, scales + c, scores, c * LANES);
    soften_few(item, x, first, rows, segment, segment->count, scores, &weights);
    for (; from < x->dim; from += at_once * LANES) byte_outputs(rows, at_once, x, first, segment, &weights, from);
}

#endif

static void rows_against_segment(const Item *item, const ByteRows *x, const ByteSegment *segment) {
    for (int64_t first = 0; first < x->rows; first += BYTES_ROWS) switch (smaller(BYTES_ROWS, x->rows - first)) {
        case 1: few_against_segment(1, item, x, first, segment); break;
        case 2: few_against_segment(2, item, x, first, segment); break;
        case 3: few_against_segment(3, item, x, first, segment); break;
        case 4: few_against_segment(4, item, x, first, segment); break;
    }
}

#include "attention_int8_amx.h"

/* ---- all segments of an item ---- */

ALWAYS int64_t item_end(const Item *item) {
    return position_of(item, item->layer->shape->heads / item->layer->shape->kv_heads, item->rows - 1) + 1;
}

ALWAYS int64_t first_segment(const Item *item) {
    int64_t group = item->layer->shape->heads / item->layer->shape->kv_heads;
    return first_seen(item, position_of(item, group, 0)) / BYTES_SEGMENT * BYTES_SEGMENT;
}

/* The blocks of the segment at `start`: how many. */
static int64_t blocks_at(const Item *item, int64_t start, ByteBlock *keys, ByteBlock *values) {
    int64_t count = (smaller(BYTES_SEGMENT, item_end(item) - start) + BYTES_BLOCK - 1) / BYTES_BLOCK;
    for (int64_t b = 0; b < count; b++) {
        int64_t number = item->table[start / BYTES_BLOCK + b];
        keys[b] = byte_block(item->layer, number, item->head, 0);
        values[b] = byte_block(item->layer, number, item->head, item->layer->shape->values_at);
    }
    return count;
}

/* `end`: where this member stops, and goes on with `next` or nothing. */
static void enter_segment(const Item *item, const Item *next, int64_t start, int64_t end, ByteSegment *segment) {
    ByteBlock keys[BYTES_BLOCKS], values[BYTES_BLOCKS];
    segment->start = start, segment->count = blocks_at(item, start, segment->keys, segment->values);
    for (int64_t b = 0; b < segment->count; b++)
        for (int64_t i = 0; i < BYTES_BLOCK; i += LANES) {
            store(segment->key_scales + b * BYTES_BLOCK + i, load(segment->keys[b].scales + i));
            store(segment->value_scales + b * BYTES_BLOCK + i, load(segment->values[b].scales + i));
        }
    segment->unit = of_scales(segment->value_scales, segment->count * BYTES_BLOCK, segment->shares);
    int64_t ahead = 0;
    if (start + BYTES_SEGMENT < end) ahead = blocks_at(item, start + BYTES_SEGMENT, keys, values);
    else if (next) ahead = blocks_at(next, first_segment(next), keys, values);
    for (int64_t b = 0; b < segment->count; b++) {
        segment->next_keys[b] = b < ahead ? keys[b].numbers : segment->keys[b].numbers;
        segment->next_values[b] = b < ahead ? values[b].numbers : segment->values[b].numbers;
    }
}

/* The rows of an item, with their queries in `queries`. */
static void read_rows(const Item *item, int8_t *queries, ByteRows *x) {
    const Layer *layer = item->layer;
    int64_t dim = layer->shape->head_dim, group = layer->shape->heads / layer->shape->kv_heads;
    x->dim = dim, x->rows = item->rows, x->queries = queries;
    for (int64_t r = 0; r < x->rows; r++) {
        x->positions[r] = position_of(item, group, r);
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float mixed[dim];
        mix_head(mixed, layer->qkv + token * layer->qkv_stride + head * dim, dim);
        float largest = largest_of(mixed, dim), inverse = inverse_of(largest, BYTE_MOST);
        x->sums[r] = bytes_of(mixed, dim, inverse, queries + r * dim);
        if (largest <= SCALED_LEAST) largest = 1.0f;  /* all zeros: any scale will do but zero, by which hidden scores become NaN */
        x->scales[r] = largest / BYTE_MOST * (layer->shape->scale * LOG2_E / (float)stretch(dim));
    }
}

/* Segments [start, end), into x->part. */
static void attend_span(const Item *item, const Item *next, const ByteRows *x, int64_t start, int64_t end, int64_t stop) {
    int64_t dim = x->dim;
#if HAS_TILES
    _Alignas(64) int8_t values[BYTES_SEGMENT * dim];
    memset(values, 0, x->rows >= BYTES_TILES_FROM ? sizeof values : 0);
#endif
    memset(x->part.out, 0, (size_t)(x->rows * dim) * 4), memset(x->part.totals, 0, (size_t)(x->rows * LANES) * 4);
    for (int64_t r = 0; r < x->rows; r++) x->part.maxima[r] = LOWEST;
    ByteSegment segment;
    for (; start < end; start += BYTES_SEGMENT) {
        enter_segment(item, next, start, stop, &segment);
#if HAS_TILES
        if (x->rows >= BYTES_TILES_FROM) {
            for (int64_t b = 0; b < segment.count; b++)
                for (int64_t i = 0; i < BYTES_BLOCK * dim; i += 64)
                    _mm512_store_si512(values + b * BYTES_BLOCK * dim + i, _mm512_loadu_si512(segment.values[b].numbers + i));
            tiles_against_segment(item, x, &segment, values);
            continue;
        }
#endif
        rows_against_segment(item, x, &segment);
    }
}

/* The part of the span after those that `sum` has. */
static void join(const ByteRows *x, const Part *sum, const Part *part) {
    for (int64_t r = 0; r < x->rows; r++) {
        float a = sum->maxima[r], b = part->maxima[r], changes[LANES];
        store(changes, exp2_lanes(spread((a > b ? b - a : a - b) * x->scales[r])));
        floats keep = spread(a > b ? 1.0f : changes[0]), share = spread(a > b ? changes[0] : 1.0f);
        sum->maxima[r] = a > b ? a : b;
        float *totals = sum->totals + r * LANES;
        store(totals, fused(load(part->totals + r * LANES), share, load(totals) * keep));
        for (int64_t d = r * x->dim; d < (r + 1) * x->dim; d += LANES)
            store(sum->out + d, fused(load(part->out + d), share, load(sum->out + d) * keep));
    }
}

static void give_answers(const Item *item, const Part *sum) {
    const Layer *layer = item->layer;
    int64_t dim = layer->shape->head_dim, group = layer->shape->heads / layer->shape->kv_heads;
    for (int64_t r = 0; r < item->rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float *to = layer->out + (token * layer->shape->heads + head) * dim, inverse = 1.0f / sum_of_lanes(load(sum->totals + r * LANES));
        for (int64_t d = 0; d < dim; d++) to[d] = sum->out[r * dim + d] * inverse;
    }
}

/* A whole item. `next`: what is worked on after this, or NULL. */
static void attend_bytes(const Item *item, const Item *next) {
    int64_t dim = item->layer->shape->head_dim;
    int8_t queries[ITEM_ROWS * dim];
    _Alignas(64) float first_part[PART_FLOATS(item->rows, dim)], other_part[PART_FLOATS(item->rows, dim)];
    Part sum = part_in(first_part, item->rows, dim), part = part_in(other_part, item->rows, dim);
    ByteRows x;
    read_rows(item, queries, &x);
    int64_t first = first_segment(item), end = item_end(item);
    for (int64_t start = first, stop; start < end; start = stop) {
        stop = smaller((start / BYTES_SPAN + 1) * BYTES_SPAN, end);
        x.part = start == first ? sum : part;
        attend_span(item, next, &x, start, stop, end);
        if (start != first) join(&x, &sum, &part);
    }
    give_answers(item, &sum);
}

/* ---- a span by itself ---- */

ALWAYS Part part_of_span(const Layer *layer, int64_t number, int64_t span) {
    int64_t dim = layer->shape->head_dim, each = PART_FLOATS(SPLIT_ROWS, dim);  /* of 16 rows: whole lines */
    return part_in(layer->parts + (number * layer->spans + span) * each, SPLIT_ROWS, dim);
}

/* Span `span` of those that item `number` sees, if it sees so many. */
static void attend_one_span(const Layer *layer, const Item *item, int64_t number, int64_t span) {
    int64_t first = first_segment(item), end = item_end(item);
    int64_t start = span ? (first / BYTES_SPAN + span) * BYTES_SPAN : first, stop = smaller((start / BYTES_SPAN + 1) * BYTES_SPAN, end);
    if (start >= end) return;
    int8_t queries[ITEM_ROWS * layer->shape->head_dim];
    ByteRows x;
    read_rows(item, queries, &x);
    x.part = part_of_span(layer, number, span);
    attend_span(item, NULL, &x, start, stop, stop);
}

static void join_spans(const Layer *layer, const Item *item, int64_t number) {
    int8_t queries[ITEM_ROWS * layer->shape->head_dim];
    ByteRows x;
    read_rows(item, queries, &x);  /* for its scales */
    Part sum = part_of_span(layer, number, 0);
    int64_t spans = (item_end(item) - 1) / BYTES_SPAN - first_segment(item) / BYTES_SPAN + 1;
    for (int64_t span = 1; span < spans; span++) {
        Part part = part_of_span(layer, number, span);
        join(&x, &sum, &part);
    }
    give_answers(item, &sum);
}
