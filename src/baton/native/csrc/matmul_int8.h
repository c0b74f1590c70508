/* Products of bytes: weights and activations rotated (hadamard.h), each with one scale for a whole row.
 *
 *   activations   rotated(input scale * x) = scale * byte                      bytes from -127 to 127
 *   weights       rotated(w / input scale) = unit * (byte - WEIGHT8_OFFSET)    the factor of the rotation is in the unit
 *
 * The error of rounding grows with the sizes of both rows. An *input scale* for each input, which makes activations smaller where they
 * are large and weights are not, halves it (native/balance.py).
 *
 * A product is one sum of integers, exact in any order, and one multiplication at its end: every kernel gives the same bits.
 */
#pragma once

#include "matrix.h"
#include "hadamard.h"

#define BYTE_LEAST 1e-36f       /* the inverse of a largest number below it would be infinite */

/* ---- rows ----
 *
 *   quantized      [rows][padded width]
 *   scales, sums   [rows]
 */

/* Else all bytes are zeros, and the scale says what it was: nothing much, or no number. */
ALWAYS int can_be_scaled(float largest) { return largest > BYTE_LEAST && largest < INFINITY; }

static void quantize_row_int8(const Matrix *m, const Rows *rows, int64_t row) {
    float *x = rows->plain + row * rows->width;
    const float *input_scales = m->input_scales;
    int8_t *q = rows->quantized + row * padded(rows);
    if (m->input_squares)
        for (int64_t i = 0; i < rows->width; i++) m->input_squares[row * rows->width + i] = x[i] * x[i];
    hadamard_row(x, input_scales, rows->width);
    float largest = largest_of(x, rows->width);
    int64_t end = can_be_scaled(largest) ? rows->width : 0;
    int32_t sum = bytes_of(x, end, 127.0f / largest, q);
    if (end < padded(rows)) memset(q + end, 0, (size_t)(padded(rows) - end));
    rows->scales[row] = largest / 127.0f, rows->sums[row] = sum;
}

static void copy_row_int8(const Rows *from, int64_t row, const Rows *into, int64_t to) {
    memcpy(into->quantized + to * padded(into), from->quantized + row * padded(from), (size_t)padded(from));
    into->scales[to] = from->scales[row], into->sums[to] = from->sums[row];
}

/* ---- weights ----
 *
 *   scales         [panel][output] units
 *   input_scales   [inputs]
 */

static void plan_int8(Matrix *m, int64_t sizes[3]) {
    m->groups = round_up(m->inputs, AMX_STEP) / GROUP;
    sizes[1] = m->panels * PANEL * 4, sizes[2] = m->inputs * 4;
}

/* x: the floats of the row that becomes output `to`; they are rotated here. `inverse`: [inputs] one over the input scale. The bytes go to
 * `packed`, [groups * GROUP], from where pack_int8 takes them. */
static void quantize_weights_int8(const Matrix *m, float *x, const float *inverse, int64_t to, int8_t *packed) {
    hadamard_row(x, inverse, m->inputs);
    float largest = largest_of(x, m->inputs);
    int64_t end = can_be_scaled(largest) ? m->inputs : 0;
    bytes_of(x, end, 127.0f / largest, packed);
    memset(packed + end, 0, (size_t)(m->groups * GROUP - end));
    for (int64_t i = 0; i < m->groups * GROUP; i++) packed[i] = (int8_t)(packed[i] + WEIGHT8_OFFSET);
    ((float *)m->scales)[to] = largest / 127.0f / (float)hadamard_gain(m->inputs);
}

/* Rows of bytes become the outputs `places` of one panel. A line of each row at a time: those, and the lines of the panel that they go to,
 * fit the first cache. */
static void pack_int8(const Matrix *m, const int8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count) {
    uint8_t *numbers = (uint8_t *)m->numbers + places[0] / PANEL * panel_bytes(m);
    for (int64_t k = 0; k < m->groups * GROUP; k += LINE, numbers += LINE * PANEL)
        for (int64_t r = 0; r < count; r++) {
            const int8_t *from = rows + r * row_bytes + k;
            uint8_t *to = numbers + places[r] % PANEL * 4;
            for (int64_t i = 0; i < LINE; i += 4) memcpy(to + i * PANEL, from + i, 4);
        }
}

/* ---- products ---- */

ALWAYS f32v int8_value(i32v sum, f32v unit, float scale) { return as_floats(sum) * (unit * broadcast(scale)); }

#if !defined(__aarch64__)

ALWAYS void tile_of_whole(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t panel, int at,
                          const Rows *x, int64_t first, float (*out)[PANEL]) {
    (void)kind;
    const int chains = rows == 1 ? 4 : rows == 2 ? 2 : 1;  /* sums that do not wait for each other */
    const int8_t *q = x->quantized + first * padded(x);
    const float *units = (const float *)m->scales + panel * PANEL + at;
    i32v sum[4][TILE_ROWS][TILE_PARTS];
    for (int c = 0; c < chains; c++)
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < TILE_PARTS; p++) sum[c][r][p] = broadcast_int(c ? 0 : -WEIGHT8_OFFSET * x->sums[first + r]);
    w += at * 4;
    for (int64_t k = 0; k < m->groups * GROUP; k += 16)
#pragma GCC unroll 4
        for (int f = 0; f < 4; f++, w += PANEL * 4) {
            i8v weights[TILE_PARTS];
            for (int p = 0; p < TILE_PARTS; p++) {
                weights[p] = load_bytes(w + p * LANES * 4);
                if (rows == 1) __builtin_prefetch(w + p * LANES * 4 + FETCHED_AHEAD, 0, 2);
            }
            for (int r = 0; r < rows; r++) {
                i8v four = broadcast_word(q + r * padded(x) + k + f * 4);
                for (int p = 0; p < TILE_PARTS; p++) sum[f % chains][r][p] = dot_full(sum[f % chains][r][p], weights[p], four);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) {
            i32v whole = sum[0][r][p];
            for (int c = 1; c < chains; c++) whole = sum_of(whole, sum[c][r][p]);
            store(&out[r][at + p * LANES], int8_value(whole, load(units + p * LANES), x->scales[first + r]));
        }
}

TILE(tile_bytes, tile_of_whole, ROTATED_INT8)

#endif
