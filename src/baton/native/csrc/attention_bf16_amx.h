/* Attention on Intel's tiles, for keys and values in bfloat16: 16 rows times 16 tokens times 32 dimensions an instruction.
 *
 * Tiles want the numbers of a column in pairs, so a block lies in the pool as they read it, and is read in place:
 *
 *   keys     [head_dim / 2][16 tokens][2 dimensions]
 *   values   [16 / 2 tokens][head_dim][2 tokens]
 *
 * Queries and weights are rounded to bfloat16 too; sums are float32. Every row goes through here, a decoded one like one of a
 * prompt, and each of its sums has one order, of dimensions or of tokens: what a row sees decides its bits, and not its
 * neighbours. Tokens that a row may not see have weight zero.
 */
#pragma once

#include "attention_types.h"
#include "exp2_digits.h"
#include "amx.h"

#define BF16_BLOCK 16  /* tokens of a block: a tile is as wide */
#define BF16_DIM 32    /* dimensions of a tile of keys; head_dim is a multiple */

#define BF16_WIDTH 64  /* dimensions whose outputs are worked on at once: four chains; head_dim is a multiple */
#define BF16_KEY_TILE 64
#define BF16_BLOCKS (BF16_KEY_TILE / BF16_BLOCK)

#if HAS_AMX

typedef uint16_t bf16;

#define TILE_OF_ROWS TILE_HEIGHT

/* Rounded to nearest, ties to even; what is not a number stays none, what is too small for a normal float becomes zero. */
ALWAYS void to_bf16(const float *from, int64_t count, float factor, bf16 *to) {
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        f32v low = load(from + i) * broadcast(factor), high = load(from + i + LANES) * broadcast(factor);
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}

static void store_token_bf16(const AttentionArgs *layer, int64_t sequence, int64_t token) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t dim = shape->head_dim;
    int64_t position = step->contexts[sequence] + token - step->starts[sequence], place = position % BF16_BLOCK;
    int64_t number = step->tables[step->slots[sequence] * step->table_stride + position / BF16_BLOCK];
    bf16 *block = (bf16 *)layer->pool + number * shape->block_stride;
    const float *k = layer->qkv + token * layer->qkv_stride + shape->heads * dim, *v = k + shape->kv_heads * dim;
    for (int64_t head = 0; head < shape->kv_heads; head++, k += dim, v += dim) {
        bf16 *keys = block + head * dim * BF16_BLOCK + place * 2;
        bf16 *values = block + shape->values_at + head * dim * BF16_BLOCK + place / 2 * dim * 2 + place % 2;
        bf16 key[dim], value[dim];
        to_bf16(k, dim, 1.0f, key);
        to_bf16(v, dim, 1.0f, value);
        for (int64_t d = 0; d < dim; d += 2) memcpy(keys + d * BF16_BLOCK, key + d, 4);
        for (int64_t d = 0; d < dim; d++) values[d * 2] = value[d];
    }
}

/* A block of values whose last tokens are not there yet: zeros in their place, since zero times anything must be zero. */
static void whole_values(const bf16 *values, int64_t tokens, int64_t dim, bf16 *out) {
    int64_t pair = dim * 2, whole = tokens / 2;
    memcpy(out, values, (size_t)(whole * pair) * sizeof *out);
    memset(out + whole * pair, 0, (size_t)((BF16_BLOCK / 2 - whole) * pair) * sizeof *out);
    if (tokens % 2)
        for (int64_t d = 0; d < pair; d += 2) out[whole * pair + d] = values[whole * pair + d];
}

/* softmax() for a tile of rows, in powers of two, over `width` tokens; row r sees [low[r], high[r]).
 * Weights come out rounded. Vectors of tokens are added up in their order: those beyond the last one would add zeros. */
static void softmax_tile(float (*scores)[BF16_KEY_TILE], int64_t rows, int64_t width, const int64_t *low, const int64_t *high,
                        float *maxima, float *totals, float *keep, bf16 (*weights)[BF16_KEY_TILE]) {
    _Alignas(64) float tops[TILE_OF_ROWS] = {0}, before[TILE_OF_ROWS] = {0};
    for (int64_t r = 0; r < rows; r++) {
        float *row = scores[r];
        for (int64_t t = 0; t < low[r]; t++) row[t] = -INFINITY;
        for (int64_t t = high[r]; t < width; t++) row[t] = -INFINITY;
        f32v best = load(row);
        for (int64_t t = LANES; t < width; t += LANES) best = max_lanes(load(row + t), best);
        before[r] = maxima[r];
        tops[r] = max_of_lanes(best);
        maxima[r] = tops[r] = tops[r] > before[r] ? tops[r] : before[r];
    }
    store(keep, exp2_lanes((load(before) - load(tops)) * broadcast(LOG2_E)));
    for (int64_t r = 0; r < rows; r++) {
        f32v top = broadcast(below_top(scores[r], width, tops[r], LOG2_E)), sum = broadcast(0.0f);
        for (int64_t t = 0; t < width; t += LANES) {
            f32v weight = exp2_lanes(fma_lanes(load(&scores[r][t]), broadcast(LOG2_E), top));
            sum += weight;
            _mm256_store_si256((__m256i *)&weights[r][t], (__m256i)_mm512_cvtneps_pbh(weight));
        }
        store(totals + r * LANES, fma_lanes(load(totals + r * LANES), broadcast(keep[r]), sum));
    }
}

/* Scores of four blocks; in place of one that is not there, `keys` has any that is. */
ALWAYS void scores_of_blocks(const bf16 *q, const bf16 *const *keys, int64_t dim, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += BF16_DIM) {
        _tile_loadd(4, q + d, dim * 2);
#define BLOCK_OF(b) _tile_loadd(5, keys[b] + d * BF16_BLOCK, 64); _tile_dpbf16ps(b, 4, 5);
        BLOCK_OF(0) BLOCK_OF(1) BLOCK_OF(2) BLOCK_OF(3)
#undef BLOCK_OF
    }
    _tile_stored(0, scores, BF16_KEY_TILE * 4);
    _tile_stored(1, scores + BF16_BLOCK, BF16_KEY_TILE * 4);
    _tile_stored(2, scores + 2 * BF16_BLOCK, BF16_KEY_TILE * 4);
    _tile_stored(3, scores + 3 * BF16_BLOCK, BF16_KEY_TILE * 4);
}

/* Weights times values, for 64 dimensions from d on. */
ALWAYS void add_values(bf16 (*weights)[BF16_KEY_TILE], const bf16 *const *values, int64_t count, int64_t dim, int64_t d, float *out) {
    _tile_loadd(0, out + d, dim * 4);
    _tile_loadd(1, out + d + 16, dim * 4);
    _tile_loadd(2, out + d + 32, dim * 4);
    _tile_loadd(3, out + d + 48, dim * 4);
    for (int64_t b = 0; b < count; b++) {
        _tile_loadd(6, &weights[0][b * BF16_BLOCK], BF16_KEY_TILE * 2);
#define PART_OF(i) _tile_loadd(7, values[b] + (d + 16 * i) * 2, dim * 4); _tile_dpbf16ps(i, 6, 7);
        PART_OF(0) PART_OF(1) PART_OF(2) PART_OF(3)
#undef PART_OF
    }
    _tile_stored(0, out + d, dim * 4);
    _tile_stored(1, out + d + 16, dim * 4);
    _tile_stored(2, out + d + 32, dim * 4);
    _tile_stored(3, out + d + 48, dim * 4);
}

/* One tile of rows, which stand at `positions`, against one key tile. */
static void tile_against_bf16(const Item *item, int64_t start, const bf16 *const *keys, const bf16 *const *values, int64_t rows,
                               const int64_t *positions, const bf16 *q, float *out, float *maxima, float *totals) {
    int64_t dim = item->layer->shape->head_dim, end = positions[rows - 1] + 1;
    if (start >= end || start + BF16_KEY_TILE <= first_seen(item, positions[0])) return;
    int64_t tokens = min_int(BF16_KEY_TILE, end - start), count = (tokens + BF16_BLOCK - 1) / BF16_BLOCK;
    _Alignas(64) float scores[TILE_OF_ROWS][BF16_KEY_TILE];
    _Alignas(64) bf16 weights[TILE_OF_ROWS][BF16_KEY_TILE];
    _Alignas(64) float keep[TILE_OF_ROWS];
    amx_for(FOR_ATTENTION, rows);
    for (int64_t b = 0; b < count; b += 4) scores_of_blocks(q, keys + b, dim, &scores[0][b * BF16_BLOCK]);
    int64_t low[TILE_OF_ROWS], high[TILE_OF_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        low[r] = min_int(max_int(first_seen(item, positions[r]) - start, 0), tokens);
        high[r] = min_int(max_int(positions[r] + 1 - start, 0), tokens);
    }
    softmax_tile(scores, rows, count * BF16_BLOCK, low, high, maxima, totals, keep, weights);
    for (int64_t r = 0; r < rows; r++)
        if (keep[r] != 1.0f)
            for (int64_t d = 0; d < dim; d += LANES) store(out + r * dim + d, load(out + r * dim + d) * broadcast(keep[r]));
    for (int64_t d = 0; d < dim; d += BF16_WIDTH) add_values(weights, values, count, dim, d, out);
}

static void attend_bf16(const Item *item) {
    const AttentionArgs *layer = item->layer;
    const Shape *shape = layer->shape;
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads, rows = item->rows;
    bf16 q[rows * dim], last[BF16_BLOCK * dim];
    float out[rows * dim], maxima[rows], totals[rows * LANES];
    int64_t positions[rows];
    memset(out, 0, sizeof out);
    for (int64_t r = 0; r < rows; r++) {
        positions[r] = position_of(item, group, r);
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        const float *from = layer->qkv + token * layer->qkv_stride + head * dim;
        to_bf16(from, dim, shape->scale, q + r * dim);
        maxima[r] = LOWEST, store(totals + r * LANES, broadcast(0.0f));
    }
    int64_t end = positions[rows - 1] + 1, begin = first_seen(item, positions[0]) / BF16_KEY_TILE * BF16_KEY_TILE;
    const bf16 *keys[BF16_BLOCKS], *values[BF16_BLOCKS];
    for (int64_t start = begin; start < end; start += BF16_KEY_TILE) {
        int64_t here = min_int(BF16_KEY_TILE, end - start);
        for (int64_t b = 0; b < BF16_BLOCKS; b++) {
            if (b * BF16_BLOCK >= here) {
                keys[b] = keys[0];
                continue;
            }
            const bf16 *block = (const bf16 *)layer->pool + item->table[start / BF16_BLOCK + b] * shape->block_stride;
            keys[b] = block + item->head * dim * BF16_BLOCK;
            values[b] = keys[b] + shape->values_at;
            if (here - b * BF16_BLOCK < BF16_BLOCK) {
                whole_values(values[b], here - b * BF16_BLOCK, dim, last);
                values[b] = last;
            }
        }
        for (int64_t tile = 0; tile < rows; tile += TILE_OF_ROWS)
            tile_against_bf16(item, start, keys, values, min_int(TILE_OF_ROWS, rows - tile), positions + tile, q + tile * dim,
                               out + tile * dim, maxima + tile, totals + tile * LANES);
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t token = item->first_token + (item->first + r) / group, head = item->head * group + (item->first + r) % group;
        float *to = layer->out + (token * shape->heads + head) * dim;
        float total = sum_of_lanes(load(totals + r * LANES));
        for (int64_t d = 0; d < dim; d++) to[d] = out[r * dim + d] / total;
    }
}

#else

static void store_token_bf16(const AttentionArgs *layer, int64_t sequence, int64_t token) { (void)layer, (void)sequence, (void)token; }
static void attend_bf16(const Item *item) { (void)item; }

#endif
