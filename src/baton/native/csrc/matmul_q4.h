/* Products of weights of four bits and activations of eight that both have a scale for every 32 numbers.
 *
 *   Q4_0   scale * (nibble - 8)     Q4_1   scale * nibble + minimum
 *
 * with scales and minima as halves [panel][group][output]. These are GGUF's Q4_0 and Q4_1 with words of four bytes put
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
 *   quantized     [rows][width]
 *   scales        [groups][stride]: neighbouring rows are wanted together
 *   sums          [groups][stride] of the quantised numbers: for taking back an offset of the weights
 *   scaled_sums   [groups][stride] scale * sum: what a minimum of the weights is multiplied by
 */

/* In three passes over the row: none of them waits for a number that the step before has only just begun to work out. */
static void quantize_row_q8(const Rows *rows, int64_t row) {
    const float *restrict x = rows->plain + row * rows->width;
    int8_t *restrict q = rows->quantized + row * rows->width;
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

static void plan_q4(Matrix *m, int64_t sizes[3]) {
    m->groups = m->inputs / GROUP;
    sizes[1] = m->panels * m->groups * PANEL * 2;
    sizes[2] = m->kind == Q4_1 ? sizes[1] : 0;
}

/* The panel is written from its first byte to its last, and the rows are read side by side. */
static void pack_q4(const Matrix *m, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count) {
    int64_t panel = places[0] / PANEL, has_minima = m->kind == Q4_1, block_bytes = has_minima ? 20 : 18;
    uint8_t *numbers = (uint8_t *)m->numbers + panel * panel_bytes(m);
    for (int64_t g = 0; g < m->groups; g++, rows += block_bytes, numbers += GROUP_WORDS / 2 * PANEL * 4) {
        f16 *scales = (f16 *)m->scales + (panel * m->groups + g) * PANEL, *minima = (f16 *)m->minima + (panel * m->groups + g) * PANEL;
        for (int64_t r = 0; r < count; r++) {
            const uint8_t *block = rows + r * row_bytes;
            int64_t at = places[r] % PANEL;
            memcpy(scales + at, block, 2), block += 2;
            if (has_minima) memcpy(minima + at, block, 2), block += 2;
            for (int w = 0; w < GROUP_WORDS / 2; w++, block += 4) memcpy(numbers + (w * PANEL + at) * 4, block, 4);
        }
    }
}

/* ---- products ---- */

/* Sums of one group, in integers, from nibbles as they are packed: for few rows. Where the next group begins. */
ALWAYS const uint8_t *group_of_nibbles(const int rows, const uint8_t *w, const int8_t *q, int64_t width, i32v (*whole)[TILE_PARTS]) {
#pragma GCC unroll 4
    for (int f = 0; f < GROUP_WORDS / 2; f++, w += PANEL * 4) {
        i8v low[TILE_PARTS], high[TILE_PARTS];
        for (int p = 0; p < TILE_PARTS; p++) {
            i8v both = load_bytes(w + p * LANES * 4);
            low[p] = low_nibbles(both), high[p] = high_nibbles(both);
        }
        for (int r = 0; r < rows; r++) {
            i8v four = broadcast_word(q + r * width + f * 4), later = broadcast_word(q + r * width + GROUP / 2 + f * 4);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = dot_small(dot_small(whole[r][p], low[p], four), high[p], later);
        }
    }
    return w;
}

/* The same from a panel that was unpacked into bytes. */
ALWAYS const uint8_t *group_of_bytes(const int rows, const uint8_t *w, const int8_t *q, int64_t width, i32v (*whole)[TILE_PARTS]) {
#pragma GCC unroll 8
    for (int f = 0; f < GROUP_WORDS; f++, w += PANEL * 4) {
        i8v weights[TILE_PARTS];
        for (int p = 0; p < TILE_PARTS; p++) weights[p] = load_bytes(w + p * LANES * 4);
        for (int r = 0; r < rows; r++) {
            i8v four = broadcast_word(q + r * width + f * 4);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = dot_small(whole[r][p], weights[p], four);
        }
    }
    return w;
}

ALWAYS void tile_of_groups(const int rows, const int kind, const int unpacked, const Matrix *m, const uint8_t *w, int64_t panel, int at,
                           const Rows *x, int64_t first, float (*out)[PANEL]) {
    f32v sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = broadcast(0.0f);
    const f16 *scales = (const f16 *)m->scales + panel * m->groups * PANEL + at;
    const f16 *minima = m->minima + panel * m->groups * PANEL + at;
    const int8_t *q = x->quantized + first * x->width;
    w += at * 4;
    for (int64_t g = 0; g < m->groups; g++, scales += PANEL, minima += PANEL, q += GROUP) {
        i32v whole[TILE_ROWS][TILE_PARTS];
        for (int r = 0; r < rows; r++) {
            i32v start = broadcast_int(kind == Q4_0 ? -8 * x->sums[g * x->stride + first + r] : 0);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = start;
        }
        w = unpacked ? group_of_bytes(rows, w, q, x->width, whole) : group_of_nibbles(rows, w, q, x->width, whole);
        for (int p = 0; p < TILE_PARTS; p++) {
            f32v scale = load_f16(scales + p * LANES), minimum = broadcast(0.0f);
            if (kind == Q4_1) minimum = load_f16(minima + p * LANES);
            for (int r = 0; r < rows; r++) {
                int64_t of = g * x->stride + first + r;
                sum[r][p] = fma_lanes(as_floats(whole[r][p]), scale * broadcast(x->scales[of]), sum[r][p]);
                if (kind == Q4_1) sum[r][p] = fma_lanes(minimum, broadcast(x->scaled_sums[of]), sum[r][p]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

ALWAYS void tile_of_nibbles(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t panel, int at, const Rows *x,
                            int64_t first, float (*out)[PANEL]) {
    tile_of_groups(rows, kind, 0, m, w, panel, at, x, first, out);
}

ALWAYS void tile_of_bytes(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t panel, int at, const Rows *x,
                          int64_t first, float (*out)[PANEL]) {
    tile_of_groups(rows, kind, 1, m, w, panel, at, x, first, out);
}

#if defined(__aarch64__)
#include "matmul_neon.h"

static void q4_times_rows(const Matrix *m, int64_t panel, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    neon_panel_times_rows(m, panel, m->numbers + panel * panel_bytes(m), x, first, end, scratch, out);
}

#else

static void unpack_panel(const Matrix *m, const uint8_t *packed, uint8_t *out) {
    for (int64_t g = 0; g < m->groups; g++)
        for (int f = 0; f < GROUP_WORDS / 2; f++)
            for (int b = 0; b < PANEL * 4; b += 4 * LANES, packed += 4 * LANES) {
                i8v both = load_bytes(packed), low = low_nibbles(both), high = high_nibbles(both);
                memcpy(out + (g * GROUP_WORDS + f) * PANEL * 4 + b, &low, sizeof low);
                memcpy(out + (g * GROUP_WORDS + GROUP_WORDS / 2 + f) * PANEL * 4 + b, &high, sizeof high);
            }
}

TILE(tile_q4_0, tile_of_nibbles, Q4_0)
TILE(tile_q4_1, tile_of_nibbles, Q4_1)
TILE(tile_q4_0_unpacked, tile_of_bytes, Q4_0)
TILE(tile_q4_1_unpacked, tile_of_bytes, Q4_1)

/* `scratch` holds a panel as bytes. */
static void q4_times_rows(const Matrix *m, int64_t panel, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    const uint8_t *w = m->numbers + panel * panel_bytes(m);
    Tile tile = m->kind == Q4_0 ? tile_q4_0 : tile_q4_1;
    if (end - first >= UNPACK_FROM) {
        unpack_panel(m, w, scratch);
        w = scratch;
        tile = m->kind == Q4_0 ? tile_q4_0_unpacked : tile_q4_1_unpacked;
    }
    tiles_times_rows(tile, TILE_ROWS, m, w, panel, x, first, end, out);
}

#endif
