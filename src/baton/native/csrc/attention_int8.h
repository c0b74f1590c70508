/* Attention for keys and values of 8 bits: the portable kernel for few rows, and the way through all key tiles of an item.
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
    if (LANES != 8 && column % (16 / LANES) == 0) __builtin_prefetch(from, 0, 2);  /* not measured with AVX2 */
}

ALWAYS void int8_scores(const int rows, const int columns, const Int8Rows *x, int64_t first, const int8_t *const *keys,
                        const int8_t *const *next, const float *const *scales, ScoreRow *scores, int64_t at) {
    i32v sum[INT8_ROWS][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = broadcast_int(-WEIGHT8_OFFSET * x->sums[first + r]);
    const int8_t *from = x->queries + first * x->dim;
#pragma GCC unroll 4
    for (int64_t d = 0; d < x->dim; d += 4) {
        i8v key[COLUMNS_MAX];
        for (int c = 0; c < columns; c++) {
            key[c] = as_weights(load_bytes((const uint8_t *)keys[c] + d * INT8_BLOCK));
            fetch(next[c] + d * INT8_BLOCK, at / LANES + c);
        }
        for (int r = 0; r < rows; r++) {
            i8v four = broadcast_word(from + r * x->dim + d);
            for (int c = 0; c < columns; c++) sum[r][c] = dot_full(sum[r][c], key[c], four);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) store(scores[r].scores + at + c * LANES, as_floats(sum[r][c]) * load(scales[c]));
}

ALWAYS void int8_outputs(const int rows, const int columns, const Int8Rows *x, int64_t first, const KeyTile *key_tile,
                         const Int8Weights *weights, int64_t from) {
    i32v high[INT8_ROWS][COLUMNS_MAX], low[INT8_ROWS][COLUMNS_MAX];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) high[r][c] = low[r][c] = broadcast_int(0);
    for (int64_t b = 0; b < key_tile->count; b++)
        for (int64_t t = 0; t < INT8_BLOCK; t += 4) {
            int64_t at = t * x->dim + from * 4;
            i8v value[COLUMNS_MAX];
            for (int c = 0; c < columns; c++) {
                value[c] = load_bytes((const uint8_t *)key_tile->values[b].numbers + at + c * LANES * 4);
                fetch(key_tile->next_values[b] + at + c * LANES * 4, from / LANES + c);
            }
            for (int r = 0; r < rows; r++) {
                i8v h = broadcast_word(&weights->high[r][b * INT8_BLOCK + t]), l = broadcast_word(&weights->low[r][b * INT8_BLOCK + t]);
                for (int c = 0; c < columns; c++)
                    high[r][c] = dot_small(high[r][c], h, value[c]), low[r][c] = dot_small(low[r][c], l, value[c]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float *to = x->part.out + (first + r) * x->dim + from + c * LANES;
            f32v sum = of_digits(as_floats(high[r][c]), as_floats(low[r][c]));
            store(to, fma_lanes(sum, broadcast(weights->units[r]), load(to) * broadcast(weights->keep[r])));
        }
}

ALWAYS void few_against_key_tile(const int rows, const Item *item, const Int8Rows *x, int64_t first, const KeyTile *key_tile) {
    const int at_once = INT8_COLUMNS(rows), to_a_block = INT8_BLOCK / LANES;
    _Alignas(64) ScoreRow scores[INT8_ROWS];
    Int8Weights weights;
    const int8_t *keys[INT8_KEY_TILE / LANES], *next[INT8_KEY_TILE / LANES];
    const float *scales[INT8_KEY_TILE / LANES];
    int64_t columns = key_tile->count * to_a_block, c = 0, from = 0;
    for (int64_t i = 0; i < columns; i++) {
        keys[i] = key_tile->keys[i / to_a_block].numbers + i % to_a_block * LANES * 4;
        next[i] = key_tile->next_keys[i / to_a_block];
        scales[i] = key_tile->keys[i / to_a_block].scales + i % to_a_block * LANES;
    }
    for (; c + at_once <= columns; c += at_once) int8_scores(rows, at_once, x, first, keys + c, next + c, scales + c, scores, c * LANES);
    for (; c < columns; c++) int8_scores(rows, 1, x, first, keys + c, next + c, scales + c, scores, c * LANES);
    softmax_few(item, x, first, rows, key_tile, key_tile->count, scores, &weights);
    for (; from < x->dim; from += at_once * LANES) int8_outputs(rows, at_once, x, first, key_tile, &weights, from);
}

#endif

static void rows_against_key_tile(const Item *item, const Int8Rows *x, const KeyTile *key_tile) {
    for (int64_t first = 0; first < x->rows; first += INT8_ROWS) switch (min_int(INT8_ROWS, x->rows - first)) {
        case 1: few_against_key_tile(1, item, x, first, key_tile); break;
        case 2: few_against_key_tile(2, item, x, first, key_tile); break;
        case 3: few_against_key_tile(3, item, x, first, key_tile); break;
        case 4: few_against_key_tile(4, item, x, first, key_tile); break;
    }
}

#include "attention_int8_amx.h"

/* ---- all key tiles of an item ---- */

ALWAYS int64_t item_end(const Item *item) {
    return position_of(item, item->layer->shape->heads / item->layer->shape->kv_heads, item->rows - 1) + 1;
}

ALWAYS int64_t first_key_tile(const Item *item) {
    int64_t group = item->layer->shape->heads / item->layer->shape->kv_heads;
    return first_seen(item, position_of(item, group, 0)) / INT8_KEY_TILE * INT8_KEY_TILE;
}

/* The blocks of the key tile at `start`: how many. */
static int64_t blocks_at(const Item *item, int64_t start, Int8Block *keys, Int8Block *values) {
    int64_t count = (min_int(INT8_KEY_TILE, item_end(item) - start) + INT8_BLOCK - 1) / INT8_BLOCK;
    for (int64_t b = 0; b < count; b++) {
        int64_t number = item->table[start / INT8_BLOCK + b];
        keys[b] = int8_block(item->layer, number, item->head, 0);
        values[b] = int8_block(item->layer, number, item->head, item->layer->shape->values_at);
    }
    return count;
}

/* `end`: where this member stops, and continues with `next` or nothing. */
static void enter_key_tile(const Item *item, const Item *next, int64_t start, int64_t end, KeyTile *key_tile) {
    Int8Block keys[INT8_BLOCKS], values[INT8_BLOCKS];
    key_tile->start = start, key_tile->count = blocks_at(item, start, key_tile->keys, key_tile->values);
    for (int64_t b = 0; b < key_tile->count; b++)
        for (int64_t i = 0; i < INT8_BLOCK; i += LANES) {
            store(key_tile->key_scales + b * INT8_BLOCK + i, load(key_tile->keys[b].scales + i));
            store(key_tile->value_scales + b * INT8_BLOCK + i, load(key_tile->values[b].scales + i));
        }
    key_tile->unit = of_scales(key_tile->value_scales, key_tile->count * INT8_BLOCK, key_tile->shares);
    int64_t ahead = 0;
    if (start + INT8_KEY_TILE < end) ahead = blocks_at(item, start + INT8_KEY_TILE, keys, values);
    else if (next) ahead = blocks_at(next, first_key_tile(next), keys, values);
    for (int64_t b = 0; b < key_tile->count; b++) {
        key_tile->next_keys[b] = b < ahead ? keys[b].numbers : key_tile->keys[b].numbers;
        key_tile->next_values[b] = b < ahead ? values[b].numbers : key_tile->values[b].numbers;
    }
}

/* The rows of an item, with their queries in `queries`. */
static void read_rows(const Item *item, int8_t *queries, Int8Rows *x) {
    const AttentionArgs *layer = item->layer;
    int64_t dim = layer->shape->head_dim, group = layer->shape->heads / layer->shape->kv_heads;
    x->dim = dim, x->rows = item->rows, x->queries = queries;
    for (int64_t r = 0; r < x->rows; r++) {
        x->positions[r] = position_of(item, group, r);
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float rotated[dim];
        hadamard_head(rotated, layer->qkv + token * layer->qkv_stride + head * dim, dim);
        float largest = largest_of(rotated, dim), inverse = inverse_of(largest, BYTE_MOST);
        x->sums[r] = bytes_of(rotated, dim, inverse, queries + r * dim);
        if (largest <= SCALED_LEAST) largest = 1.0f;  /* all zeros: any scale will do but zero, by which hidden scores become NaN */
        x->scales[r] = largest / BYTE_MOST * (layer->shape->scale * LOG2_E / (float)hadamard_gain(dim));
    }
}

/* Segments [start, end), into x->part. */
static void attend_split(const Item *item, const Item *next, const Int8Rows *x, int64_t start, int64_t end, int64_t stop) {
    int64_t dim = x->dim;
#if HAS_AMX
    _Alignas(64) int8_t values[INT8_KEY_TILE * dim];
    memset(values, 0, x->rows >= INT8_ATTENTION_AMX_FROM ? sizeof values : 0);
#endif
    memset(x->part.out, 0, (size_t)(x->rows * dim) * 4), memset(x->part.totals, 0, (size_t)(x->rows * LANES) * 4);
    for (int64_t r = 0; r < x->rows; r++) x->part.maxima[r] = LOWEST;
    KeyTile key_tile;
    for (; start < end; start += INT8_KEY_TILE) {
        enter_key_tile(item, next, start, stop, &key_tile);
#if HAS_AMX
        if (x->rows >= INT8_ATTENTION_AMX_FROM) {
            for (int64_t b = 0; b < key_tile.count; b++)
                for (int64_t i = 0; i < INT8_BLOCK * dim; i += 64)
                    _mm512_store_si512(values + b * INT8_BLOCK * dim + i, _mm512_loadu_si512(key_tile.values[b].numbers + i));
            amx_against_key_tile(item, x, &key_tile, values);
            continue;
        }
#endif
        rows_against_key_tile(item, x, &key_tile);
    }
}

/* The part of the split after those that `sum` has. */
static void join(const Int8Rows *x, const Part *sum, const Part *part) {
    for (int64_t r = 0; r < x->rows; r++) {
        float a = sum->maxima[r], b = part->maxima[r], changes[LANES];
        store(changes, exp2_lanes(broadcast((a > b ? b - a : a - b) * x->scales[r])));
        f32v keep = broadcast(a > b ? 1.0f : changes[0]), share = broadcast(a > b ? changes[0] : 1.0f);
        sum->maxima[r] = a > b ? a : b;
        float *totals = sum->totals + r * LANES;
        store(totals, fma_lanes(load(part->totals + r * LANES), share, load(totals) * keep));
        for (int64_t d = r * x->dim; d < (r + 1) * x->dim; d += LANES)
            store(sum->out + d, fma_lanes(load(part->out + d), share, load(sum->out + d) * keep));
    }
}

static void store_outputs(const Item *item, const Int8Rows *x, const Part *sum) {
    const AttentionArgs *layer = item->layer;
    int64_t dim = layer->shape->head_dim, group = layer->shape->heads / layer->shape->kv_heads;
    for (int64_t r = 0; r < item->rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float *to = layer->out + (token * layer->shape->heads + head) * dim, total = sum_of_lanes(load(sum->totals + r * LANES));
        float top = sum->maxima[r] * x->scales[r] / LOG2_E, inverse = 1.0f / total;
        if (layer->sinks) store_beside_sink(layer->sinks[head], top, total, sum->out + r * dim, dim, to);
        else for (int64_t d = 0; d < dim; d++) to[d] = sum->out[r * dim + d] * inverse;
    }
}

/* A whole item. `next`: the item after this one, or NULL. */
static void attend_int8(const Item *item, const Item *next) {
    int64_t dim = item->layer->shape->head_dim;
    int8_t queries[ITEM_ROWS * dim];
    _Alignas(64) float first_part[PART_FLOATS(item->rows, dim)], other_part[PART_FLOATS(item->rows, dim)];
    Part sum = part_in(first_part, item->rows, dim), part = part_in(other_part, item->rows, dim);
    Int8Rows x;
    read_rows(item, queries, &x);
    int64_t first = first_key_tile(item), end = item_end(item);
    for (int64_t start = first, stop; start < end; start = stop) {
        stop = min_int((start / KEY_SPLIT + 1) * KEY_SPLIT, end);
        x.part = start == first ? sum : part;
        attend_split(item, next, &x, start, stop, end);
        if (start != first) join(&x, &sum, &part);
    }
    store_outputs(item, &x, &sum);
}

/* ---- a split by itself ---- */

ALWAYS Part part_of_split(const AttentionArgs *layer, int64_t number, int64_t split) {
    int64_t dim = layer->shape->head_dim, each = PART_FLOATS(SPLIT_ROWS, dim);  /* of 16 rows: whole lines */
    return part_in(layer->parts + (number * layer->splits + split) * each, SPLIT_ROWS, dim);
}

/* Span `split` of those that item `number` sees, if it has that many. */
static void attend_one_split(const AttentionArgs *layer, const Item *item, int64_t number, int64_t split) {
    int64_t first = first_key_tile(item), end = item_end(item);
    int64_t start = split ? (first / KEY_SPLIT + split) * KEY_SPLIT : first, stop = min_int((start / KEY_SPLIT + 1) * KEY_SPLIT, end);
    if (start >= end) return;
    int8_t queries[ITEM_ROWS * layer->shape->head_dim];
    Int8Rows x;
    read_rows(item, queries, &x);
    x.part = part_of_split(layer, number, split);
    attend_split(item, NULL, &x, start, stop, stop);
}

static void join_splits(const AttentionArgs *layer, const Item *item, int64_t number) {
    int8_t queries[ITEM_ROWS * layer->shape->head_dim];
    Int8Rows x;
    read_rows(item, queries, &x);  /* for its scales */
    Part sum = part_of_split(layer, number, 0);
    int64_t splits = (item_end(item) - 1) / KEY_SPLIT - first_key_tile(item) / KEY_SPLIT + 1;
    for (int64_t split = 1; split < splits; split++) {
        Part part = part_of_split(layer, number, split);
        join(&x, &sum, &part);
    }
    store_outputs(item, &x, &sum);
}
