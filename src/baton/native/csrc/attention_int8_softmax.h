/* Attention for keys and values of 8 bits, with a scale for each token and head: half the memory to read, and integers.
 *
 * A block of one layer, for each kv head (then the same of its values):
 *
 *   keys     [head_dim / 4][16 tokens][4 dimensions]   bytes     then scales [16 tokens]   float
 *   values   [16 / 4 tokens][head_dim][4 tokens]       bytes     then scales [16 tokens]   float
 *
 * So four bytes of a query meet four bytes of each key in one lane, and no sum across lanes is needed; likewise four weights
 * and the values of four tokens. Queries and keys are mixed (hadamard.h), after they were turned, and then bytes with one scale a row
 * will do for both. Weights of a segment, once they are multiplied by the scales of the values, get two digits to base 128:
 *
 *   score    sum of query * key * scale of the query * scale of the key
 *   output   (128 * sum of high * value + sum of low * value) * scale of the weights, segment by segment
 *
 * Sums are integers, and exact: few rows are worked on with vectors, many on tiles where there are some, and their bits are the
 * same. Scores are logarithms to base 2. A weight is taken against the largest of its own segment, so that one token that gets
 * nearly everything (the first one often does) does not round the others to nothing.
 *
 * Parts of spans are joined in their order. Where a step has little else to share out, every span is a piece of its own.
 */
#pragma once

#include "attention_types.h"
#include "quantize_rows.h"
#include "exp2_digits.h"
#include "hadamard.h"
#include "amx.h"

#define BYTES_BLOCK 16       /* tokens */
#define BYTES_SEGMENT 128    /* tokens between two rescalings, at fixed places */
#define BYTES_BLOCKS (BYTES_SEGMENT / BYTES_BLOCK)
#define BYTES_SPAN 1024      /* tokens whose part in an answer is worked out by itself, at fixed places: several members may share a row */
#define BYTES_ROWS 4         /* that vectors take at once */

/* Vectors of keys, or of outputs, that are worked on at once: as many sums as there are registers for. */
#define BYTES_COLUMNS(rows) ((rows) * 8 <= (LANES == 8 ? 8 : LANES == 4 ? 16 : 24) ? 4 : (rows) * 4 <= (LANES == 8 ? 8 : 24) ? 2 : 1)

/* ---- the pool ---- */

typedef struct { int8_t *numbers; float *scales; } ByteBlock;  /* keys, or values, of 16 tokens of a kv head */

ALWAYS ByteBlock byte_block(const Layer *layer, int64_t number, int64_t head, int64_t from) {
    const Shape *shape = layer->shape;
    int64_t numbers = shape->head_dim * BYTES_BLOCK, bytes = numbers + BYTES_BLOCK * (int64_t)sizeof(float);
    int8_t *at = (int8_t *)layer->pool + number * shape->block_stride + from + head * bytes;
    return (ByteBlock){at, (float *)(at + numbers)};
}

static void store_token_bytes(const Layer *layer, int64_t sequence, int64_t token) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t dim = shape->head_dim;
    int64_t position = step->contexts[sequence] + token - step->starts[sequence], place = position % BYTES_BLOCK;
    int64_t number = step->tables[step->slots[sequence] * step->table_stride + position / BYTES_BLOCK];
    const float *k = layer->qkv + token * layer->qkv_stride + shape->heads * dim, *v = k + shape->kv_heads * dim;
    for (int64_t head = 0; head < shape->kv_heads; head++, k += dim, v += dim) {
        ByteBlock keys = byte_block(layer, number, head, 0), values = byte_block(layer, number, head, shape->values_at);
        float mixed[dim];
        mix_head(mixed, k, dim);
        float key_most = largest_of(mixed, dim), value_most = largest_of(v, dim);
        float key_inverse = inverse_of(key_most, BYTE_MOST), value_inverse = inverse_of(value_most, BYTE_MOST);
        int8_t key[dim], value[dim];
        bytes_of(mixed, dim, key_inverse, key), bytes_of(v, dim, value_inverse, value);
        keys.scales[place] = key_most / BYTE_MOST, values.scales[place] = value_most / BYTE_MOST;
        for (int64_t d = 0; d < dim; d += 4) memcpy(keys.numbers + d * BYTES_BLOCK + place * 4, key + d, 4);
        int8_t *to = values.numbers + place / 4 * dim * 4 + place % 4;
        for (int64_t d = 0; d < dim; d++) to[d * 4] = value[d];
    }
}

/* ---- one item ---- */

/* What rows have found in a span; their answers are out / sum of totals. */
typedef struct { float *out, *totals, *maxima; } Part;  /* [rows][dim], [rows][LANES], [rows] */

#define PART_FLOATS(rows, dim) ((rows) * ((dim) + LANES + 1))

/* What is a vector lies where a vector does, if the memory does. */
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
} ByteRows;

typedef struct {
    int64_t start, count;         /* first token; blocks */
    ByteBlock keys[BYTES_BLOCKS], values[BYTES_BLOCKS];
    _Alignas(64) float key_scales[BYTES_SEGMENT], value_scales[BYTES_SEGMENT];
    float shares[BYTES_SEGMENT], unit;  /* of_scales() of these, for rows that see them all */
    const int8_t *next_keys[BYTES_BLOCKS], *next_values[BYTES_BLOCKS];  /* of the segment after this, fetched meanwhile */
} ByteSegment;

/* What rows give to the tokens of a segment. */
typedef struct {
    _Alignas(64) int8_t high[TILE_HEIGHT][BYTES_SEGMENT], low[TILE_HEIGHT][BYTES_SEGMENT];
    float units[TILE_HEIGHT], keep[TILE_HEIGHT];
} ByteWeights;

/* What a weight of 1 at each token becomes, and what that counts. */
ALWAYS float of_scales(const float *scales, int64_t width, float *shares) {
    float most = largest_magnitude(scales, width), inverse = inverse_of(most, WEIGHT_MOST_OF_ALL);
    for (int64_t t = 0; t < width; t++) shares[t] = scales[t] * inverse;
    return most / WEIGHT_MOST_OF_ALL;
}

/* What is not seen may be anything: it gets no weight. Scales of values become what the row sees of them. */
static float hide(const ByteSegment *segment, int64_t low, int64_t high, int64_t width, float *restrict scores, float *restrict shares) {
    for (int64_t t = 0; t < width; t++) {
        int seen = t >= low && t < high;
        scores[t] = seen ? scores[t] : -INFINITY;
        shares[t] = seen ? segment->value_scales[t] : 0.0f;
    }
    return of_scales(shares, width, shares);
}

/* Scores that are yet to be multiplied by the scales of their rows; on tiles, of their keys, too: then they are integers. */
typedef union { float scores[BYTES_SEGMENT]; int32_t sums[BYTES_SEGMENT]; } ScoreRow;

ALWAYS floats score_lanes(const int summed, ScoreRow *row, const ByteSegment *segment, int64_t t) {
#if HAS_TILES
    if (summed) store(row->scores + t, as_floats(_mm512_load_si512(row->sums + t)) * load(segment->key_scales + t));
#endif
    (void)summed, (void)segment;
    return load(row->scores + t);
}

ALWAYS floats best_lanes(const int summed, ScoreRow *row, const ByteSegment *segment, int64_t width) {
    floats best = score_lanes(summed, row, segment, 0);
    for (int64_t t = LANES; t < width; t += LANES) best = larger_lanes(score_lanes(summed, row, segment, t), best);
    return best;
}

/* Scores become weights; those of a segment that a row sees nothing of become zeros. `blocks`: all that any of the rows sees. */
ALWAYS void soften_bytes(const int summed, const Item *item, const ByteRows *x, int64_t first, int64_t rows, const ByteSegment *segment,
                         int64_t blocks, ScoreRow *restrict scores, ByteWeights *restrict weights) {
    int64_t width = round_up(blocks * BYTES_BLOCK, DIGITS_AT_ONCE), all = round_up(segment->count * BYTES_BLOCK, DIGITS_AT_ONCE);
    const float *shares[TILE_HEIGHT];
    float own_shares[TILE_HEIGHT][BYTES_SEGMENT], tops[TILE_HEIGHT] = {0}, before[TILE_HEIGHT] = {0}, scales[TILE_HEIGHT] = {0};
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = x->positions[first + r];
        int64_t low = larger(first_seen(item, position) - segment->start, 0), high = smaller(position + 1 - segment->start, all);
        floats best = best_lanes(summed, &scores[r], segment, width);
        shares[r] = segment->shares, weights->units[r] = segment->unit;
        if (low > 0 || high < all) {
            weights->units[r] = hide(segment, low, high, width, scores[r].scores, own_shares[r]);
            shares[r] = own_shares[r];
            best = best_lanes(0, &scores[r], segment, width);
        }
        tops[r] = low < high ? largest_lane(best) : LOWEST;
        before[r] = x->part.maxima[first + r], scales[r] = x->scales[first + r];
        x->part.maxima[first + r] = tops[r] > before[r] ? tops[r] : before[r];
    }
    float changes[TILE_HEIGHT];
    for (int64_t r = 0; r < rows; r += LANES) {
        floats from = load(tops + r), to = load(before + r);
        store(changes + r, exp2_lanes((smaller_lanes(from, to) - larger_lanes(from, to)) * load(scales + r)));
    }
    for (int64_t r = 0; r < rows; r++) {
        float keep = tops[r] > before[r] ? changes[r] : 1.0f, share = tops[r] > before[r] ? 1.0f : changes[r];
        floats scale = spread(scales[r]), top = spread(below_top(scores[r].scores, width, tops[r], scales[r]));
        floats sum = spread(first_total(tops[r], scales[r]));
        for (int64_t t = 0; t < width; t += DIGITS_AT_ONCE) {
            floats shared[DIGITS_AT_ONCE / LANES];
#pragma GCC unroll 4
            for (int i = 0; i < DIGITS_AT_ONCE / LANES; i++) {
                floats weight = exp2_of_weight(fused(load(scores[r].scores + t + i * LANES), scale, top));
                sum += weight;
                shared[i] = weight * load(shares[r] + t + i * LANES);
            }
            store_digits(shared, weights->high[r] + t, weights->low[r] + t);
        }
        float *totals = x->part.totals + (first + r) * LANES;
        store(totals, fused(sum, spread(share), load(totals) * spread(keep)));
        weights->units[r] *= share, weights->keep[r] = keep;
    }
}

/* Not part of its callers: one copy for every number of rows. */
static void soften_few(const Item *item, const ByteRows *x, int64_t first, int64_t rows, const ByteSegment *segment, int64_t blocks,
                       ScoreRow *scores, ByteWeights *weights) {
    soften_bytes(0, item, x, first, rows, segment, blocks, scores, weights);
}
