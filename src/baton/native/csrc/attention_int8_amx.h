/* Attention for keys and values of 8 bits, many rows, on Intel's tiles. */
#pragma once

#include "attention_int8_softmax.h"

#if HAS_AMX

typedef int32_t TileSums[4][TILE_HEIGHT][16];

ALWAYS void store_sums(TileSums *sums) {
    _tile_stored(0, (*sums)[0], 64);
    _tile_stored(1, (*sums)[1], 64);
    _tile_stored(2, (*sums)[2], 64);
    _tile_stored(3, (*sums)[3], 64);
}

/* Two tiles of weights at a time: high and low of the first, high and low of the second. */
ALWAYS void add_products(const int8_t *high, const int8_t *low, int64_t stride, const int8_t *first, const int8_t *second,
                         int64_t tile_stride) {
    _tile_loadd(4, high, stride);
    _tile_loadd(6, first, tile_stride);
    _tile_loadd(5, low, stride);
    _tile_loadd(7, second, tile_stride);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
}

ALWAYS void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

ALWAYS f32v of_tile(TileSums *sums, int which, int64_t row) {
    return of_digits(as_floats(_mm512_load_si512((*sums)[2 * which][row])), as_floats(_mm512_load_si512((*sums)[2 * which + 1][row])));
}

/* A block of keys, in tile `sum`. Queries that fit into one tile are in 4 already. */
ALWAYS void score_products(const int sum, const int8_t *queries, const int8_t *keys, int64_t dim) {
    if (sum) _tile_zero(1);
    else _tile_zero(0);
    for (int64_t d = 0; d < dim; d += AMX_STEP) {
        if (dim > AMX_STEP) _tile_loadd(4, queries + d, dim);
        if (sum) _tile_loadd(7, keys + d * INT8_BLOCK, 64);
        else _tile_loadd(6, keys + d * INT8_BLOCK, 64);
        if (sum) _tile_dpbssd(1, 4, 7);
        else _tile_dpbssd(0, 4, 6);
    }
}

/* A tile of rows, [first, first + rows), and what becomes of it. */
typedef struct {
    int64_t first, rows, blocks;
    _Alignas(64) union { ScoreRow scores[TILE_HEIGHT]; TileSums outputs[2]; };  /* first the one; then 64 outputs of a row */
    Int8Weights weights;
} Int8Tile;

static void score_tile(const Int8Rows *x, const KeyTile *key_tile, Int8Tile *t) {
    int64_t dim = x->dim;
    const int8_t *queries = x->queries + t->first * dim;
    if (dim <= AMX_STEP) _tile_loadd(4, queries, dim);
    for (int64_t b = 0; b < t->blocks; b++) {
        const int8_t *keys = key_tile->keys[b].numbers;
        if (b % 2) score_products(1, queries, keys, dim);
        else score_products(0, queries, keys, dim);
        if (b % 2) _tile_stored(1, t->scores->sums + b * INT8_BLOCK, sizeof(ScoreRow));
        else _tile_stored(0, t->scores->sums + b * INT8_BLOCK, sizeof(ScoreRow));
    }
}

/* Outputs [from, from + 64), as integers. */
static void output_tile(const Int8Rows *x, const int8_t *values, Int8Tile *t, int64_t from) {
    int64_t dim = x->dim;
    for (int64_t d = 0; d < 64; d += 32) {
        zero_sums();
        for (int64_t token = 0; token < t->blocks * INT8_BLOCK; token += AMX_STEP)
            add_products(t->weights.high[0] + token, t->weights.low[0] + token, INT8_KEY_TILE, values + token * dim + (from + d) * 4,
                         values + token * dim + (from + d + 16) * 4, dim * 4);
        store_sums(&t->outputs[d / 32]);
    }
}

static void add_outputs(const Int8Rows *x, Int8Tile *t, int64_t from) {
    for (int64_t r = 0; r < t->rows; r++)
        for (int i = 0; i < 4; i++) {
            float *to = x->part.out + (t->first + r) * x->dim + from + i * 16;
            f32v sum = of_tile(&t->outputs[i / 2], i % 2, r);
            store(to, fma_lanes(sum, broadcast(t->weights.units[r]), load(to) * broadcast(t->weights.keep[r])));
        }
}

/* All rows against a key tile, whose values lie in `values`. What tiles do and what vectors do is done by turns, for all rows: loads
 * of tiles wait for the stores before them, and vectors run at half their speed beside tiles. */
static void amx_against_key_tile(const Item *item, const Int8Rows *x, const KeyTile *key_tile, const int8_t *values) {
    Int8Tile tiles[ITEM_ROWS / TILE_HEIGHT];
    int64_t count = 0;
    amx_for(TILE_HEIGHT);
    for (int64_t first = 0; first < x->rows; first += TILE_HEIGHT) {
        int64_t rows = min_int(TILE_HEIGHT, x->rows - first), last = x->positions[first + rows - 1];
        if (key_tile->start > last || key_tile->start + INT8_KEY_TILE <= first_seen(item, x->positions[first])) continue;
        Int8Tile *t = &tiles[count++];
        t->first = first, t->rows = rows, t->blocks = min_int(key_tile->count, (last - key_tile->start) / INT8_BLOCK + 1);
    }
    for (int64_t i = 0; i < count; i++) score_tile(x, key_tile, &tiles[i]);
    for (int64_t i = 0; i < count; i++) {
        Int8Tile *t = &tiles[i];
        softmax_int8(1, item, x, t->first, t->rows, key_tile, t->blocks, t->scores, &t->weights);
    }
    for (int64_t from = 0; from < x->dim; from += 64) {
        for (int64_t i = 0; i < count; i++) output_tile(x, values, &tiles[i], from);
        for (int64_t i = 0; i < count; i++) add_outputs(x, &tiles[i], from);
    }
}

#endif
