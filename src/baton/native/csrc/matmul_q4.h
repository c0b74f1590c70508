/* Products with GGUF's own weights: four bits, and for the output head eight. Both sides have a scale for every 32 numbers.
 *
 *   Q4_0           scale * (nibble - 8)
 *   Q4_1           scale * nibble + minimum
 *   MXFP4          scale * E2M1_TWICE[nibble]
 *   GROUPED_INT8   scale * byte                 Q8_0 of the file
 *
 * with scales and minima as halves [panel][group][output], and of MXFP4 as exponents in bytes. Words of four bytes are put elsewhere: no
 * number changes.
 *
 * An activation is one byte, or two where its group is much larger than most groups of its row. Rounding errors are as large as the
 * largest number of a group, and a few groups have nearly all of them: two bytes for about every fifth group leave an eighth of what
 * one byte for all costs (docs/internals/quantisation.md). Before the head, which is one product of many, every group has two. A group that needs no second byte has zeros there, which changes no sum:
 * so a tile reads second bytes only where one of its rows has some, and bits do not depend on the rows beside.
 *
 * A product of a group is exact, in integers; sums over groups are one chain of fused multiply-adds in the order of the
 * groups: the same comes out of every kernel of this file and of matmul_neon.h.
 */
#pragma once

#include "matrix.h"

#define LEAST 1e-36f        /* the inverse of a largest number below it would be infinite: such a group is all zeros */
#define NARROW_MOST 127     /* of a number in one byte */
#define WIDE_MOST 8159      /* of one in two: 64 * 127 + 31. Sums of a group, times nibbles, stay below 2^22 (neon_dot.h) */
#define WIDE_OVER (9 << 19)   /* 9/16 of an octave: a group that is larger than the mean by more is wide. With it about a fifth is */
#define MEAN_DEPTH (16 << 23) /* octaves: a group that is smaller by more counts as if it was no smaller than that */
#define NOT_FINITE_BITS 0x7f800000

/* ---- rows ----
 *
 *   quantized, upper   [rows][width]: a number is 64 * upper + quantized; `upper` is zeros where a group is not wide
 *   wide               [groups][stride]: not 0 where it is
 *   scales             [groups][stride]: neighbouring rows are wanted together
 *   sums               [groups][stride] of the numbers: for taking back an offset of the weights
 *   scaled_sums        [groups][stride] scale * sum: what a minimum of the weights is multiplied by
 */

/* Bits of a number that is not negative count up with its logarithm, nearly: so the mean of the bits is about that of a geometric mean,
 * which single large groups hardly move; and integers have one sum in any order. Returns what the bits of a wide group are above. */
ALWAYS int64_t wide_above(const int32_t *bits, int64_t groups) {
    int64_t most = 0, sum = 0;
    for (int64_t g = 0; g < groups; g++) most = bits[g] > most ? bits[g] : most;
    for (int64_t g = 0; g < groups; g++) sum += max_int(bits[g], most - MEAN_DEPTH);
    return sum / max_int(groups, 1) + WIDE_OVER;
}

/* A group as numbers of two bytes; returns their sum. */
ALWAYS int32_t wide_group(const float *restrict x, float inverse, int8_t *restrict q, int8_t *restrict upper) {
    int32_t sum = 0;
    for (int j = 0; j < GROUP; j++) {
        int32_t whole = (int32_t)((x[j] * inverse + 12582912.0f) - 12582912.0f), above = (whole + 32) >> 6;
        upper[j] = (int8_t)above, q[j] = (int8_t)(whole - 64 * above), sum += whole;
    }
    return sum;
}

/* In three passes over the row: none of them waits for a number that the step before has only just begun to work out. */
static void quantize_row_q8(const Matrix *m, const Rows *rows, int64_t row) {
    const float *restrict x = rows->plain + row * rows->width;
    int8_t *restrict q = rows->quantized + row * rows->width, *restrict upper = rows->upper + row * rows->width;
    float largest[rows->groups], scales[rows->groups], inverses[rows->groups];
    int32_t bits[rows->groups];
    for (int64_t g = 0; g < rows->groups; g++) largest[g] = largest_of(x + g * GROUP, GROUP);
    memcpy(bits, largest, sizeof bits);
    int64_t above = m->kind == GROUPED_INT8 ? -1 : wide_above(bits, rows->groups);
    for (int64_t g = 0; g < rows->groups; g++) {
        float most = bits[g] > above && bits[g] < NOT_FINITE_BITS ? WIDE_MOST : NARROW_MOST;
        scales[g] = largest[g] / most;
        inverses[g] = largest[g] > LEAST ? most / largest[g] : 0.0f;
    }
    for (int64_t g = 0; g < rows->groups; g++) {
        int wide = bits[g] > above && bits[g] < NOT_FINITE_BITS;
        int32_t sum;
        if (wide) sum = wide_group(x + g * GROUP, inverses[g], q + g * GROUP, upper + g * GROUP);
        else sum = bytes_of_group(x + g * GROUP, inverses[g], q + g * GROUP), memset(upper + g * GROUP, 0, GROUP);
        int64_t at = g * rows->stride + row;
        rows->scales[at] = scales[g];
        rows->sums[at] = sum;
        rows->scaled_sums[at] = scales[g] * (float)sum;
        rows->wide[at] = wide;
    }
}

static void copy_row_q8(const Rows *from, int64_t row, const Rows *into, int64_t to) {
    memcpy(into->quantized + to * into->width, from->quantized + row * from->width, (size_t)from->width);
    memcpy(into->upper + to * into->width, from->upper + row * from->width, (size_t)from->width);
    for (int64_t g = 0; g < from->groups; g++) {
        int64_t at = g * into->stride + to, of = g * from->stride + row;
        into->scales[at] = from->scales[of], into->sums[at] = from->sums[of];
        into->scaled_sums[at] = from->scaled_sums[of], into->wide[at] = from->wide[of];
    }
}

/* Whether any of `rows` rows is wide there. `of`: the group of the first row. */
ALWAYS int any_wide(const int rows, const Rows *x, int64_t of) {
    int32_t any = 0;
    for (int r = 0; r < rows; r++) any |= x->wide[of + r];
    return any != 0;
}

/* ---- weights ---- */

/* Bytes of the scale of one group and output. */
ALWAYS int64_t scale_bytes(const int kind) { return kind == MXFP4 ? 1 : 2; }

static void plan_q4(Matrix *m, int64_t sizes[3]) {
    m->groups = m->inputs / GROUP;
    sizes[1] = m->panels * m->groups * PANEL * scale_bytes(m->kind);
    sizes[2] = m->kind == Q4_1 ? sizes[1] : 0;
}

/* Numbers of a block are doubled, so its scale is halved. A power of two below the normal floats becomes zero. */
ALWAYS uint8_t half_exponent(uint8_t exponent) { return exponent < 2 ? 0 : (uint8_t)(exponent - 1); }

/* The panel is written from its first byte to its last, and the rows are read side by side. */
static void pack_q4(const Matrix *m, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count) {
    int64_t panel = places[0] / PANEL, has_minima = m->kind == Q4_1, words = m->kind == GROUPED_INT8 ? GROUP_WORDS : GROUP_WORDS / 2;
    int64_t of_scale = scale_bytes(m->kind), block_bytes = of_scale + 2 * has_minima + 4 * words;
    uint32_t offset = m->kind == GROUPED_INT8 ? WEIGHT8_OFFSET * 0x01010101u : 0;  /* 128 in each byte, or nothing: no carry either way */
    uint8_t *numbers = (uint8_t *)m->numbers + panel * panel_bytes(m);
    for (int64_t g = 0; g < m->groups; g++, rows += block_bytes, numbers += words * PANEL * 4) {
        uint8_t *scales = (uint8_t *)m->scales + (panel * m->groups + g) * PANEL * of_scale;
        f16 *minima = (f16 *)m->minima + (panel * m->groups + g) * PANEL;
        for (int64_t r = 0; r < count; r++) {
            const uint8_t *block = rows + r * row_bytes;
            int64_t at = places[r] % PANEL;
            if (m->kind == MXFP4) scales[at] = half_exponent(block[0]);
            else memcpy(scales + 2 * at, block, 2);
            block += of_scale;
            if (has_minima) memcpy(minima + at, block, 2), block += 2;
            for (int64_t w = 0; w < words; w++, block += 4) {
                uint32_t word;
                memcpy(&word, block, 4);
                word ^= offset;
                memcpy(numbers + (w * PANEL + at) * 4, &word, 4);
            }
        }
    }
}

/* ---- products ---- */

/* Sums of one group, in integers, from nibbles as they are packed: for few rows. Where the next group begins. */
ALWAYS const uint8_t *group_of_nibbles(const int rows, const int kind, const uint8_t *w, const int8_t *q, int64_t width, i32v (*whole)[TILE_PARTS]) {
#pragma GCC unroll 4
    for (int f = 0; f < GROUP_WORDS / 2; f++, w += PANEL * 4) {
        i8v low[TILE_PARTS], high[TILE_PARTS];
        for (int p = 0; p < TILE_PARTS; p++) {
            i8v both = load_bytes(w + p * LANES * 4);
            low[p] = low_nibbles(both), high[p] = high_nibbles(both);
            if (kind == MXFP4) low[p] = bytes_of_e2m1(low[p]), high[p] = bytes_of_e2m1(high[p]);
        }
        for (int r = 0; r < rows; r++) {
            i8v four = broadcast_word(q + r * width + f * 4), later = broadcast_word(q + r * width + GROUP / 2 + f * 4);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = dot_small(dot_small(whole[r][p], low[p], four), high[p], later);
        }
    }
    return w;
}

/* The same from a panel that was unpacked into bytes, or that has nothing else. */
ALWAYS const uint8_t *group_of_bytes(const int rows, const int kind, const uint8_t *w, const int8_t *q, int64_t width, i32v (*whole)[TILE_PARTS]) {
#pragma GCC unroll 8
    for (int f = 0; f < GROUP_WORDS; f++, w += PANEL * 4) {
        i8v weights[TILE_PARTS];
        for (int p = 0; p < TILE_PARTS; p++) weights[p] = load_bytes(w + p * LANES * 4);
        for (int r = 0; r < rows; r++) {
            i8v four = broadcast_word(q + r * width + f * 4);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = kind == GROUPED_INT8 ? dot_full(whole[r][p], weights[p], four) : dot_small(whole[r][p], weights[p], four);
        }
    }
    return w;
}

ALWAYS const uint8_t *group_of(const int rows, const int kind, const int bytes, const uint8_t *w, const int8_t *q, int64_t width,
                               i32v (*whole)[TILE_PARTS]) {
    return bytes ? group_of_bytes(rows, kind, w, q, width, whole) : group_of_nibbles(rows, kind, w, q, width, whole);
}

/* First value of the sums: takes the offset of the weights back. */
ALWAYS i32v group_start(const int kind, int32_t sum) {
    return broadcast_int(-(kind == Q4_0 ? 8 : kind == MXFP4 ? E2M1_OFFSET : WEIGHT8_OFFSET) * sum);
}

ALWAYS const uint8_t *panel_scales(const Matrix *m, int64_t panel) {
    return (const uint8_t *)m->scales + panel * m->groups * PANEL * scale_bytes(m->kind);
}

ALWAYS f32v load_scales(const int kind, const uint8_t *scales, int64_t at) {
    return kind == MXFP4 ? load_exponents(scales + at) : load_f16((const f16 *)(const void *)scales + at);
}

ALWAYS void tile_of_groups(const int rows, const int kind, const int bytes, const Matrix *m, const uint8_t *w, int64_t panel, int at,
                           const Rows *x, int64_t first, float (*out)[PANEL]) {
    f32v sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = broadcast(0.0f);
    const uint8_t *scales = panel_scales(m, panel) + at * scale_bytes(kind);
    const f16 *minima = m->minima + panel * m->groups * PANEL + at;
    const int8_t *q = x->quantized + first * x->width, *upper = x->upper + first * x->width;
    w += at * 4;
    for (int64_t g = 0; g < m->groups; g++, scales += PANEL * scale_bytes(kind), minima += PANEL, q += GROUP, upper += GROUP) {
        i32v whole[TILE_ROWS][TILE_PARTS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = broadcast_int(0);
        if (any_wide(rows, x, g * x->stride + first)) {
            group_of(rows, kind, bytes, w, upper, x->width, whole);
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = times_64(whole[r][p]);
        }
        if (kind != Q4_1)
            for (int r = 0; r < rows; r++)
                for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = sum_of(whole[r][p], group_start(kind, x->sums[g * x->stride + first + r]));
        w = group_of(rows, kind, bytes, w, q, x->width, whole);
        for (int p = 0; p < TILE_PARTS; p++) {
            f32v scale = load_scales(kind, scales, p * LANES), minimum = broadcast(0.0f);
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
                if (m->kind == MXFP4) low = bytes_of_e2m1(low), high = bytes_of_e2m1(high);
                memcpy(out + (g * GROUP_WORDS + f) * PANEL * 4 + b, &low, sizeof low);
                memcpy(out + (g * GROUP_WORDS + GROUP_WORDS / 2 + f) * PANEL * 4 + b, &high, sizeof high);
            }
}

TILE(tile_q4_0, tile_of_nibbles, Q4_0)
TILE(tile_q4_1, tile_of_nibbles, Q4_1)
TILE(tile_q4_0_unpacked, tile_of_bytes, Q4_0)
TILE(tile_q4_1_unpacked, tile_of_bytes, Q4_1)
TILE(tile_mxfp4, tile_of_nibbles, MXFP4)
TILE(tile_mxfp4_unpacked, tile_of_bytes, MXFP4)
TILE(tile_q8_0, tile_of_bytes, GROUPED_INT8)

/* `scratch` holds a panel as bytes. */
static void q4_times_rows(const Matrix *m, int64_t panel, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    const uint8_t *w = m->numbers + panel * panel_bytes(m);
    Tile tile = m->kind == Q4_0 ? tile_q4_0 : m->kind == Q4_1 ? tile_q4_1 : m->kind == MXFP4 ? tile_mxfp4 : tile_q8_0;
    if (m->kind != GROUPED_INT8 && end - first >= UNPACK_FROM) {
        unpack_panel(m, w, scratch);
        w = scratch;
        tile = m->kind == Q4_0 ? tile_q4_0_unpacked : m->kind == Q4_1 ? tile_q4_1_unpacked : tile_mxfp4_unpacked;
    }
    tiles_times_rows(tile, TILE_ROWS, m, w, panel, x, first, end, out);
}

#endif
