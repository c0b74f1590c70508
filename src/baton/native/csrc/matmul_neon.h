/* Quantised products on ARM: vectors of four outputs, 32 registers, and activations that are multiplied out of the lane they
 * were loaded into instead of being spread first.
 *
 *   dots    up to four rows. The fewer rows, the more outputs beside each other: the sums of a group, which are whole, and the
 *           sums over groups, which are not, take 2 * DOTS registers, and all of them stay where they are.
 *   squares many rows, where the processor multiplies 2 rows by 2 outputs in one instruction, 8 numbers deep. Sums keep that
 *           shape from the first group to the last:  row 0 output 0, row 0 output 1, row 1 output 0, row 1 output 1.
 *
 * The integers are the same as those of matmul_q4.h and matmul_int8.h, and so are the sums over groups: bit for bit.
 */
#pragma once

#include "matmul_int8.h"
#include "neon_dot.h"

#define DOTS 8           /* vectors of sums of a tile of dots: rows times parts */
#define DOTS_ROWS 4      /* of a tile at most */
#define STRIP 8          /* outputs of a tile of squares */

typedef enum { AS_BYTES, AS_NIBBLES } Form;

/* ---- dots ---- */

/* A cell as a tile of dots reads it. */
typedef struct {
    const uint8_t *numbers;         /* packed; or bytes from -8 to 7 (INT4), 0 to 15 (INT4M) */
    const void *scales, *minima;    /* [group][output] halves; of bytes, floats */
} DotCell;

/* `rows` rows times `parts` vectors of outputs of a cell, from `at` on. Of each product, `whole` is the sum of a group and `sum` the
 * one over groups. Conversions have half of one pipe on a Neoverse-N1: so `whole` begins where it is a float (neon_dot.h), and
 * scales of a cell that many rows share were made floats before. */
ALWAYS void dots_tile(const int rows, const int parts, const Form form, const int kind, const DotCell *c, int64_t groups, int at,
                      const Rows *x, int64_t first, float (*out)[CELL]) {
    const int words = form == AS_BYTES ? FOURS : FOURS / 2, scale_bytes = form == AS_BYTES ? 4 : 2;
    const uint8_t *w = c->numbers + at * 4, *scales = (const uint8_t *)c->scales + at * scale_bytes;
    const uint8_t *minima = (const uint8_t *)c->minima + at * scale_bytes;
    const int8_t *row = x->quantised + first * x->width;
    floats sum[DOTS_ROWS][DOTS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) sum[r][p] = spread(0.0f);
    for (int64_t g = 0; g < groups; g++, scales += CELL * scale_bytes, minima += CELL * scale_bytes, row += GROUP) {
        int64_t of = g * x->stride + first;
        ints whole[DOTS_ROWS][DOTS];
        bytes q[2][DOTS_ROWS];
        UNROLL for (int r = 0; r < rows; r++) {
            q[0][r] = vld1q_s8(row + r * x->width), q[1][r] = vld1q_s8(row + r * x->width + 16);
            UNROLL for (int p = 0; p < parts; p++)
                whole[r][p] = kind == INT4 && form == AS_NIBBLES ? spread_int(SUM_START - 8 * x->sums[of + r]) : loaded_start();
        }
        UNROLL for (int f = 0; f < words; f++, w += CELL * 4) {
            IN_ORDER;
            bytes both[DOTS];
            if (form == AS_BYTES && rows > 2) load_two(w, both);
            else UNROLL for (int p = 0; p < parts; p++) both[p] = load_bytes(w + p * LANES * 4);
            UNROLL for (int p = 0; p < parts; p++) {
                bytes low = low_nibbles(both[p]), high = high_nibbles(both[p]);
                UNROLL for (int r = 0; r < rows; r++) {
                    if (form == AS_BYTES) whole[r][p] = dot_word(whole[r][p], both[p], q[f / 4][r], f % 4);
                    else whole[r][p] = dot_word(dot_word(whole[r][p], low, q[0][r], f), high, q[1][r], f);
                }
            }
        }
        /* Rows of a tile lie beside each other, and there is room for more than there are. */
        floats row_scales = load(x->scales + of), row_sums = kind == INT4M ? load(x->scaled_sums + of) : row_scales;
        UNROLL for (int p = 0; p < parts; p++) {
            floats scale = form == AS_BYTES ? load((const float *)(const void *)scales + p * LANES)
                                            : load_half((const half *)(const void *)scales + p * LANES);
            UNROLL for (int r = 0; r < rows; r++)
                sum[r][p] = fused(float_of_sum(whole[r][p]), of_lane(scale, row_scales, r), sum[r][p]);
            if (kind != INT4M) continue;
            floats minimum = form == AS_BYTES ? load((const float *)(const void *)minima + p * LANES)
                                              : load_half((const half *)(const void *)minima + p * LANES);
            UNROLL for (int r = 0; r < rows; r++) sum[r][p] = fused_lane(minimum, row_sums, r, sum[r][p]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

ALWAYS void dots_of_cell(const int rows, const Form form, const int kind, const DotCell *c, int64_t groups, const Rows *x, int64_t first,
                         float (*out)[CELL]) {
    const int parts = rows == 1 ? DOTS : rows == 2 ? DOTS / 2 : DOTS / 4;
    for (int at = 0; at < CELL; at += parts * LANES) dots_tile(rows, parts, form, kind, c, groups, at, x, first, out);
}

/* Functions of their own for each number of rows: gcc 12 then keeps all sums in registers. */
#define DOTS_OF_CELL(rows, form, kind)                                                                                                \
    static __attribute__((noinline)) void dots_##rows##_##form##_##kind(const DotCell *c, int64_t groups, const Rows *x, int64_t first, \
                                                                       float (*out)[CELL]) {                                         \
        dots_of_cell(rows, form, kind, c, groups, x, first, out);                                                                    \
    }
#define DOTS_OF_CELLS(form, kind)                                                                                                     \
    DOTS_OF_CELL(1, form, kind) DOTS_OF_CELL(2, form, kind) DOTS_OF_CELL(3, form, kind) DOTS_OF_CELL(4, form, kind)                    \
    static const DotsOfCell dots_##form##_##kind[DOTS_ROWS] = {dots_1_##form##_##kind, dots_2_##form##_##kind, dots_3_##form##_##kind, \
                                                               dots_4_##form##_##kind};
typedef void (*DotsOfCell)(const DotCell *, int64_t, const Rows *, int64_t, float (*)[CELL]);
DOTS_OF_CELLS(AS_NIBBLES, INT4)
DOTS_OF_CELLS(AS_NIBBLES, INT4M)
DOTS_OF_CELLS(AS_BYTES, INT4)
DOTS_OF_CELLS(AS_BYTES, INT4M)

/* The cell as bytes, its scales and its minima as floats, in `scratch`. */
static DotCell unpack_for_dots(const Matrix *m, const DotCell *packed, uint8_t *scratch) {
    float *scales = (float *)(void *)(scratch + m->groups * GROUP * CELL), *minima = scales + m->groups * CELL;
    const uint8_t *from = packed->numbers;
    const bytes offset = vdupq_n_s8(m->kind == INT4 ? 8 : 0);
    for (int64_t g = 0; g < m->groups; g++)
        for (int f = 0; f < FOURS / 2; f++)
            for (int b = 0; b < CELL * 4; b += 16, from += 16) {
                int8_t *to = (int8_t *)scratch + (g * FOURS + f) * CELL * 4 + b;
                bytes both = load_bytes(from);
                vst1q_s8(to, vsubq_s8(low_nibbles(both), offset));
                vst1q_s8(to + FOURS / 2 * CELL * 4, vsubq_s8(high_nibbles(both), offset));
            }
    for (int64_t i = 0; i < m->groups * CELL; i += LANES) {
        store(scales + i, load_half((const half *)packed->scales + i));
        if (m->kind == INT4M) store(minima + i, load_half((const half *)packed->minima + i));
    }
    return (DotCell){scratch, scales, minima};
}

static void dots_cell_times_rows(const Matrix *m, int64_t cell, const uint8_t *w, const Rows *x, int64_t first, int64_t end,
                                 uint8_t *scratch, const Out *out) {
    DotCell c = {w, (const half *)m->scales + cell * m->groups * CELL, (const half *)m->minima + cell * m->groups * CELL};
    const DotsOfCell *dots = m->kind == INT4 ? dots_AS_NIBBLES_INT4 : dots_AS_NIBBLES_INT4M;
    if (end - first >= UNPACK_FROM) {
        c = unpack_for_dots(m, &c, scratch);
        dots = m->kind == INT4 ? dots_AS_BYTES_INT4 : dots_AS_BYTES_INT4M;
    }
    while (first < end) {
        float results[DOTS_ROWS][CELL];
        int64_t rows = smaller(DOTS_ROWS, end - first);
        dots[rows - 1](&c, m->groups, x, first, results);
        finish(m, cell, rows, results, first, out);
        first += rows;
    }
}

/* ---- squares ---- */

#if defined(__ARM_FEATURE_MATMUL_INT8)

/* Words of two fours become eights: those of outputs 0 and 1, those of 2 and 3. */
ALWAYS void zip_words(bytes a, bytes b, bytes *out) {
    out[0] = vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
    out[1] = vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

/* The same for the eights of two rows: the first eight of both, the second of both. */
ALWAYS void zip_eights(bytes a, bytes b, bytes *out) {
    out[0] = vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
    out[1] = vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

/* The cell as signed bytes, strip by strip: [4][group][4 eights][8 outputs][8]. */
ALWAYS void squares_unpack(const int kind, int64_t groups, const uint8_t *packed, uint8_t *out) {
    const int words = kind == INT8 ? FOURS : FOURS / 2;
    const bytes eight = vdupq_n_s8(8);
    for (int64_t g = 0; g < groups; g++)
        UNROLL for (int f = 0; f < words; f += 2, packed += 2 * CELL * 4)
            UNROLL for (int at = 0; at < CELL; at += LANES) {
                int8_t *to = (int8_t *)out + ((at / STRIP * groups + g) * GROUP + f * 4) * STRIP + at % STRIP * 8;
                bytes eights[2];
                zip_words(load_bytes(packed + at * 4), load_bytes(packed + (CELL + at) * 4), eights);
                UNROLL for (int i = 0; i < 2; i++, to += 16) {
                    bytes low = low_nibbles(eights[i]), high = high_nibbles(eights[i]);
                    if (kind == INT4) low = vsubq_s8(low, eight), high = vsubq_s8(high, eight);
                    vst1q_s8(to, kind == INT8 ? eights[i] : low);
                    if (kind != INT8) vst1q_s8(to + GROUP / 2 * STRIP, high);
                }
            }
}

/* A number of each of two neighbouring outputs, for both rows; of each of two neighbouring rows, for both outputs. */
ALWAYS floats of_outputs(floats x, const int high) {
    float64x2_t two = vreinterpretq_f64_f32(x);
    return vreinterpretq_f32_f64(high ? vzip2q_f64(two, two) : vzip1q_f64(two, two));
}
ALWAYS floats of_rows(floats x, const int high) { return high ? vzip2q_f32(x, x) : vzip1q_f32(x, x); }

/* 2 * `pairs` rows times one strip. `q` says where the quantised rows are: what fills up a last pair may be any of them. (Of
 * scales, which lie beside each other, there is room for more than there are rows.) */
ALWAYS void squares_tile(const int pairs, const int kind, const Matrix *m, const uint8_t *w, const half *scales,
                         const half *minima, const Rows *x, int64_t first, const int8_t *const *q, float (*out)[CELL], int at) {
    floats sum[2][STRIP / 2];
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) sum[i][j] = spread(0.0f);
    const float *row_scales = x->scales + first, *row_sums = x->scaled_sums + first;
    for (int64_t g = 0; g < m->groups; g++, row_scales += x->stride, row_sums += x->stride, scales += CELL, minima += CELL) {
        ints whole[2][STRIP / 2];
        UNROLL for (int i = 0; i < pairs; i++)
            UNROLL for (int j = 0; j < STRIP / 2; j++) whole[i][j] = spread_int(0);
        UNROLL for (int h = 0; h < GROUP; h += 16) {
            bytes eights[2][2];
            UNROLL for (int i = 0; i < pairs; i++)
                zip_eights(vld1q_s8(q[2 * i] + g * GROUP + h), vld1q_s8(q[2 * i + 1] + g * GROUP + h), eights[i]);
            UNROLL for (int e = 0; e < 2; e++)
                UNROLL for (int j = 0; j < STRIP / 2; j++, w += 16) {
                    bytes weights = load_bytes(w);
                    UNROLL for (int i = 0; i < pairs; i++) whole[i][j] = vmmlaq_s32(whole[i][j], eights[i][e], weights);
                }
        }
        floats row_scale = load(row_scales), row_sum = load(row_sums);
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            floats scale = of_outputs(load_half(scales + j / 2 * LANES), j % 2), minimum = spread(0.0f);
            if (kind == INT4M) minimum = of_outputs(load_half(minima + j / 2 * LANES), j % 2);
            UNROLL for (int i = 0; i < pairs; i++) {
                sum[i][j] = fused(as_floats(whole[i][j]), scale * of_rows(row_scale, i), sum[i][j]);
                if (kind == INT4M) sum[i][j] = fused(minimum, of_rows(row_sum, i), sum[i][j]);
            }
        }
    }
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            vst1_f32(&out[2 * i][at + 2 * j], vget_low_f32(sum[i][j]));
            vst1_f32(&out[2 * i + 1][at + 2 * j], vget_high_f32(sum[i][j]));
        }
}

#define SQUARES_TILE(name, kind)                                                                                           \
    static void name(int64_t rows, const Matrix *m, const uint8_t *w, const half *s, const half *n, const Rows *x,         \
                     int64_t first, const int8_t *const *q, float (*out)[CELL], int at) {                                  \
        if (rows > 2) squares_tile(2, kind, m, w, s, n, x, first, q, out, at);                                             \
        else squares_tile(1, kind, m, w, s, n, x, first, q, out, at);                                                      \
    }

SQUARES_TILE(squares_plain, INT4)  /* whose offset is gone by now */
SQUARES_TILE(squares_minima, INT4M)

static void squares_cell_times_rows(const Matrix *m, int64_t cell, const uint8_t *packed, const Rows *x, int64_t first,
                                    int64_t end, uint8_t *scratch, const Out *out) {
    const half *scales = (const half *)m->scales + cell * m->groups * CELL;
    const half *minima = (const half *)m->minima + cell * m->groups * CELL;
    if (m->kind == INT4) squares_unpack(INT4, m->groups, packed, scratch);
    else squares_unpack(INT4M, m->groups, packed, scratch);
    while (first < end) {
        float results[4][CELL];
        int64_t rows = smaller(4, end - first);
        const int8_t *q[4];
        for (int r = 0; r < 4; r++) q[r] = x->quantised + smaller(first + r, end - 1) * x->width;
        for (int at = 0; at < CELL; at += STRIP)
            (m->kind == INT4M ? squares_minima : squares_plain)(rows, m, scratch + at * m->groups * GROUP, scales + at,
                                                                minima + at, x, first, q, results, at);
        finish(m, cell, rows, results, first, out);
        first += rows;
    }
}

#endif

static void neon_cell_times_rows(const Matrix *m, int64_t cell, const uint8_t *packed, const Rows *x, int64_t first,
                                 int64_t end, uint8_t *scratch, const Out *out) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (end - first >= SQUARES_FROM) {
        squares_cell_times_rows(m, cell, packed, x, first, end, scratch, out);
        return;
    }
#endif
    dots_cell_times_rows(m, cell, packed, x, first, end, scratch, out);
}

/* ---- bytes: one sum from the first input to the last ---- */

/* `rows` rows times `parts` vectors of outputs of a cell, from `at` on. */
ALWAYS void byte_dots(const int rows, const int parts, const Matrix *m, const uint8_t *w, int64_t cell, int at, const Rows *x,
                      int64_t first, float (*out)[CELL]) {
    ints sum[DOTS_ROWS][DOTS];
    const int8_t *q = x->quantised + first * padded(x);
    const float *units = (const float *)m->scales + cell * CELL + at;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) sum[r][p] = spread_int(0);
    w += at * 4;
    for (int64_t k = 0; k < m->groups * GROUP; k += 16) {
        bytes sixteen[DOTS_ROWS];
        UNROLL for (int r = 0; r < rows; r++) sixteen[r] = vld1q_s8(q + r * padded(x) + k);
        UNROLL for (int f = 0; f < 4; f++, w += CELL * 4) {
            IN_ORDER;
            UNROLL for (int p = 0; p < parts; p++) {
                bytes weights = load_bytes(w + p * LANES * 4);
                UNROLL for (int r = 0; r < rows; r++) sum[r][p] = dot_word(sum[r][p], weights, sixteen[r], f);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++)
            store(&out[r][at + p * LANES], byte_value(sum[r][p], load(units + p * LANES), x->scales[first + r]));
}

/* Up to 16 sums, and their weights and rows, stay in registers. */
static void byte_dots_of_cell(int rows, const Matrix *m, const uint8_t *w, int64_t cell, const Rows *x, int64_t first, float (*out)[CELL]) {
    if (rows == 1) byte_dots(1, DOTS, m, w, cell, 0, x, first, out);
    else if (rows == 2) byte_dots(2, DOTS, m, w, cell, 0, x, first, out);
    else
        for (int at = 0; at < CELL; at += CELL / 2) {
            if (rows == 3) byte_dots(3, DOTS / 2, m, w, cell, at, x, first, out);
            else byte_dots(4, DOTS / 2, m, w, cell, at, x, first, out);
        }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

#define BYTE_PAIRS 4  /* of rows: 8 x 8 sums take 16 registers */

/* 2 * `pairs` rows times one strip of a cell that squares_unpack() has put in order. */
ALWAYS void byte_squares(const int pairs, int64_t inputs, const uint8_t *w, const int8_t *const *q, int32_t (*out)[CELL], int at) {
    ints sum[BYTE_PAIRS][STRIP / 2];
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) sum[i][j] = spread_int(0);
    for (int64_t k = 0; k < inputs; k += 16) {
        bytes eights[BYTE_PAIRS][2];
        UNROLL for (int i = 0; i < pairs; i++) zip_eights(vld1q_s8(q[2 * i] + k), vld1q_s8(q[2 * i + 1] + k), eights[i]);
        UNROLL for (int e = 0; e < 2; e++)
            UNROLL for (int j = 0; j < STRIP / 2; j++, w += 16) {
                bytes weights = load_bytes(w);
                UNROLL for (int i = 0; i < pairs; i++) sum[i][j] = vmmlaq_s32(sum[i][j], eights[i][e], weights);
            }
    }
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            vst1_s32(&out[2 * i][at + 2 * j], vget_low_s32(sum[i][j]));
            vst1_s32(&out[2 * i + 1][at + 2 * j], vget_high_s32(sum[i][j]));
        }
}

static void byte_squares_times_rows(const Matrix *m, int64_t cell, const uint8_t *packed, const Rows *x, int64_t first, int64_t end,
                                    uint8_t *scratch, const Out *out) {
    const int64_t most = 2 * BYTE_PAIRS, inputs = m->groups * GROUP;
    const float *units = (const float *)m->scales + cell * CELL;
    squares_unpack(INT8, m->groups, packed, scratch);
    for (int64_t rows; first < end; first += rows) {
        int32_t sums[2 * BYTE_PAIRS][CELL];
        float results[2 * BYTE_PAIRS][CELL];
        const int8_t *q[2 * BYTE_PAIRS];
        rows = smaller(most, end - first);
        for (int64_t r = 0; r < most; r++) q[r] = x->quantised + smaller(first + r, end - 1) * padded(x);
        for (int at = 0; at < CELL; at += STRIP) {
            if (rows > most / 2) byte_squares(BYTE_PAIRS, inputs, scratch + at * inputs, q, sums, at);
            else byte_squares(BYTE_PAIRS / 2, inputs, scratch + at * inputs, q, sums, at);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < CELL; j += LANES)
                store(&results[r][j], byte_value(vld1q_s32(&sums[r][j]), load(units + j), x->scales[first + r]));
        finish(m, cell, rows, results, first, out);
    }
}

#endif
