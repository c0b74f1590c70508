/* Quantised products on ARM: vectors of four outputs, 32 registers, and activations that are multiplied out of the lane they
 * were loaded into instead of being spread first.
 *
 *   dots    up to four rows. The fewer rows, the more outputs beside each other: the sums of a group, which are whole, and the
 *           sums over groups, which are not, take 2 * SDOT_SUMS registers, and all of them stay where they are.
 *   squares many rows, where the processor multiplies 2 rows by 2 outputs in one instruction, 8 numbers deep. Sums keep that
 *           shape from the first group to the last:  row 0 output 0, row 0 output 1, row 1 output 0, row 1 output 1.
 *
 * The integers are the same as those of matmul_q4.h and matmul_int8.h, and so are the sums over groups: bit for bit.
 */
#pragma once

#include "matmul_int8.h"
#include "neon_dot.h"

#define SDOT_SUMS 8           /* vectors of sums of a tile of dots: rows times parts */
#define SDOT_ROWS 4      /* of a tile at most */
#define STRIP 8          /* outputs of a tile of squares */

/* Form of a panel: bytes with scales as floats, nibbles, or bytes with scales as halves. */
typedef enum { AS_BYTES, AS_NIBBLES, AS_STORED } Form;

/* ---- dots ---- */

/* A panel as a tile of dots reads it. */
typedef struct {
    const uint8_t *numbers;         /* packed; or bytes from -8 to 7 (Q4_0), 0 to 15 (Q4_1), -12 to 12 (MXFP4), any (GROUPED_INT8) */
    const void *scales, *minima;    /* [group][output] halves, or exponents of MXFP4; of bytes, floats */
} SdotPanel;

ALWAYS i8v low_numbers(const int kind, i8v both) { return kind == MXFP4 ? bytes_of_e2m1(low_nibbles(both)) : low_nibbles(both); }
ALWAYS i8v high_numbers(const int kind, i8v both) { return kind == MXFP4 ? bytes_of_e2m1(high_nibbles(both)) : high_nibbles(both); }

/* Sums of a group over one byte of each activation, on top of what is in `whole`. */
ALWAYS void sdot_group(const int rows, const int parts, const Form form, const int kind, const uint8_t *w, const int8_t *row, int64_t width,
                       i32v (*whole)[SDOT_SUMS]) {
    const int words = form == AS_NIBBLES ? GROUP_WORDS / 2 : GROUP_WORDS;
    i8v q[2][SDOT_ROWS];
    UNROLL for (int r = 0; r < rows; r++) q[0][r] = vld1q_s8(row + r * width), q[1][r] = vld1q_s8(row + r * width + 16);
    UNROLL for (int f = 0; f < words; f++, w += PANEL * 4) {
        SCHED_FENCE;
        i8v both[SDOT_SUMS];
        if (form == AS_BYTES && rows > 2) load_two(w, both);
        else UNROLL for (int p = 0; p < parts; p++) both[p] = load_bytes(w + p * LANES * 4);
        UNROLL for (int p = 0; p < parts; p++) {
            i8v low = low_numbers(kind, both[p]), high = high_numbers(kind, both[p]);
            UNROLL for (int r = 0; r < rows; r++) {
                if (form != AS_NIBBLES) whole[r][p] = dot_word(whole[r][p], both[p], q[f / 4][r], f % 4);
                else whole[r][p] = dot_word(dot_word(whole[r][p], low, q[0][r], f), high, q[1][r], f);
            }
        }
    }
}

/* The same over both bytes at once, output by output: weights are loaded and taken apart once, and few sums are needed beside. */
ALWAYS void sdot_wide_group(const int rows, const int parts, const Form form, const int kind, const uint8_t *w, const int8_t *row,
                            const int8_t *upper_row, int64_t width, i32v (*whole)[SDOT_SUMS]) {
    const int words = form == AS_NIBBLES ? GROUP_WORDS / 2 : GROUP_WORDS;
    i8v q[2][SDOT_ROWS], u[2][SDOT_ROWS];
    UNROLL for (int r = 0; r < rows; r++) {
        q[0][r] = vld1q_s8(row + r * width), q[1][r] = vld1q_s8(row + r * width + 16);
        u[0][r] = vld1q_s8(upper_row + r * width), u[1][r] = vld1q_s8(upper_row + r * width + 16);
    }
    UNROLL for (int p = 0; p < parts; p++) {
        MEMORY_FENCE;
        i32v upper[SDOT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) upper[r] = broadcast_int(0);
        UNROLL for (int f = 0; f < words; f++) {
            i8v both = load_bytes(w + f * PANEL * 4 + p * LANES * 4), low = low_numbers(kind, both), high = high_numbers(kind, both);
            UNROLL for (int r = 0; r < rows; r++) {
                if (form != AS_NIBBLES) {
                    whole[r][p] = dot_word(whole[r][p], both, q[f / 4][r], f % 4), upper[r] = dot_word(upper[r], both, u[f / 4][r], f % 4);
                    continue;
                }
                whole[r][p] = dot_word(dot_word(whole[r][p], low, q[0][r], f), high, q[1][r], f);
                upper[r] = dot_word(dot_word(upper[r], low, u[0][r], f), high, u[1][r], f);
            }
        }
        UNROLL for (int r = 0; r < rows; r++) whole[r][p] = vaddq_s32(whole[r][p], times_64(upper[r]));
    }
}

/* Whole numbers as floats: bytes times wide activations may be too large for float_of_sum(). */
ALWAYS i32v sdot_start(const int kind) { return kind == GROUPED_INT8 ? broadcast_int(0) : loaded_start(); }
ALWAYS f32v sdot_value(const int kind, i32v whole) { return kind == GROUPED_INT8 ? as_floats(whole) : float_of_sum(whole); }

/* Exact sums of a group. `wide`: a row of the tile has activations of two bytes there. `of`: the first row's group. */
ALWAYS void sdot_sums(const int rows, const int parts, const Form form, const int kind, const int wide, const uint8_t *w, const Rows *x,
                      int64_t of, const int8_t *row, const int8_t *upper, i32v (*whole)[SDOT_SUMS]) {
    const int with_offset = kind == Q4_0 && form == AS_NIBBLES, at_once = rows <= 2, twice = wide && !at_once;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) {
            if (twice) whole[r][p] = kind == GROUPED_INT8 ? broadcast_int(0) : loaded_part();
            else whole[r][p] = with_offset ? broadcast_int(SUM_START - 8 * x->sums[of + r]) : sdot_start(kind);
        }
    if (twice) {
        sdot_group(rows, parts, form, kind, w, upper, x->width, whole);
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < parts; p++) {
                whole[r][p] = times_64(whole[r][p]);
                if (with_offset) whole[r][p] = vaddq_s32(whole[r][p], broadcast_int(-8 * x->sums[of + r]));
            }
        MEMORY_FENCE;
    }
    if (wide && at_once) sdot_wide_group(rows, parts, form, kind, w, row, upper, x->width, whole);
    else sdot_group(rows, parts, form, kind, w, row, x->width, whole);
}

/* One group of a tile. Of each product, `whole` is the sum of a group and `sum` the one over groups. Conversions have half of one pipe on a
 * Neoverse-N1: so `whole` begins where it is a float (neon_dot.h), and scales of a panel that many rows share were made floats before. */
ALWAYS void sdot_step(const int rows, const int parts, const Form form, const int kind, const int wide, const SdotPanel *c, int64_t g, int at,
                      const Rows *x, int64_t first, f32v (*sum)[SDOT_SUMS]) {
    const int words = form == AS_NIBBLES ? GROUP_WORDS / 2 : GROUP_WORDS, each = form == AS_BYTES ? 4 : (int)scale_bytes(kind);
    const uint8_t *w = c->numbers + (g * words * PANEL + at) * 4, *scales = (const uint8_t *)c->scales + (g * PANEL + at) * each;
    const uint8_t *minima = (const uint8_t *)c->minima + (g * PANEL + at) * each;
    int64_t of = g * x->stride + first, place = first * x->width + g * GROUP;
    i32v whole[SDOT_ROWS][SDOT_SUMS];
    sdot_sums(rows, parts, form, kind, wide, w, x, of, x->quantized + place, x->upper + place, whole);
    /* Rows of a tile lie beside each other, and there is room for more than there are. */
    f32v row_scales = load(x->scales + of), row_sums = kind == Q4_1 ? load(x->scaled_sums + of) : row_scales;
    UNROLL for (int p = 0; p < parts; p++) {
        f32v scale = form == AS_BYTES ? load((const float *)(const void *)scales + p * LANES)
                                        : load_scales(kind, scales, p * LANES);
        UNROLL for (int r = 0; r < rows; r++)
            sum[r][p] = fma_lanes(sdot_value(kind, whole[r][p]), of_lane(scale, row_scales, r), sum[r][p]);
        if (kind != Q4_1) continue;
        f32v minimum = form == AS_BYTES ? load((const float *)(const void *)minima + p * LANES)
                                          : load_f16((const f16 *)(const void *)minima + p * LANES);
        UNROLL for (int r = 0; r < rows; r++) sum[r][p] = fma_lane(minimum, row_sums, r, sum[r][p]);
    }
}

/* `rows` rows times `parts` vectors of outputs of a panel, from `at` on. Code of its own for wide groups, to the end of the group: gcc 12
 * would keep sums in memory where both kinds meet. */
ALWAYS void sdot_tile(const int rows, const int parts, const Form form, const int kind, const SdotPanel *c, int64_t groups, int at,
                      const Rows *x, int64_t first, float (*out)[PANEL]) {
    f32v sum[SDOT_ROWS][SDOT_SUMS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) sum[r][p] = broadcast(0.0f);
    for (int64_t g = 0; g < groups;) {
        for (; g < groups && !any_wide(rows, x, g * x->stride + first); g++) sdot_step(rows, parts, form, kind, 0, c, g, at, x, first, sum);
        for (; g < groups && any_wide(rows, x, g * x->stride + first); g++) sdot_step(rows, parts, form, kind, 1, c, g, at, x, first, sum);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

ALWAYS void sdot_of_panel(const int rows, const Form form, const int kind, const SdotPanel *c, int64_t groups, const Rows *x, int64_t first,
                         float (*out)[PANEL]) {
    const int parts = rows == 1 ? SDOT_SUMS : rows == 2 ? SDOT_SUMS / 2 : SDOT_SUMS / 4;
    for (int at = 0; at < PANEL; at += parts * LANES) sdot_tile(rows, parts, form, kind, c, groups, at, x, first, out);
}

/* Functions of their own for each number of rows: gcc 12 then keeps all sums in registers. */
#define SDOT_OF_PANEL(rows, form, kind)                                                                                                \
    static __attribute__((noinline)) void sdot_##rows##_##form##_##kind(const SdotPanel *c, int64_t groups, const Rows *x, int64_t first, \
                                                                       float (*out)[PANEL]) {                                         \
        sdot_of_panel(rows, form, kind, c, groups, x, first, out);                                                                    \
    }
#define SDOT_OF_PANELS(form, kind)                                                                                                     \
    SDOT_OF_PANEL(1, form, kind) SDOT_OF_PANEL(2, form, kind) SDOT_OF_PANEL(3, form, kind) SDOT_OF_PANEL(4, form, kind)                    \
    static const SdotOfPanel sdot_##form##_##kind[SDOT_ROWS] = {sdot_1_##form##_##kind, sdot_2_##form##_##kind, sdot_3_##form##_##kind, \
                                                               sdot_4_##form##_##kind};
typedef void (*SdotOfPanel)(const SdotPanel *, int64_t, const Rows *, int64_t, float (*)[PANEL]);
SDOT_OF_PANELS(AS_NIBBLES, Q4_0)
SDOT_OF_PANELS(AS_NIBBLES, Q4_1)
SDOT_OF_PANELS(AS_BYTES, Q4_0)
SDOT_OF_PANELS(AS_BYTES, Q4_1)
SDOT_OF_PANELS(AS_NIBBLES, MXFP4)  /* whose bytes are signed, and so like those of Q4_0 */
SDOT_OF_PANELS(AS_STORED, GROUPED_INT8)

static const SdotOfPanel *sdot_of(int kind, int unpacked) {
    if (unpacked) return kind == Q4_1 ? sdot_AS_BYTES_Q4_1 : sdot_AS_BYTES_Q4_0;
    if (kind == MXFP4) return sdot_AS_NIBBLES_MXFP4;
    return kind == Q4_0 ? sdot_AS_NIBBLES_Q4_0 : kind == Q4_1 ? sdot_AS_NIBBLES_Q4_1 : sdot_AS_STORED_GROUPED_INT8;
}

/* The panel as bytes, its scales and its minima as floats, in `scratch`. */
static SdotPanel unpack_for_sdot(const Matrix *m, const SdotPanel *packed, uint8_t *scratch) {
    float *scales = (float *)(void *)(scratch + m->groups * GROUP * PANEL), *minima = scales + m->groups * PANEL;
    const uint8_t *from = packed->numbers;
    const i8v offset = vdupq_n_s8(m->kind == Q4_0 ? 8 : 0);
    for (int64_t g = 0; g < m->groups; g++)
        for (int f = 0; f < GROUP_WORDS / 2; f++)
            for (int b = 0; b < PANEL * 4; b += 16, from += 16) {
                int8_t *to = (int8_t *)scratch + (g * GROUP_WORDS + f) * PANEL * 4 + b;
                i8v both = load_bytes(from);
                vst1q_s8(to, vsubq_s8(low_numbers(m->kind, both), offset));
                vst1q_s8(to + GROUP_WORDS / 2 * PANEL * 4, vsubq_s8(high_numbers(m->kind, both), offset));
            }
    for (int64_t i = 0; i < m->groups * PANEL; i += LANES) {
        store(scales + i, load_scales(m->kind, packed->scales, i));
        if (m->kind == Q4_1) store(minima + i, load_f16((const f16 *)packed->minima + i));
    }
    return (SdotPanel){scratch, scales, minima};
}

static void sdot_panel_times_rows(const Matrix *m, int64_t panel, const uint8_t *w, const Rows *x, int64_t first, int64_t end,
                                 uint8_t *scratch, const Out *out) {
    SdotPanel c = {w, panel_scales(m, panel), m->minima + panel * m->groups * PANEL};
    int unpacked = m->kind != GROUPED_INT8 && end - first >= UNPACK_FROM;
    if (unpacked) c = unpack_for_sdot(m, &c, scratch);
    const SdotOfPanel *kernels = sdot_of(m->kind, unpacked);
    while (first < end) {
        float results[SDOT_ROWS][PANEL];
        int64_t rows = min_int(SDOT_ROWS, end - first);
        kernels[rows - 1](&c, m->groups, x, first, results);
        finish(m, panel, rows, results, first, out);
        first += rows;
    }
}

/* ---- squares ---- */

#if defined(__ARM_FEATURE_MATMUL_INT8)

/* Words of two fours become eights: those of outputs 0 and 1, those of 2 and 3. */
ALWAYS void zip_words(i8v a, i8v b, i8v *out) {
    out[0] = vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
    out[1] = vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(a), vreinterpretq_s32_s8(b)));
}

/* The same for the eights of two rows: the first eight of both, the second of both. */
ALWAYS void zip_eights(i8v a, i8v b, i8v *out) {
    out[0] = vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
    out[1] = vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

/* The panel as signed bytes, strip by strip: [4][group][4 eights][8 outputs][8]. `kind`: ROTATED_INT8 for bytes of any kind. */
ALWAYS void smmla_unpack(const int kind, int64_t groups, const uint8_t *packed, uint8_t *out) {
    const int words = kind == ROTATED_INT8 ? GROUP_WORDS : GROUP_WORDS / 2;
    const i8v eight = vdupq_n_s8(8);
    for (int64_t g = 0; g < groups; g++)
        UNROLL for (int f = 0; f < words; f += 2, packed += 2 * PANEL * 4)
            UNROLL for (int at = 0; at < PANEL; at += LANES) {
                int8_t *to = (int8_t *)out + ((at / STRIP * groups + g) * GROUP + f * 4) * STRIP + at % STRIP * 8;
                i8v eights[2];
                zip_words(load_bytes(packed + at * 4), load_bytes(packed + (PANEL + at) * 4), eights);
                UNROLL for (int i = 0; i < 2; i++, to += 16) {
                    i8v low = low_numbers(kind, eights[i]), high = high_numbers(kind, eights[i]);
                    if (kind == Q4_0) low = vsubq_s8(low, eight), high = vsubq_s8(high, eight);
                    vst1q_s8(to, kind == ROTATED_INT8 ? eights[i] : low);
                    if (kind != ROTATED_INT8) vst1q_s8(to + GROUP / 2 * STRIP, high);
                }
            }
}

/* A number of each of two neighbouring outputs, for both rows; of each of two neighbouring rows, for both outputs. */
ALWAYS f32v of_outputs(f32v x, const int high) {
    float64x2_t two = vreinterpretq_f64_f32(x);
    return vreinterpretq_f32_f64(high ? vzip2q_f64(two, two) : vzip1q_f64(two, two));
}
ALWAYS f32v of_rows(f32v x, const int high) { return high ? vzip2q_f32(x, x) : vzip1q_f32(x, x); }

/* Sums of a group over one byte of each activation. `q`: where the rows' bytes are; `at`: of the group. */
ALWAYS void smmla_group(const int pairs, const uint8_t *w, const int8_t *const *q, int64_t at, i32v (*whole)[STRIP / 2]) {
    UNROLL for (int h = 0; h < GROUP; h += 16) {
        i8v eights[2][2];
        UNROLL for (int i = 0; i < pairs; i++) zip_eights(vld1q_s8(q[2 * i] + at + h), vld1q_s8(q[2 * i + 1] + at + h), eights[i]);
        UNROLL for (int e = 0; e < 2; e++)
            UNROLL for (int j = 0; j < STRIP / 2; j++, w += 16) {
                i8v weights = load_bytes(w);
                UNROLL for (int i = 0; i < pairs; i++) whole[i][j] = vmmlaq_s32(whole[i][j], eights[i][e], weights);
            }
    }
}

/* Where the bytes of 4 rows are: what fills up a last pair may be any of them. (Of scales, which lie beside each other, there is room for
 * more than there are rows.) */
typedef struct { const int8_t *quantized[4], *upper[4]; } SmmlaRows;

/* 2 * `pairs` rows times one strip; `rows` of them are there. */
ALWAYS void smmla_tile(const int pairs, const int kind, int64_t rows, const Matrix *m, const uint8_t *w, const uint8_t *scales,
                         const f16 *minima, const Rows *x, int64_t first, const SmmlaRows *q, float (*out)[PANEL], int at) {
    f32v sum[2][STRIP / 2];
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) sum[i][j] = broadcast(0.0f);
    const float *row_scales = x->scales + first, *row_sums = x->scaled_sums + first;
    for (int64_t g = 0; g < m->groups; g++, row_scales += x->stride, row_sums += x->stride, scales += PANEL * scale_bytes(kind), minima += PANEL, w += GROUP * STRIP) {
        i32v whole[2][STRIP / 2];
        UNROLL for (int i = 0; i < pairs; i++)
            UNROLL for (int j = 0; j < STRIP / 2; j++) whole[i][j] = broadcast_int(0);
        int32_t wide = 0;
        for (int64_t r = 0; r < rows; r++) wide |= x->wide[g * x->stride + first + r];
        if (wide) {
            smmla_group(pairs, w, q->upper, g * GROUP, whole);
            UNROLL for (int i = 0; i < pairs; i++)
                UNROLL for (int j = 0; j < STRIP / 2; j++) whole[i][j] = times_64(whole[i][j]);
        }
        smmla_group(pairs, w, q->quantized, g * GROUP, whole);
        f32v row_scale = load(row_scales), row_sum = load(row_sums);
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            f32v scale = of_outputs(load_scales(kind, scales, j / 2 * LANES), j % 2), minimum = broadcast(0.0f);
            if (kind == Q4_1) minimum = of_outputs(load_f16(minima + j / 2 * LANES), j % 2);
            UNROLL for (int i = 0; i < pairs; i++) {
                sum[i][j] = fma_lanes(as_floats(whole[i][j]), scale * of_rows(row_scale, i), sum[i][j]);
                if (kind == Q4_1) sum[i][j] = fma_lanes(minimum, of_rows(row_sum, i), sum[i][j]);
            }
        }
    }
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            vst1_f32(&out[2 * i][at + 2 * j], vget_low_f32(sum[i][j]));
            vst1_f32(&out[2 * i + 1][at + 2 * j], vget_high_f32(sum[i][j]));
        }
}

#define SMMLA_TILE(name, kind)                                                                                           \
    static void name(int64_t rows, const Matrix *m, const uint8_t *w, const uint8_t *s, const f16 *n, const Rows *x,     \
                     int64_t first, const SmmlaRows *q, float (*out)[PANEL], int at) {                                   \
        if (rows > 2) smmla_tile(2, kind, rows, m, w, s, n, x, first, q, out, at);                                       \
        else smmla_tile(1, kind, rows, m, w, s, n, x, first, q, out, at);                                                \
    }

SMMLA_TILE(smmla_q4_0, Q4_0)  /* whose offset is gone by now; and so GROUPED_INT8 */
SMMLA_TILE(smmla_q4_1, Q4_1)
SMMLA_TILE(smmla_mxfp4, MXFP4)

static void smmla_panel_times_rows(const Matrix *m, int64_t panel, const uint8_t *packed, const Rows *x, int64_t first,
                                    int64_t end, uint8_t *scratch, const Out *out) {
    const uint8_t *scales = panel_scales(m, panel);
    const f16 *minima = m->minima + panel * m->groups * PANEL;
    if (m->kind == GROUPED_INT8) smmla_unpack(ROTATED_INT8, m->groups, packed, scratch);
    else if (m->kind == Q4_0) smmla_unpack(Q4_0, m->groups, packed, scratch);
    else if (m->kind == MXFP4) smmla_unpack(MXFP4, m->groups, packed, scratch);
    else smmla_unpack(Q4_1, m->groups, packed, scratch);
    while (first < end) {
        float results[4][PANEL];
        int64_t rows = min_int(4, end - first);
        SmmlaRows q;
        for (int r = 0; r < 4; r++) {
            int64_t row = min_int(first + r, end - 1) * x->width;
            q.quantized[r] = x->quantized + row, q.upper[r] = x->upper + row;
        }
        for (int at = 0; at < PANEL; at += STRIP)
            (m->kind == Q4_1 ? smmla_q4_1 : m->kind == MXFP4 ? smmla_mxfp4 : smmla_q4_0)(
                rows, m, scratch + at * m->groups * GROUP, scales + at * scale_bytes(m->kind), minima + at, x, first, &q, results, at);
        finish(m, panel, rows, results, first, out);
        first += rows;
    }
}

#endif

static void neon_panel_times_rows(const Matrix *m, int64_t panel, const uint8_t *packed, const Rows *x, int64_t first,
                                 int64_t end, uint8_t *scratch, const Out *out) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (end - first >= SMMLA_FROM) {
        smmla_panel_times_rows(m, panel, packed, x, first, end, scratch, out);
        return;
    }
#endif
    sdot_panel_times_rows(m, panel, packed, x, first, end, scratch, out);
}

/* ---- bytes: one sum from the first input to the last ---- */

/* `rows` rows times `parts` vectors of outputs of a panel, from `at` on. */
ALWAYS void int8_sdot(const int rows, const int parts, const Matrix *m, const uint8_t *w, int64_t panel, int at, const Rows *x,
                      int64_t first, float (*out)[PANEL]) {
    i32v sum[SDOT_ROWS][SDOT_SUMS];
    const int8_t *q = x->quantized + first * padded(x);
    const float *units = (const float *)m->scales + panel * PANEL + at;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++) sum[r][p] = broadcast_int(0);
    w += at * 4;
    for (int64_t k = 0; k < m->groups * GROUP; k += 16) {
        i8v sixteen[SDOT_ROWS];
        UNROLL for (int r = 0; r < rows; r++) sixteen[r] = vld1q_s8(q + r * padded(x) + k);
        UNROLL for (int f = 0; f < 4; f++, w += PANEL * 4) {
            SCHED_FENCE;
            UNROLL for (int p = 0; p < parts; p++) {
                i8v weights = load_bytes(w + p * LANES * 4);
                UNROLL for (int r = 0; r < rows; r++) sum[r][p] = dot_word(sum[r][p], weights, sixteen[r], f);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < parts; p++)
            store(&out[r][at + p * LANES], int8_value(sum[r][p], load(units + p * LANES), x->scales[first + r]));
}

/* Up to 16 sums, and their weights and rows, stay in registers. */
static void int8_sdot_of_panel(int rows, const Matrix *m, const uint8_t *w, int64_t panel, const Rows *x, int64_t first, float (*out)[PANEL]) {
    if (rows == 1) int8_sdot(1, SDOT_SUMS, m, w, panel, 0, x, first, out);
    else if (rows == 2) int8_sdot(2, SDOT_SUMS, m, w, panel, 0, x, first, out);
    else
        for (int at = 0; at < PANEL; at += PANEL / 2) {
            if (rows == 3) int8_sdot(3, SDOT_SUMS / 2, m, w, panel, at, x, first, out);
            else int8_sdot(4, SDOT_SUMS / 2, m, w, panel, at, x, first, out);
        }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

#define BYTE_PAIRS 4  /* of rows: 8 x 8 sums take 16 registers */

/* 2 * `pairs` rows times one strip of a panel that smmla_unpack() has put in order. */
ALWAYS void int8_smmla(const int pairs, int64_t inputs, const uint8_t *w, const int8_t *const *q, int32_t (*out)[PANEL], int at) {
    i32v sum[BYTE_PAIRS][STRIP / 2];
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) sum[i][j] = broadcast_int(0);
    for (int64_t k = 0; k < inputs; k += 16) {
        i8v eights[BYTE_PAIRS][2];
        UNROLL for (int i = 0; i < pairs; i++) zip_eights(vld1q_s8(q[2 * i] + k), vld1q_s8(q[2 * i + 1] + k), eights[i]);
        UNROLL for (int e = 0; e < 2; e++)
            UNROLL for (int j = 0; j < STRIP / 2; j++, w += 16) {
                i8v weights = load_bytes(w);
                UNROLL for (int i = 0; i < pairs; i++) sum[i][j] = vmmlaq_s32(sum[i][j], eights[i][e], weights);
            }
    }
    UNROLL for (int i = 0; i < pairs; i++)
        UNROLL for (int j = 0; j < STRIP / 2; j++) {
            vst1_s32(&out[2 * i][at + 2 * j], vget_low_s32(sum[i][j]));
            vst1_s32(&out[2 * i + 1][at + 2 * j], vget_high_s32(sum[i][j]));
        }
}

static void int8_smmla_times_rows(const Matrix *m, int64_t panel, const uint8_t *packed, const Rows *x, int64_t first, int64_t end,
                                    uint8_t *scratch, const Out *out) {
    const int64_t most = 2 * BYTE_PAIRS, inputs = m->groups * GROUP;
    const float *units = (const float *)m->scales + panel * PANEL;
    smmla_unpack(ROTATED_INT8, m->groups, packed, scratch);
    for (int64_t rows; first < end; first += rows) {
        int32_t sums[2 * BYTE_PAIRS][PANEL];
        float results[2 * BYTE_PAIRS][PANEL];
        const int8_t *q[2 * BYTE_PAIRS];
        rows = min_int(most, end - first);
        for (int64_t r = 0; r < most; r++) q[r] = x->quantized + min_int(first + r, end - 1) * padded(x);
        for (int at = 0; at < PANEL; at += STRIP) {
            if (rows > most / 2) int8_smmla(BYTE_PAIRS, inputs, scratch + at * inputs, q, sums, at);
            else int8_smmla(BYTE_PAIRS / 2, inputs, scratch + at * inputs, q, sums, at);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < PANEL; j += LANES)
                store(&results[r][j], int8_value(vld1q_s32(&sums[r][j]), load(units + j), x->scales[first + r]));
        finish(m, panel, rows, results, first, out);
    }
}

#endif
