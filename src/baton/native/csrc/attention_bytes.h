/* Attention for keys and values of 8 bits, with a scale for each token and head: half the memory to read, and integers.
 *
 * A block of one layer, for each kv head (then the same of its values):
 *
 *   keys     [head_dim / 4][16 tokens][4 dimensions]   bytes     then scales [16 tokens]   float
 *   values   [16 / 4 tokens][head_dim][4 tokens]       bytes     then scales [16 tokens]   float
 *
 * So four bytes of a query meet four bytes of each key in one lane, and no sum across lanes is needed; likewise four weights
 * and the values of four tokens. Queries and keys are mixed (mixing.h), after they were turned, and then bytes with one scale a row
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

#include "activations.h"
#include "digits.h"
#include "mixing.h"
#include "tiles.h"

#define BYTES_BLOCK 16       /* tokens */
#define BYTES_SEGMENT 128    /* tokens between two rescalings, at fixed places */
#define BYTES_BLOCKS (BYTES_SEGMENT / BYTES_BLOCK)
#define BYTES_SPAN 1024      /* tokens whose part in an answer is worked out by itself, at fixed places: several members may share a row */
#define SPLIT_ROWS 16        /* of an item whose spans go to several members */
#define BYTES_ROWS 4         /* that vectors take at once */
#define BYTES_TILES_FROM 8   /* rows that are faster on tiles */

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

/* ---- few rows: vectors ---- */

/* Not part of its callers: one copy for every number of rows. */
static void soften_few(const Item *item, const ByteRows *x, int64_t first, int64_t rows, const ByteSegment *segment, int64_t blocks,
                       ScoreRow *scores, ByteWeights *weights) {
    soften_bytes(0, item, x, first, rows, segment, blocks, scores, weights);
}

#if defined(__aarch64__)

#include "attention_int8_neon.h"

#else

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

/* ---- many rows: tiles ---- */

#if HAS_TILES

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

ALWAYS floats of_tile(TileSums *sums, int which, int64_t row) {
    return of_digits(as_floats(_mm512_load_si512((*sums)[2 * which][row])), as_floats(_mm512_load_si512((*sums)[2 * which + 1][row])));
}

/* A block of keys, in tile `sum`. Queries that fit into one tile are in 4 already. */
ALWAYS void score_products(const int sum, const int8_t *queries, const int8_t *keys, int64_t dim) {
    if (sum) _tile_zero(1);
    else _tile_zero(0);
    for (int64_t d = 0; d < dim; d += STEP_OF_TILES) {
        if (dim > STEP_OF_TILES) _tile_loadd(4, queries + d, dim);
        if (sum) _tile_loadd(7, keys + d * BYTES_BLOCK, 64);
        else _tile_loadd(6, keys + d * BYTES_BLOCK, 64);
        if (sum) _tile_dpbssd(1, 4, 7);
        else _tile_dpbssd(0, 4, 6);
    }
}

/* A tile of rows, [first, first + rows), and what becomes of it. */
typedef struct {
    int64_t first, rows, blocks;
    _Alignas(64) union { ScoreRow scores[TILE_HEIGHT]; TileSums outputs[2]; };  /* first the one; then 64 outputs of a row */
    ByteWeights weights;
} ByteTile;

static void score_tile(const ByteRows *x, const ByteSegment *segment, ByteTile *t) {
    int64_t dim = x->dim;
    const int8_t *queries = x->queries + t->first * dim;
    if (dim <= STEP_OF_TILES) _tile_loadd(4, queries, dim);
    for (int64_t b = 0; b < t->blocks; b++) {
        const int8_t *keys = segment->keys[b].numbers;
        if (b % 2) score_products(1, queries, keys, dim);
        else score_products(0, queries, keys, dim);
        if (b % 2) _tile_stored(1, t->scores->sums + b * BYTES_BLOCK, sizeof(ScoreRow));
        else _tile_stored(0, t->scores->sums + b * BYTES_BLOCK, sizeof(ScoreRow));
    }
}

/* Outputs [from, from + 64), as integers. */
static void output_tile(const ByteRows *x, const int8_t *values, ByteTile *t, int64_t from) {
    int64_t dim = x->dim;
    for (int64_t d = 0; d < 64; d += 32) {
        zero_sums();
        for (int64_t token = 0; token < t->blocks * BYTES_BLOCK; token += STEP_OF_TILES)
            add_products(t->weights.high[0] + token, t->weights.low[0] + token, BYTES_SEGMENT, values + token * dim + (from + d) * 4,
                         values + token * dim + (from + d + 16) * 4, dim * 4);
        store_sums(&t->outputs[d / 32]);
    }
}

static void add_outputs(const ByteRows *x, ByteTile *t, int64_t from) {
    for (int64_t r = 0; r < t->rows; r++)
        for (int i = 0; i < 4; i++) {
            float *to = x->part.out + (t->first + r) * x->dim + from + i * 16;
            floats sum = of_tile(&t->outputs[i / 2], i % 2, r);
            store(to, fused(sum, spread(t->weights.units[r]), load(to) * spread(t->weights.keep[r])));
        }
}

/* All rows against a segment, whose values lie in `values`. What tiles do and what vectors do is done by turns, for all rows: loads
 * of tiles wait for the stores before them, and vectors run at half their speed beside tiles. */
static void tiles_against_segment(const Item *item, const ByteRows *x, const ByteSegment *segment, const int8_t *values) {
    ByteTile tiles[ITEM_ROWS / TILE_HEIGHT];
    int64_t count = 0;
    tiles_for(FOR_PRODUCTS, TILE_HEIGHT);
    for (int64_t first = 0; first < x->rows; first += TILE_HEIGHT) {
        int64_t rows = smaller(TILE_HEIGHT, x->rows - first), last = x->positions[first + rows - 1];
        if (segment->start > last || segment->start + BYTES_SEGMENT <= first_seen(item, x->positions[first])) continue;
        ByteTile *t = &tiles[count++];
        t->first = first, t->rows = rows, t->blocks = smaller(segment->count, (last - segment->start) / BYTES_BLOCK + 1);
    }
    for (int64_t i = 0; i < count; i++) score_tile(x, segment, &tiles[i]);
    for (int64_t i = 0; i < count; i++) {
        ByteTile *t = &tiles[i];
        soften_bytes(1, item, x, t->first, t->rows, segment, t->blocks, t->scores, &t->weights);
    }
    for (int64_t from = 0; from < x->dim; from += 64) {
        for (int64_t i = 0; i < count; i++) output_tile(x, values, &tiles[i], from);
        for (int64_t i = 0; i < count; i++) add_outputs(x, &tiles[i], from);
    }
}

#endif

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
