/* The products of 8-bit attention on ARM: `sdot` with all sums of a tile, its rows and what they meet in registers.
 *
 *   scores    4 rows x 16 keys                 16 sums, 4 vectors of queries, 4 of keys
 *   outputs   4 rows x 16 numbers, a digit     16 sums, 4 vectors of weights, 4 of values
 *
 * Sixteen bytes of a row are loaded at once, and `sdot` takes four of them out of a lane: to broadcast them first would cost a
 * slot of the two vector pipes for every two products. Sums begin at the bits of 1.5 * 2^23 (neon_dot.h), because a conversion of
 * integers to floats occupies one of these pipes for two cycles on a Neoverse-N1. The two digits of the weights are two passes: in
 * one, gcc 12 keeps sums in memory. Integers are exact: the bits are those of the portable kernels of attention_int8.h.
 */
#pragma once

#include "attention_int8_softmax.h"
#include "neon_dot.h"

#define DOT_COLUMNS 4             /* vectors of four numbers: the keys of a block, or 16 outputs */
#define BYTE_SUM_MAX (127 * 127)  /* of one product; those of the 128 tokens of a key tile always fit */

typedef i32v DotTile[INT8_ROWS][DOT_COLUMNS];

/* Sixteen bytes of each row times four lines of `stride` bytes from `w` on. `ahead`: lines to fetch meanwhile, if `fetches`. */
ALWAYS void add_dots(const int rows, const int fetches, DotTile sum, const int8_t *x, int64_t x_stride, const uint8_t *w, int64_t stride,
                     const int8_t *ahead) {
    i8v row[INT8_ROWS];
    UNROLL for (int r = 0; r < rows; r++) row[r] = vld1q_s8(x + r * x_stride);
    UNROLL for (int word = 0; word < 4; word++, w += stride, ahead += stride) {
        if (fetches) __builtin_prefetch(ahead, 0, 2);
        SCHED_FENCE;
        UNROLL for (int c = 0; c < DOT_COLUMNS; c++) {
            i8v four = load_bytes(w + c * 16);
            UNROLL for (int r = 0; r < rows; r++) sum[r][c] = dot_word(sum[r][c], four, row[r], word);
        }
    }
}

ALWAYS void start_sums(const int rows, DotTile sum) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < DOT_COLUMNS; c++) sum[r][c] = sum_start();
}

/* `rows` rows against the 16 keys of block `b`. */
ALWAYS void score_tile(const int rows, const int fetches, const Int8Rows *x, int64_t first, const KeyTile *key_tile, int64_t b,
                       ScoreRow *scores) {
    const int fits = x->dim * BYTE_SUM_MAX < SUM_MAGNITUDE_MAX;  /* not in heads of more than 256 numbers */
    const Int8Block *keys = &key_tile->keys[b];
    DotTile sum;
    start_sums(rows, sum);
    for (int64_t d = 0; d < x->dim; d += 16)
        add_dots(rows, fetches, sum, x->queries + first * x->dim + d, x->dim, (const uint8_t *)keys->numbers + d * INT8_BLOCK,
                 INT8_BLOCK * 4, key_tile->next_keys[b] + d * INT8_BLOCK);
    UNROLL for (int c = 0; c < DOT_COLUMNS; c++) {
        f32v scale = load(keys->scales + c * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            f32v score = fits ? float_of_sum(sum[r][c]) : as_floats(sum[r][c] - sum_start());
            store(scores[r].scores + b * INT8_BLOCK + c * LANES, score * scale);
        }
    }
}

typedef float OutputSums[INT8_ROWS][DOT_COLUMNS * LANES];

/* One digit of the weights of `rows` rows times the values of `blocks` blocks, numbers [from, from + 16). */
ALWAYS void digit_tile(const int rows, const int fetches, const int8_t *digits, int64_t dim, const KeyTile *key_tile, int64_t blocks,
                       int64_t from, OutputSums out) {
    DotTile sum;
    start_sums(rows, sum);
    for (int64_t b = 0; b < blocks; b++)
        add_dots(rows, fetches, sum, digits + b * INT8_BLOCK, INT8_KEY_TILE, (const uint8_t *)key_tile->values[b].numbers + from * 4,
                 dim * 4, key_tile->next_values[b] + from * 4);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < DOT_COLUMNS; c++) store(&out[r][c * LANES], float_of_sum(sum[r][c]));
}

/* Functions of their own: part of a larger one, gcc 12 moves their sums from register to register. */
#define DIGIT_TILE(rows, fetches)                                                                                                    \
    static __attribute__((noinline)) void digit_tile_##rows##_##fetches(const int8_t *digits, int64_t dim, const KeyTile *key_tile, \
                                                                       int64_t blocks, int64_t from, OutputSums out) {               \
        digit_tile(rows, fetches, digits, dim, key_tile, blocks, from, out);                                                         \
    }
DIGIT_TILE(1, 0) DIGIT_TILE(1, 1) DIGIT_TILE(2, 0) DIGIT_TILE(2, 1) DIGIT_TILE(3, 0) DIGIT_TILE(3, 1) DIGIT_TILE(4, 0) DIGIT_TILE(4, 1)

typedef void (*DigitTile)(const int8_t *, int64_t, const KeyTile *, int64_t, int64_t, OutputSums);
static const DigitTile DIGIT_TILES[INT8_ROWS][2] = {
    {digit_tile_1_0, digit_tile_1_1}, {digit_tile_2_0, digit_tile_2_1}, {digit_tile_3_0, digit_tile_3_1}, {digit_tile_4_0, digit_tile_4_1}};

/* Outputs [from, from + 16) of `rows` rows, over `blocks` blocks. */
ALWAYS void output_tile(const int rows, const int fetches, const Int8Rows *x, int64_t first, const KeyTile *key_tile, int64_t blocks,
                        const Int8Weights *weights, int64_t from) {
    OutputSums high, low;
    DIGIT_TILES[rows - 1][fetches](weights->high[0], x->dim, key_tile, blocks, from, high);
    DIGIT_TILES[rows - 1][0](weights->low[0], x->dim, key_tile, blocks, from, low);
    UNROLL for (int r = 0; r < rows; r++) {
        float *to = x->part.out + (first + r) * x->dim + from;
        f32v unit = broadcast(weights->units[r]), keep = broadcast(weights->keep[r]);
        UNROLL for (int c = 0; c < DOT_COLUMNS * LANES; c += LANES)
            store(to + c, fma_lanes(of_digits(load(&high[r][c]), load(&low[r][c])), unit, load(to + c) * keep));
    }
}

/* All rows of a tile against a key tile; nothing where none of them sees any of it. */
ALWAYS void attend_tile(const int rows, const int fetches, const Item *item, const Int8Rows *x, int64_t first, const KeyTile *key_tile) {
    _Alignas(64) ScoreRow scores[INT8_ROWS];
    Int8Weights weights;
    int64_t last = x->positions[first + rows - 1];
    if (key_tile->start > last || key_tile->start + INT8_KEY_TILE <= first_seen(item, x->positions[first])) return;
    int64_t blocks = min_int(key_tile->count, (last - key_tile->start) / INT8_BLOCK + 1);  /* that any of the rows sees */
    for (int64_t b = 0; b < blocks; b++) score_tile(rows, fetches, x, first, key_tile, b, scores);
    softmax_few(item, x, first, rows, key_tile, blocks, scores, &weights);
    for (int64_t from = 0; from < x->dim; from += DOT_COLUMNS * LANES)
        output_tile(rows, fetches, x, first, key_tile, blocks, &weights, from);
}

/* The first rows of an item fetch for all of them. */
ALWAYS void few_against_key_tile(const int rows, const Item *item, const Int8Rows *x, int64_t first, const KeyTile *key_tile) {
    if (first == 0 || rows < INT8_ROWS) attend_tile(rows, 1, item, x, first, key_tile);
    else attend_tile(rows, 0, item, x, first, key_tile);
}
