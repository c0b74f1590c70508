/* Products with weights of four bits on processors with tiles: integers from the first number of a row to the last, scaled once.
 *
 * Tiles multiply five times as fast as vectors, but what they have summed up must be stored and loaded before anything else
 * can be done with it. A scale for every 32 numbers (matmul_q4.h) would eat up the gain; so scales become integers:
 *
 *   activations   scale * (256 * high + low)                  two bytes; one scale for a row
 *   weights       unit * (step * (nibble - 8) + centre)       one unit for a *scale run* of 576 inputs, step and centre for 32
 *   MXFP4         unit * step * E2M1_TWICE[nibble]            the same without a centre; steps are powers of two up to 128
 *
 * GGUF's scales and minima are rounded to multiples of a unit that is hundreds of times smaller than the largest of them. That
 * costs less than rounding activations to 8 bits (docs/internals/quantisation.md). Scales of MXFP4 are powers of two: those down to 1/128
 * of the largest of a scale run stay what they are, smaller ones become zero.
 *
 * Many rows meet a weight on tiles, as two bytes; few rows meet it as it is stored, with step and centre after each group:
 *
 *   weight = 16 * upper + lower        sum of high * weight + (sum of low * upper) / 16
 *   upper = step / 16 * (nibble - 8) + centre / 16, and lower what is left; low * lower is too small to matter
 *
 * Both come to the same integer for an output and a scale run, and from there they go the same way: an output's bits are the same
 * on both.
 *
 * A panel's numbers lie in two halves of 16 outputs here, each from its first group to its last.
 */
#pragma once

#include "matrix.h"

#define FEW_ROWS 4              /* that vectors take at once */

#define ROW_MOST 32639          /* 256 * 127 + 127 */
#define ROW_LEAST 1e-34f        /* the inverse of a largest number below it would be infinite: such a row is all zeros */
#define SCALE_RUN_GROUPS 18       /* whose weights fit the first cache, and whose sums 32 bits */
#define STEP_MOST 255.0f        /* / 16 fits four bits */
#define MXFP4_STEP_BITS 7       /* the largest step is 2^7: 12 * 2^7 / 16 fits a byte */
#define WEIGHT_MOST 2000.0f     /* / 16, and what rounding adds, fits a byte */

/* ---- rows ----
 *
 *   quantized, low     [rows][padded width] high and low bytes
 *   scales             [rows]
 *   sums, low_sums     [groups][stride] of the bytes
 */

static void quantize_row_q8(const Matrix *m, const Rows *rows, int64_t row) {
    (void)m;
    const float *x = rows->plain + row * rows->width;
    int8_t *high = rows->quantized + row * padded(rows), *low = rows->low + row * padded(rows);
    int32_t *sums = rows->sums + row, *low_sums = rows->low_sums + row;
    float largest = largest_of(x, rows->width);
    f32v inverse = broadcast(largest > ROW_LEAST ? ROW_MOST / largest : 0.0f);
    rows->scales[row] = largest / ROW_MOST;
    for (int64_t at = 0; at < padded(rows); at += GROUP, sums += rows->stride, low_sums += rows->stride) {
        i32v of_high = broadcast_int(0), of_low = broadcast_int(0);
        for (int64_t i = at; i < at + GROUP; i += LANES) {
            i32v whole = i < rows->width ? _mm512_cvtps_epi32(load(x + i) * inverse) : broadcast_int(0);
            i32v upper = _mm512_srai_epi32(_mm512_add_epi32(whole, broadcast_int(128)), 8);
            i32v lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
            lower = _mm512_max_epi32(lower, broadcast_int(-127));  /* -128 in all places would be too much for add_linear() */
            _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(lower));
            of_high = _mm512_add_epi32(of_high, upper), of_low = _mm512_add_epi32(of_low, lower);
        }
        *sums = _mm512_reduce_add_epi32(of_high), *low_sums = _mm512_reduce_add_epi32(of_low);
    }
}

static void copy_row_q8(const Rows *from, int64_t row, const Rows *into, int64_t to) {
    memcpy(into->quantized + to * padded(into), from->quantized + row * padded(from), (size_t)padded(from));
    memcpy(into->low + to * padded(into), from->low + row * padded(from), (size_t)padded(from));
    into->scales[to] = from->scales[row];
    for (int64_t g = 0; g < padded(from) / GROUP; g++) {
        int64_t at = g * into->stride + to, of = g * from->stride + row;
        into->sums[at] = from->sums[of], into->low_sums[at] = from->low_sums[of];
    }
}

/* ---- weights ----
 *
 *   scales   [panel][half][scale run][16 outputs] units, times 256: what `high` counts
 *   linears  [panel][half][group][16 outputs] steps and centres
 */

ALWAYS int64_t scale_runs(const Matrix *m) { return (m->groups + SCALE_RUN_GROUPS - 1) / SCALE_RUN_GROUPS; }

/* Half a panel: what belongs to 16 outputs. */
typedef struct {
    uint8_t *numbers;   /* [group][4 pairs of fours][16 outputs][4] */
    float *units;
    Linear *linears;
} HalfPanel;

ALWAYS HalfPanel half_panel(const Matrix *m, int64_t panel, int64_t h) {
    int64_t number = 2 * panel + h;
    return (HalfPanel){
        (uint8_t *)m->numbers + number * (panel_bytes(m) / 2), (float *)m->scales + number * scale_runs(m) * HALF_PANEL,
        (Linear *)m->linears + number * m->groups * HALF_PANEL,
    };
}

static void plan_q4(Matrix *m, int64_t sizes[3]) {
    m->groups = round_up(m->inputs, AMX_STEP) / GROUP;
    sizes[1] = m->panels * scale_runs(m) * PANEL * 4;
    sizes[2] = m->panels * m->groups * PANEL * (int64_t)sizeof(Linear);
}

/* The larger one; NaN is kept. */
ALWAYS float worse(float a, float b) { return a != a || a > b ? a : b; }

/* A block of GGUF: scale * (nibble - 8) + centre. The scale is made positive: `change` turns the nibbles into 15 - nibble then. */
typedef struct { float scale, centre; uint32_t change; } Scales;

static Scales scales_of(int kind, const uint8_t *block) {
    float scale = f32_of(f16_at(block));
    Scales s = {scale, kind == Q4_1 ? f32_of(f16_at(block + 2)) + 8.0f * scale : 0.0f, 0};
    /* scale * (nibble - 8) = -scale * ((15 - nibble) - 8) - scale */
    if (s.scale < 0.0f) s = (Scales){-s.scale, s.centre - s.scale, 0xffffffff};
    return s;
}

/* How large the unit must be for step and centre of this block. */
static float unit_for(Scales s) {
    return worse(s.scale / STEP_MOST, (8.0f * s.scale + fabsf(s.centre)) / WEIGHT_MOST);
}

static void pack_nibble_row(const Matrix *m, const uint8_t *row, int64_t to) {
    int64_t at = to % HALF_PANEL, groups = m->inputs / GROUP, words = GROUP_WORDS / 2;
    int64_t block_bytes = (m->kind == Q4_1 ? 4 : 2) + words * 4;
    HalfPanel side = half_panel(m, to / PANEL, to % PANEL / HALF_PANEL);
    for (int64_t s = 0; s < scale_runs(m); s++) {
        int64_t first = s * SCALE_RUN_GROUPS, end = min_int(first + SCALE_RUN_GROUPS, groups);
        float unit = 0.0f;
        for (int64_t g = first; g < end; g++) unit = worse(unit, unit_for(scales_of(m->kind, row + g * block_bytes)));
        float inverse = unit > ROW_LEAST && unit < INFINITY ? 1.0f / unit : 0.0f;
        side.units[s * HALF_PANEL + at] = 256.0f * unit;
        for (int64_t g = first; g < end; g++) {
            const uint8_t *block = row + g * block_bytes, *from = block + block_bytes - words * 4;
            Scales scales = scales_of(m->kind, block);
            Linear linear = {0, 0};  /* NaN is in the unit */
            if (inverse != 0.0f) linear = (Linear){(int16_t)rintf(scales.scale * inverse), (int16_t)rintf(scales.centre * inverse)};
            side.linears[g * HALF_PANEL + at] = linear;
            for (int64_t w = 0; w < words; w++, from += 4) {
                uint32_t word;
                memcpy(&word, from, 4);
                word ^= scales.change;
                memcpy(side.numbers + ((g * words + w) * HALF_PANEL + at) * 4, &word, 4);
            }
        }
    }
}

/* Steps are exact powers of two: their upper and lower four bits times 12 fit a byte. */
static void pack_mxfp4_row(const Matrix *m, const uint8_t *row, int64_t to) {
    int64_t at = to % HALF_PANEL, groups = m->inputs / GROUP, words = GROUP_WORDS / 2;
    HalfPanel side = half_panel(m, to / PANEL, to % PANEL / HALF_PANEL);
    for (int64_t s = 0; s < scale_runs(m); s++) {
        int64_t first = s * SCALE_RUN_GROUPS, end = min_int(first + SCALE_RUN_GROUPS, groups);
        int most = 0;
        for (int64_t g = first; g < end; g++) most = row[g * MXFP4_BYTES] > most ? row[g * MXFP4_BYTES] : most;
        side.units[s * HALF_PANEL + at] = mxfp4_scale((uint8_t)most) * (256.0f / (1 << MXFP4_STEP_BITS));
        for (int64_t g = first; g < end; g++) {
            const uint8_t *block = row + g * MXFP4_BYTES;
            int below = most - block[0];
            side.linears[g * HALF_PANEL + at] = (Linear){below > MXFP4_STEP_BITS ? 0 : (int16_t)(1 << (MXFP4_STEP_BITS - below)), 0};
            for (int64_t w = 0; w < words; w++) memcpy(side.numbers + ((g * words + w) * HALF_PANEL + at) * 4, block + 1 + w * 4, 4);
        }
    }
}

static void pack_q4(const Matrix *m, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count) {
    for (int64_t r = 0; r < count; r++) (m->kind == MXFP4 ? pack_mxfp4_row : pack_nibble_row)(m, rows + r * row_bytes, places[r]);
}

/* ---- from integers to floats ---- */

/* Segments are added in their order. */
ALWAYS void add_value(int64_t scale_run, i32v high, i32v low, f32v unit, float scale, float *to) {
    i32v whole = _mm512_add_epi32(high, _mm512_srai_epi32(low, 4));
    f32v value = as_floats(whole) * (unit * broadcast(scale));
    if (scale_run) value = load(to) + value;
    store(to, value);
}

/* ---- few rows: vectors ---- */

/* The sum of (nibble - 8) * activation of a group has 16 bits, and so has that of its activations: one instruction multiplies
 * the one by the step, the other by the centre, and adds both. */
ALWAYS i32v add_linear(i32v sum, i32v of_group, int32_t of_row, i32v linear) {
    i32v both = _mm512_mask_blend_epi16(0xaaaaaaaa, of_group, broadcast_int((int32_t)((uint32_t)of_row << 16)));
    return _mm512_dpwssd_epi32(sum, both, linear);
}

/* The sum of a group, without its offset, times step plus that of the row times centre. A sum of MXFP4 may have 17 bits. */
ALWAYS i32v add_group(const int kind, i32v sum, i32v of_group, int32_t of_row, i32v linear) {
    if (kind == MXFP4) return _mm512_add_epi32(sum, _mm512_mullo_epi32(of_group, linear));
    return add_linear(sum, of_group, of_row, linear);
}

ALWAYS i8v numbers_of(const int kind, i8v nibbles) { return kind == MXFP4 ? bytes_of_e2m1(nibbles) : nibbles; }

/* The offset that numbers_of() has added. */
ALWAYS int32_t number_offset(const int kind) { return kind == MXFP4 ? E2M1_OFFSET : 8; }

/* Both halves at once: more sums that do not wait for each other, and two streams from memory. */
ALWAYS void few_times_panel(const int rows, const int kind, const Matrix *m, int64_t panel, const Rows *x, int64_t first, float (*out)[PANEL]) {
    const int chains = rows == 1 ? 2 : 1;
    const int8_t *high = x->quantized + first * padded(x), *low = x->low + first * padded(x);
    const HalfPanel halves[2] = {half_panel(m, panel, 0), half_panel(m, panel, 1)};
    for (int64_t s = 0; s < scale_runs(m); s++) {
        int64_t begin = s * SCALE_RUN_GROUPS, end = min_int(begin + SCALE_RUN_GROUPS, m->groups);
        i32v sum[2][FEW_ROWS], low_sum[2][FEW_ROWS];
        for (int h = 0; h < 2; h++)
            for (int r = 0; r < rows; r++) sum[h][r] = low_sum[h][r] = broadcast_int(0);
        for (int64_t g = begin; g < end; g++) {
            const int32_t *of_high = x->sums + g * x->stride + first, *of_low = x->low_sums + g * x->stride + first;
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                i32v group[FEW_ROWS][2], low_group[FEW_ROWS][2];
                for (int r = 0; r < rows; r++) {
                    group[r][0] = broadcast_int(-number_offset(kind) * of_high[r]), low_group[r][0] = broadcast_int(-number_offset(kind) * of_low[r]);
                    group[r][1] = low_group[r][1] = broadcast_int(0);
                }
#pragma GCC unroll 4
                for (int f = 0; f < GROUP_WORDS / 2; f++) {
                    const uint8_t *at = halves[h].numbers + (g * GROUP_WORDS / 2 + f) * HALF_PANEL * 4;
                    i8v numbers = load_bytes(at);
                    if (rows == 1) __builtin_prefetch(at + FETCHED_AHEAD, 0, 2);
                    i8v early = numbers_of(kind, low_nibbles(numbers)), late = numbers_of(kind, high_nibbles(numbers));
                    for (int r = 0; r < rows; r++) {
                        const int8_t *from = high + r * padded(x) + g * GROUP + f * 4, *low_from = low + (from - high);
                        i32v *to = &group[r][f % chains], *low_to = &low_group[r][f % chains];
                        *to = dot_small(dot_small(*to, early, broadcast_word(from)), late, broadcast_word(from + GROUP / 2));
                        *low_to = dot_small(dot_small(*low_to, early, broadcast_word(low_from)), late, broadcast_word(low_from + GROUP / 2));
                    }
                }
                for (int r = 0; r < rows; r++) {
                    i32v whole = group[r][0], low_whole = low_group[r][0];
                    if (chains == 2) whole = _mm512_add_epi32(whole, group[r][1]), low_whole = _mm512_add_epi32(low_whole, low_group[r][1]);
                    i32v linear = _mm512_loadu_si512(halves[h].linears + g * HALF_PANEL);
                    sum[h][r] = add_group(kind, sum[h][r], whole, of_high[r], linear);
                    low_sum[h][r] = add_group(kind, low_sum[h][r], low_whole, of_low[r], _mm512_srai_epi16(linear, 4));
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < 2; h++)
                add_value(s, sum[h][r], low_sum[h][r], load(halves[h].units + s * HALF_PANEL), x->scales[first + r], &out[r][h * HALF_PANEL]);
    }
}

#define FEW_ROWS_OF(name, kind)                                                                                                          \
    static void name(int rows, const Matrix *m, const uint8_t *w, int64_t panel, const Rows *x, int64_t first, float (*out)[PANEL]) {   \
        (void)w;                                                                                                                        \
        switch (rows) {                                                                                                                 \
            case 1: few_times_panel(1, kind, m, panel, x, first, out); break;                                                          \
            case 2: few_times_panel(2, kind, m, panel, x, first, out); break;                                                          \
            case 3: few_times_panel(3, kind, m, panel, x, first, out); break;                                                          \
            case 4: few_times_panel(4, kind, m, panel, x, first, out); break;                                                          \
        }                                                                                                                               \
    }
FEW_ROWS_OF(few_q4, Q4_1)  /* and Q4_0: both are linear here */
FEW_ROWS_OF(few_mxfp4, MXFP4)

/* ---- many rows: tiles ---- */

/* One scale run of half a panel as tiles take it: [group][8 fours][16 outputs][4]. */
typedef struct { _Alignas(64) uint8_t upper[SCALE_RUN_GROUPS * GROUP * HALF_PANEL], lower[SCALE_RUN_GROUPS * GROUP * HALF_PANEL]; } Split;

/* Byte `byte` of each lane, four times. */
ALWAYS i32v byte_everywhere(i32v lanes, const char byte) {
    const i32v places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    return _mm512_shuffle_epi8(lanes, _mm512_add_epi8(places, _mm512_set1_epi8(byte)));
}

/* upper = steps[0] * number + offsets[0], and lower likewise. Steps have four bits, those of numbers up to 24 (MXFP4) one of them: in a
 * lane of 16 bits, which holds two numbers, nothing is carried from the one to the other. */
ALWAYS void linear_parts(const int kind, i32v linear, i32v *steps, i32v *offsets) {
    const i32v parts[2] = {_mm512_srai_epi16(linear, 4), _mm512_and_si512(linear, _mm512_set1_epi16(15))};
    for (int i = 0; i < 2; i++) {
        i32v step = byte_everywhere(parts[i], 0), centre = byte_everywhere(parts[i], 2);
        steps[i] = _mm512_and_si512(step, _mm512_set1_epi16(255));
        offsets[i] = _mm512_sub_epi8(centre, _mm512_slli_epi16(step, 3));
        if (kind == MXFP4) offsets[i] = _mm512_sub_epi8(offsets[i], _mm512_slli_epi16(step, 2));  /* 8 + 4: E2M1_OFFSET */
    }
}

ALWAYS void split_nibbles(i8v numbers, const i32v *steps, const i32v *offsets, uint8_t *upper, uint8_t *lower) {
    _mm512_store_si512(upper, _mm512_add_epi8(_mm512_mullo_epi16(numbers, steps[0]), offsets[0]));
    _mm512_store_si512(lower, _mm512_add_epi8(_mm512_mullo_epi16(numbers, steps[1]), offsets[1]));
}

ALWAYS void split_groups(const int kind, const HalfPanel *side, int64_t begin, int64_t groups, Split *split) {
    for (int64_t g = begin; g < begin + groups; g++) {
        uint8_t *upper = split->upper + (g - begin) * GROUP * HALF_PANEL, *lower = split->lower + (g - begin) * GROUP * HALF_PANEL;
        i32v steps[2], offsets[2];
        linear_parts(kind, _mm512_loadu_si512(side->linears + g * HALF_PANEL), steps, offsets);
#pragma GCC unroll 4
        for (int f = 0; f < GROUP_WORDS / 2; f++) {
            i8v both = load_bytes(side->numbers + (g * GROUP_WORDS / 2 + f) * 64);
            i8v early = numbers_of(kind, low_nibbles(both)), late = numbers_of(kind, high_nibbles(both));
            split_nibbles(early, steps, offsets, upper + f * 64, lower + f * 64);
            split_nibbles(late, steps, offsets, upper + (f + GROUP_WORDS / 2) * 64, lower + (f + GROUP_WORDS / 2) * 64);
        }
    }
}

/* The tiles to split next lie behind those split now: the first rows fetch them, some lines with each tile. All at once they would
 * wait for each other. */
typedef struct { const char *numbers, *linears; } Ahead;

ALWAYS void fetch_ahead(const Ahead *ahead, int64_t tile) {
    const int64_t number_bytes = AMX_STEP / 2 * HALF_PANEL, linear_bytes = 2 * (int64_t)sizeof(Linear) * HALF_PANEL;
    if (!ahead) return;
    for (int64_t i = 0; i < number_bytes; i += 64) __builtin_prefetch(ahead->numbers + tile * number_bytes + i, 0, 2);
    for (int64_t i = 0; i < linear_bytes; i += 64) __builtin_prefetch(ahead->linears + tile * linear_bytes + i, 0, 2);
}

typedef int32_t Sums[3][TILE_HEIGHT][HALF_PANEL];

/* A tile of rows: high * upper, low * upper, high * lower. */
ALWAYS void tile_products(const int8_t *high, const int8_t *low, int64_t width, const Split *split, int64_t groups,
                          const Ahead *ahead, Sums *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t k = 0; k < groups * GROUP; k += AMX_STEP) {
        fetch_ahead(ahead, k / AMX_STEP);
        _tile_loadd(4, high + k, width);
        _tile_loadd(6, split->upper + k * HALF_PANEL, 64);
        _tile_loadd(5, low + k, width);
        _tile_loadd(7, split->lower + k * HALF_PANEL, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 5, 6);
        _tile_dpbssd(2, 4, 7);
    }
    _tile_stored(0, (*sums)[0], 64);
    _tile_stored(1, (*sums)[1], 64);
    _tile_stored(2, (*sums)[2], 64);
}

/* Rows [first, end), `height` to a tile, times one scale run of half a panel: out [rows][CELL]. */
ALWAYS void rows_times_scale_run(const Matrix *m, const HalfPanel *side, int64_t scale_run, const Rows *x, int64_t first,
                               int64_t end, int64_t height, float *out) {
    Split split;
    _Alignas(64) Sums sums;
    int64_t begin = scale_run * SCALE_RUN_GROUPS, groups = min_int(SCALE_RUN_GROUPS, m->groups - begin);
    if (m->kind == MXFP4) split_groups(MXFP4, side, begin, groups, &split);
    else split_groups(Q4_1, side, begin, groups, &split);
    const Ahead ahead = {
        (const char *)side->numbers + (begin + groups) * GROUP / 2 * HALF_PANEL,
        (const char *)(side->linears + (begin + groups) * HALF_PANEL),
    };
    f32v unit = load(side->units + scale_run * HALF_PANEL);
    for (int64_t row = first; row < end; row += height) {
        int64_t at = row * padded(x) + begin * GROUP, rows = min_int(height, end - row);
        tile_products(x->quantized + at, x->low + at, padded(x), &split, groups, row == first ? &ahead : NULL, &sums);
        for (int64_t r = 0; r < rows; r++, out += PANEL) {
            i32v a = _mm512_load_si512(sums[0][r]), b = _mm512_load_si512(sums[1][r]), c = _mm512_load_si512(sums[2][r]);
            add_value(scale_run, _mm512_add_epi32(_mm512_slli_epi32(a, 4), c), b, unit, x->scales[row + r], out);
        }
    }
}

static void many_times_panel(const Matrix *m, int64_t panel, const Rows *x, int64_t first, int64_t end, const Out *out) {
    int64_t tiles = (end - first + TILE_HEIGHT - 1) / TILE_HEIGHT, height = (end - first + tiles - 1) / tiles;
    float results[ROWS_PER_CHUNK][PANEL];
    amx_for(height);
    for (int h = 0; h < 2; h++) {
        HalfPanel side = half_panel(m, panel, h);
        for (int64_t s = 0; s < scale_runs(m); s++) rows_times_scale_run(m, &side, s, x, first, end, height, &results[0][h * HALF_PANEL]);
    }
    finish(m, panel, end - first, results, first, out);
}

static void q4_times_rows(const Matrix *m, int64_t panel, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                               const Out *out) {
    (void)scratch;
    if (end - first >= Q4_AMX_FROM) many_times_panel(m, panel, x, first, end, out);
    else tiles_times_rows(m->kind == MXFP4 ? few_mxfp4 : few_q4, FEW_ROWS, m, NULL, panel, x, first, end, out);
}
