/* Attention for keys and values of 8 bits, with a scale for each token and head: half the memory to read, and integers.
 *
 * A block of one layer, for each kv head (then the same of its values):
 *
 *   keys     [head_dim / 4][16 tokens][4 dimensions]   bytes     then scales [16 tokens]   float
 *   values   [16 / 4 tokens][head_dim][4 tokens]       bytes     then scales [16 tokens]   float
 *
 * Hence four bytes of a query meet four bytes of each key in one lane, and no sum across lanes is needed; likewise four weights
 * and the values of four tokens. Queries and keys are rotated (hadamard.h), after RoPE, and then bytes with one scale a row
 * will do for both. Weights of a key tile, once they are multiplied by the scales of the values, get two digits to base 128:
 *
 *   score    sum of query * key * scale of the query * scale of the key
 *   output   (128 * sum of high * value + sum of low * value) * scale of the weights, key tile by key tile
 *
 * Sums are integers, and exact: few rows are worked on with vectors, many on tiles where there are some, and their bits are the
 * same. Scores are logarithms to base 2. A weight is taken against the largest of its own key tile, so that one token that gets
 * nearly everything (the first one often does) does not round the others to nothing.
 *
 * Parts of splits are joined in their order. Where a step has little else to share out, every split is a chunk of its own.
 */
#pragma once

#include "attention_types.h"
#include "quantize_rows.h"
#include "exp2_digits.h"
#include "hadamard.h"
#include "amx.h"

#define INT8_BLOCK 16       /* tokens */
#define INT8_KEY_TILE 128    /* tokens between two rescalings, at fixed places */
#define INT8_BLOCKS (INT8_KEY_TILE / INT8_BLOCK)
#define KEY_SPLIT 1024      /* tokens whose part of an answer is computed separately, at fixed places: several members may share a row */
#define INT8_ROWS 4         /* that vectors take at once */

/* Vectors of keys, or of outputs, that are worked on at once: as many sums as there are registers for. */
#define INT8_COLUMNS(rows) ((rows) * 8 <= (LANES == 8 ? 8 : LANES == 4 ? 16 : 24) ? 4 : (rows) * 4 <= (LANES == 8 ? 8 : 24) ? 2 : 1)

/* ---- the pool ---- */

typedef struct { int8_t *numbers; float *scales; } Int8Block;  /* keys, or values, of 16 tokens of a kv head */

ALWAYS Int8Block int8_block(const AttentionArgs *layer, int64_t number, int64_t head, int64_t from) {
    const Shape *shape = layer->shape;
    int64_t numbers = shape->head_dim * INT8_BLOCK, i8v = numbers + INT8_BLOCK * (int64_t)sizeof(float);
    int8_t *at = (int8_t *)layer->pool + number * shape->block_stride + from + head * i8v;
    return (Int8Block){at, (float *)(at + numbers)};
}

static void store_token_int8(const AttentionArgs *layer, int64_t sequence, int64_t token) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t dim = shape->head_dim;
    int64_t position = step->contexts[sequence] + token - step->starts[sequence], place = position % INT8_BLOCK;
    int64_t number = step->tables[step->slots[sequence] * step->table_stride + position / INT8_BLOCK];
    const float *k = layer->qkv + token * layer->qkv_stride + shape->heads * dim, *v = k + shape->kv_heads * dim;
    for (int64_t head = 0; head < shape->kv_heads; head++, k += dim, v += dim) {
        Int8Block keys = int8_block(layer, number, head, 0), values = int8_block(layer, number, head, shape->values_at);
        float rotated[dim];
        hadamard_head(rotated, k, dim);
        float key_most = largest_of(rotated, dim), value_most = largest_of(v, dim);
        float key_inverse = inverse_of(key_most, BYTE_MOST), value_inverse = inverse_of(value_most, BYTE_MOST);
        int8_t key[dim], value[dim];
        bytes_of(rotated, dim, key_inverse, key), bytes_of(v, dim, value_inverse, value);
        keys.scales[place] = key_most / BYTE_MOST, values.scales[place] = value_most / BYTE_MOST;
        for (int64_t d = 0; d < dim; d += 4) memcpy(keys.numbers + d * INT8_BLOCK + place * 4, key + d, 4);
        int8_t *to = values.numbers + place / 4 * dim * 4 + place % 4;
        for (int64_t d = 0; d < dim; d++) to[d * 4] = value[d];
    }
}

/* ---- one item ---- */

/* Partial results of rows in a split; the answers are out / sum of totals. */
typedef struct { float *out, *totals, *maxima; } Part;  /* [rows][dim], [rows][LANES], [rows] */

#define PART_FLOATS(rows, dim) ((rows) * ((dim) + LANES + 1))

/* Every vector is aligned if the memory is. */
ALWAYS Part part_in(float *memory, int64_t rows, int64_t dim) {
    return (Part){memory, memory + rows * dim, memory + rows * (dim + LANES)};
}

typedef struct {
    int64_t dim, rows;
    int64_t positions[ITEM_ROWS];
    int8_t *queries;              /* [rows][dim] */
    float scales[ITEM_ROWS];      /* of queries */
    int32_t sums[ITEM_ROWS];      /* of queries */
    Part part;
} Int8Rows;

typedef struct {
    int64_t start, count;         /* first token; blocks */
    Int8Block keys[INT8_BLOCKS], values[INT8_BLOCKS];
    _Alignas(64) float key_scales[INT8_KEY_TILE], value_scales[INT8_KEY_TILE];
    float shares[INT8_KEY_TILE], unit;  /* of_scales() of these, for rows that see them all */
    const int8_t *next_keys[INT8_BLOCKS], *next_values[INT8_BLOCKS];  /* of the key tile after this, fetched meanwhile */
} KeyTile;

/* Weights of the rows for the tokens of a key tile. */
typedef struct {
    _Alignas(64) int8_t high[TILE_HEIGHT][INT8_KEY_TILE], low[TILE_HEIGHT][INT8_KEY_TILE];
    float units[TILE_HEIGHT], keep[TILE_HEIGHT];
} Int8Weights;

/* Set `shares` to the bytes of a weight of 1 at each token; returns the value of one unit. */
ALWAYS float of_scales(const float *scales, int64_t width, float *shares) {
    float most = largest_magnitude(scales, width), inverse = inverse_of(most, WEIGHT_MOST_OF_ALL);
    for (int64_t t = 0; t < width; t++) shares[t] = scales[t] * inverse;
    return most / WEIGHT_MOST_OF_ALL;
}

/* Unseen tokens may hold anything: they get no weight. Scales of values become those that the row sees. */
static float hide(const KeyTile *key_tile, int64_t low, int64_t high, int64_t width, float *restrict scores, float *restrict shares) {
    for (int64_t t = 0; t < width; t++) {
        int seen = t >= low && t < high;
        scores[t] = seen ? scores[t] : -INFINITY;
        shares[t] = seen ? key_tile->value_scales[t] : 0.0f;
    }
    return of_scales(shares, width, shares);
}

/* Scores that are yet to be multiplied by the scales of their rows; on tiles, of their keys, too: then they are integers. */
typedef union { float scores[INT8_KEY_TILE]; int32_t sums[INT8_KEY_TILE]; } ScoreRow;

ALWAYS f32v score_lanes(const int summed, ScoreRow *row, const KeyTile *key_tile, int64_t t) {
#if HAS_AMX
    if (summed) store(row->scores + t, as_floats(_mm512_load_si512(row->sums + t)) * load(key_tile->key_scales + t));
#endif
    (void)summed, (void)key_tile;
    return load(row->scores + t);
}

ALWAYS f32v best_lanes(const int summed, ScoreRow *row, const KeyTile *key_tile, int64_t width) {
    f32v best = score_lanes(summed, row, key_tile, 0);
    for (int64_t t = LANES; t < width; t += LANES) best = max_lanes(score_lanes(summed, row, key_tile, t), best);
    return best;
}

/* Scores become weights; those of a key tile that a row sees nothing of become zeros. `blocks`: all that any of the rows sees. */
ALWAYS void softmax_int8(const int summed, const Item *item, const Int8Rows *x, int64_t first, int64_t rows, const KeyTile *key_tile,
                         int64_t blocks, ScoreRow *restrict scores, Int8Weights *restrict weights) {
    int64_t width = round_up(blocks * INT8_BLOCK, DIGITS_AT_ONCE), all = round_up(key_tile->count * INT8_BLOCK, DIGITS_AT_ONCE);
    const float *shares[TILE_HEIGHT];
    float own_shares[TILE_HEIGHT][INT8_KEY_TILE], tops[TILE_HEIGHT] = {0}, before[TILE_HEIGHT] = {0}, scales[TILE_HEIGHT] = {0};
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = x->positions[first + r];
        int64_t low = max_int(first_seen(item, position) - key_tile->start, 0), high = min_int(position + 1 - key_tile->start, all);
        f32v best = best_lanes(summed, &scores[r], key_tile, width);
        shares[r] = key_tile->shares, weights->units[r] = key_tile->unit;
        if (low > 0 || high < all) {
            weights->units[r] = hide(key_tile, low, high, width, scores[r].scores, own_shares[r]);
            shares[r] = own_shares[r];
            best = best_lanes(0, &scores[r], key_tile, width);
        }
        tops[r] = low < high ? max_of_lanes(best) : LOWEST;
        before[r] = x->part.maxima[first + r], scales[r] = x->scales[first + r];
        x->part.maxima[first + r] = tops[r] > before[r] ? tops[r] : before[r];
    }
    float changes[TILE_HEIGHT];
    for (int64_t r = 0; r < rows; r += LANES) {
        f32v from = load(tops + r), to = load(before + r);
        store(changes + r, exp2_lanes((min_lanes(from, to) - max_lanes(from, to)) * load(scales + r)));
    }
    for (int64_t r = 0; r < rows; r++) {
        float keep = tops[r] > before[r] ? changes[r] : 1.0f, share = tops[r] > before[r] ? 1.0f : changes[r];
        f32v scale = broadcast(scales[r]), top = broadcast(below_top(scores[r].scores, width, tops[r], scales[r]));
        f32v sum = broadcast(first_total(tops[r], scales[r]));
        for (int64_t t = 0; t < width; t += DIGITS_AT_ONCE) {
            f32v shared[DIGITS_AT_ONCE / LANES];
#pragma GCC unroll 4
            for (int i = 0; i < DIGITS_AT_ONCE / LANES; i++) {
                f32v weight = exp2_of_weight(fma_lanes(load(scores[r].scores + t + i * LANES), scale, top));
                sum += weight;
                shared[i] = weight * load(shares[r] + t + i * LANES);
            }
            store_digits(shared, weights->high[r] + t, weights->low[r] + t);
        }
        float *totals = x->part.totals + (first + r) * LANES;
        store(totals, fma_lanes(sum, broadcast(share), load(totals) * broadcast(keep)));
        weights->units[r] *= share, weights->keep[r] = keep;
    }
}

/* Not part of its callers: one copy for every number of rows. */
static void softmax_few(const Item *item, const Int8Rows *x, int64_t first, int64_t rows, const KeyTile *key_tile, int64_t blocks,
                       ScoreRow *scores, Int8Weights *weights) {
    softmax_int8(0, item, x, first, rows, key_tile, blocks, scores, weights);
}
