/* Products of weights of four bits and activations of eight that both have a scale for every 32 numbers.
 *
 *   INT4   scale * (nibble - 8)     INT4M   scale * nibble + minimum
 *
 * with scales and minima as halves [cell][group][output]. These are GGUF's Q4_0 and Q4_1 with words of four bytes put
 * elsewhere: no number changes.
 *
 * A product of a group is exact, in integers; sums over groups are one chain of fused multiply-adds in the order of the
 * groups: the same comes out of every kernel of this file and of matmul_neon.h.
 */
#pragma once

#include "matrix.h"

#define LEAST 1e-36f    /* the inverse of a largest number below it would be infinite: such a group is all zeros */

/* ---- rows ----
 *
 *   quantised     [rows][width]
 *   scales        [groups][stride]: neighbouring rows are wanted together
 *   sums          [groups][stride] of the quantised numbers: for taking back an offset of the weights
 *   scaled_sums   [groups][stride] scale * sum: what a minimum of the weights is multiplied by
 */

/* In three passes over the row: none of them waits for a number that the step before has only just begun to work out. */
static void quantise_row(const Rows *rows, int64_t row) {
    const float *restrict x = rows->plain + row * rows->width;
    int8_t *restrict q = rows->quantised + row * rows->width;
    float largest[rows->groups], scales[rows->groups], inverses[rows->groups];
    for (int64_t g = 0; g < rows->groups; g++) largest[g] = largest_of(x + g * GROUP, GROUP);
    for (int64_t g = 0; g < rows->groups; g++) {
        scales[g] = largest[g] / 127.0f;
        inverses[g] = largest[g] > LEAST ? 127.0f / largest[g] : 0.0f;
    }
    for (int64_t g = 0; g < rows->groups; g++) {
        int32_t sum = bytes_of_group(x + g * GROUP, inverses[g], q + g * GROUP);
        int64_t at = g * rows->stride + row;
        rows->scales[at] = scales[g];
        rows->sums[at] = sum;
        rows->scaled_sums[at] = scales[g] * (float)sum;
    }
}

/* ---- weights ---- */

static void plan_nibbles(Matrix *m, int64_t bytes[3]) {
    m->groups = m->inputs / GROUP;
    bytes[1] = m->cells * m->groups * CELL * 2;
    bytes[2] = m->kind == INT4M ? bytes[1] : 0;
}

/* The cell is written from its first byte to its last, and the rows are read side by side. */
static void pack_nibbles(const Matrix *m, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count) {
    int64_t cell = places[0] / CELL, has_minima = m->kind == INT4M, block_bytes = has_minima ? 20 : 18;
    uint8_t *numbers = (uint8_t *)m->numbers + cell * cell_bytes(m);
    for (int64_t g = 0; g < m->groups; g++, rows += block_bytes, numbers += FOURS / 2 * CELL * 4) {
        half *scales = (half *)m->scales + (cell * m->groups + g) * CELL, *minima = (half *)m->minima + (cell * m->groups + g) * CELL;
        for (int64_t r = 0; r < count; r++) {
            const uint8_t *block = rows + r * row_bytes;
            int64_t at = places[r] % CELL;
            memcpy(scales + at, block, 2), block += 2;
            if (has_minima) memcpy(minima + at, block, 2), block += 2;
            for (int w = 0; w < FOURS / 2; w++, block += 4) memcpy(numbers + (w * CELL + at) * 4, block, 4);
        }
    }
}

/* ---- products ---- */

/* A cell of nibbles that was unpacked into bytes. */
ALWAYS void tile_of_bytes(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t cell, int at,
                          const Rows *x, int64_t first, float (*out)[CELL]) {
    floats sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = spread(0.0f);
    const half *scales = (const half *)m->scales + cell * m->groups * CELL + at;
    const half *minima = (const half *)m->minima + cell * m->groups * CELL + at;
    const int8_t *q = x->quantised + first * x->width;
    w += at * 4;
    for (int64_t g = 0; g < m->groups; g++, scales += CELL, minima += CELL, q += GROUP) {
        ints whole[TILE_ROWS][TILE_PARTS];
        for (int r = 0; r < rows; r++) {
            ints start = spread_int(kind == INT4 ? -8 * x->sums[g * x->stride + first + r] : 0);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = start;
        }
#pragma GCC unroll 8
        for (int f = 0; f < FOURS; f++, w += CELL * 4) {
            bytes weights[TILE_PARTS];
            for (int p = 0; p < TILE_PARTS; p++) weights[p] = load_bytes(w + p * LANES * 4);
            for (int r = 0; r < rows; r++) {
                bytes four = spread_word(q + r * x->width + f * 4);
                for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = dot_small(whole[r][p], weights[p], four);
            }
        }
        for (int p = 0; p < TILE_PARTS; p++) {
            floats scale = load_half(scales + p * LANES), minimum = spread(0.0f);
            if (kind == INT4M) minimum = load_half(minima + p * LANES);
            for (int r = 0; r < rows; r++) {
                int64_t of = g * x->stride + first + r;
                sum[r][p] = fused(as_floats(whole[r][p]), scale * spread(x->scales[of]), sum[r][p]);
                if (kind == INT4M) sum[r][p] = fused(minimum, spread(x->scaled_sums[of]), sum[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

/* The same from nibbles as they are packed, for few rows. */
ALWAYS void tile_of_nibbles(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t cell, int at,
                            const Rows *x, int64_t first, float (*out)[CELL]) {
    floats sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = spread(0.0f);
    const half *scales = (const half *)m->scales + cell * m->groups * CELL + at;
    const half *minima = (const half *)m->minima + cell * m->groups * CELL + at;
    const int8_t *q = x->quantised + first * x->width;
    w += at * 4;
    for (int64_t g = 0; g < m->groups; g++, scales += CELL, minima += CELL, q += GROUP) {
        ints whole[TILE_ROWS][TILE_PARTS];
        for (int r = 0; r < rows; r++) {
            ints start = spread_int(kind == INT4 ? -8 * x->sums[g * x->stride + first + r] : 0);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = start;
        }
#pragma GCC unroll 4
        for (int f = 0; f < FOURS / 2; f++, w += CELL * 4) {
            bytes low[TILE_PARTS], high[TILE_PARTS];
            for (int p = 0; p < TILE_PARTS; p++) {
                bytes both = load_bytes(w + p * LANES * 4);
                low[p] = low_nibbles(both), high[p] = high_nibbles(both);
            }
            for (int r = 0; r < rows; r++) {
                bytes four = spread_word(q + r * x->width + f * 4), later = spread_word(q + r * x->width + GROUP / 2 + f * 4);
                for (int p = 0; p < TILE_PARTS; p++)
                    whole[r][p] = dot_small(dot_small(whole[r][p], low[p], four), high[p], later);
            }
        }
        for (int p = 0; p < TILE_PARTS; p++) {
            floats scale = load_half(scales + p * LANES), minimum = spread(0.0f);
            if (kind == INT4M) minimum = load_half(minima + p * LANES);
            for (int r = 0; r < rows; r++) {
                int64_t of = g * x->stride + first + r;
                sum[r][p] = fused(as_floats(whole[r][p]), scale * spread(x->scales[of]), sum[r][p]);
                if (kind == INT4M) sum[r][p] = fused(minimum, spread(x->scaled_sums[of]), sum[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

static void unpack_cell(const Matrix *m, const uint8_t *packed, uint8_t *out) {
    for (int64_t g = 0; g < m->groups; g++)
        for (int f = 0; f < FOURS / 2; f++)
            for (int b = 0; b < CELL * 4; b += 4 * LANES, packed += 4 * LANES) {
                bytes both = load_bytes(packed), low = low_nibbles(both), high = high_nibbles(both);
                memcpy(out + (g * FOURS + f) * CELL * 4 + b, &low, sizeof low);
                memcpy(out + (g * FOURS + FOURS / 2 + f) * CELL * 4 + b, &high, sizeof high);
            }
}

#if defined(__aarch64__)
#include "matmul_neon.h"

static void nibbles_times_rows(const Matrix *m, int64_t cell, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    neon_cell_times_rows(m, cell, m->numbers + cell * cell_bytes(m), x, first, end, scratch, out);
}

#else

TILE(tile_int4, tile_of_nibbles, INT4)
TILE(tile_int4m, tile_of_nibbles, INT4M)
TILE(tile_int4_bytes, tile_of_bytes, INT4)
TILE(tile_int4m_bytes, tile_of_bytes, INT4M)

/* `scratch` holds a cell as bytes. */
static void nibbles_times_rows(const Matrix *m, int64_t cell, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    const uint8_t *w = m->numbers + cell * cell_bytes(m);
    Tile tile = m->kind == INT4 ? tile_int4 : tile_int4m;
    if (end - first >= UNPACK_FROM) {
        unpack_cell(m, w, scratch);
        w = scratch;
        tile = m->kind == INT4 ? tile_int4_bytes : tile_int4m_bytes;
    }
    tiles_times_rows(tile, TILE_ROWS, m, w, cell, x, first, end, out);
}

#endif
