/* Products of bytes: weights and activations mixed (mixing.h), each with one scale for a whole row.
 *
 *   activations   mixed(balance * x) = scale * byte                      bytes from -127 to 127
 *   weights       mixed(w / balance) = unit * (byte - WEIGHT8_OFFSET)    the factor of mixing is in the unit
 *
 * What rounding costs grows with the sizes of both rows. A *balance* for each input, which makes activations smaller where they
 * are large and weights are not, halves it (native/balance.py).
 *
 * A product is one sum of integers, exact in any order, and one multiplication at its end: every kernel gives the same bits.
 */
#pragma once

#include "mixing.h"

#define BYTE_TILES_FROM 2       /* rows that are faster on tiles */
#define FETCHED_AHEAD 18432     /* bytes, for one row: about a cell. The processor itself sees no more than a page ahead */
#define TILES_AHEAD 6144        /* the same on tiles: the first rows fetch it for all */
#define BYTE_LEAST 1e-36f       /* the inverse of a largest number below it would be infinite */

/* ---- rows ----
 *
 *   quantised      [rows][padded width]
 *   scales, sums   [rows]
 */

/* Else all bytes are zeros, and the scale says what it was: nothing much, or no number. */
ALWAYS int can_be_scaled(float largest) { return largest > BYTE_LEAST && largest < INFINITY; }

static void bytes_of_row(const Matrix *m, const Rows *rows, int64_t row) {
    float *x = rows->plain + row * rows->width;
    const float *balance = m->minima;
    int8_t *q = rows->quantised + row * padded(rows);
    if (m->heard)
        for (int64_t i = 0; i < rows->width; i++) m->heard[row * rows->width + i] = x[i] * x[i];
    mix_row(x, balance, rows->width);
    float largest = largest_of(x, rows->width);
    int64_t end = can_be_scaled(largest) ? rows->width : 0;
    int32_t sum = bytes_of(x, end, 127.0f / largest, q);
    if (end < padded(rows)) memset(q + end, 0, (size_t)(padded(rows) - end));
    rows->scales[row] = largest / 127.0f, rows->sums[row] = sum;
}

/* ---- weights ----
 *
 *   scales   [cell][output] units
 *   minima   [inputs] balance
 */

static void plan_bytes(Matrix *m, int64_t bytes[3]) {
    m->groups = round_up(m->inputs, STEP_OF_TILES) / GROUP;
    bytes[1] = m->cells * CELL * 4, bytes[2] = m->inputs * 4;
}

/* x: the floats of the row that becomes output `to`; they are mixed here. `inverse`: [inputs] one over the balance. (To collect the
 * rows of a cell and write it in one go, as pack_nibbles does, was no faster: 2.0 ns a weight instead of 1.4 to 1.8.) */
static void pack_bytes(const Matrix *m, float *x, const float *inverse, int64_t to) {
    int8_t q[GROUP];
    uint8_t *numbers = (uint8_t *)m->numbers + to / CELL * cell_bytes(m) + to % CELL * 4;
    mix_row(x, inverse, m->inputs);
    float largest = largest_of(x, m->inputs);
    for (int64_t at = 0; at < m->groups * GROUP; at += GROUP) {
        memset(q, 0, sizeof q);
        if (at < m->inputs && can_be_scaled(largest)) bytes_of_group(x + at, 127.0f / largest, q);
        for (int i = 0; i < GROUP; i += 4, numbers += CELL * 4)
            for (int j = 0; j < 4; j++) numbers[j] = (uint8_t)(q[i + j] + WEIGHT8_OFFSET);
    }
    ((float *)m->scales)[to] = largest / 127.0f / (float)stretch(m->inputs);
}

/* ---- products ---- */

ALWAYS floats byte_value(ints sum, floats unit, float scale) { return as_floats(sum) * (unit * spread(scale)); }

#if !defined(__aarch64__)

ALWAYS void tile_of_whole(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t cell, int at,
                          const Rows *x, int64_t first, float (*out)[CELL]) {
    (void)kind;
    const int chains = rows == 1 ? 4 : rows == 2 ? 2 : 1;  /* sums that do not wait for each other */
    const int8_t *q = x->quantised + first * padded(x);
    const float *units = (const float *)m->scales + cell * CELL + at;
    ints sum[4][TILE_ROWS][TILE_PARTS];
    for (int c = 0; c < chains; c++)
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < TILE_PARTS; p++) sum[c][r][p] = spread_int(c ? 0 : -WEIGHT8_OFFSET * x->sums[first + r]);
    w += at * 4;
    for (int64_t k = 0; k < m->groups * GROUP; k += 16)
#pragma GCC unroll 4
        for (int f = 0; f < 4; f++, w += CELL * 4) {
            bytes weights[TILE_PARTS];
            for (int p = 0; p < TILE_PARTS; p++) {
                weights[p] = load_bytes(w + p * LANES * 4);
                if (rows == 1) __builtin_prefetch(w + p * LANES * 4 + FETCHED_AHEAD, 0, 2);
            }
            for (int r = 0; r < rows; r++) {
                bytes four = spread_word(q + r * padded(x) + k + f * 4);
                for (int p = 0; p < TILE_PARTS; p++) sum[f % chains][r][p] = dot_full(sum[f % chains][r][p], weights[p], four);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) {
            ints whole = sum[0][r][p];
            for (int c = 1; c < chains; c++) whole = sum_of(whole, sum[c][r][p]);
            store(&out[r][at + p * LANES], byte_value(whole, load(units + p * LANES), x->scales[first + r]));
        }
}

TILE(tile_bytes, tile_of_whole, INT8)

#endif

#if HAS_TILES

/* Rows of up to two tiles times a cell, and where they belong. */
typedef struct {
    _Alignas(64) int32_t sums[2][2][TILE_HEIGHT][LANES];  /* [tile of rows][half of the cell] */
    int64_t row, rows;
    int64_t height;              /* rows of a tile */
    floats units[2];             /* of the halves of the cell */
    const float *bias;           /* of the cell, or NULL */
    float *to;                   /* column of the cell, row 0 */
} ByteBatch;

ALWAYS floats tile_value(const ByteBatch *b, const Rows *x, int64_t r, int h) {
    const int32_t *sums = r < b->height ? b->sums[0][h][r] : b->sums[1][h][r - b->height];
    ints whole = _mm512_sub_epi32(_mm512_load_si512(sums), spread_int(WEIGHT8_OFFSET * x->sums[b->row + r]));
    return byte_value(whole, b->units[h], x->scales[b->row + r]);
}

/* Rows [first, end) of a batch: what finish() does, without memory in between. */
ALWAYS void put_rows(const int paired, const Then then, const ByteBatch *b, const Rows *x, int64_t stride, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
        floats early = tile_value(b, x, r, 0), late = tile_value(b, x, r, 1);
        float *to = b->to + (b->row + r) * stride;
        if (b->bias) early += load(b->bias), late += load(b->bias + HALF);
        if (paired) early = silu_lanes(early) * late;
        if (then == ADD) early += load(to);
        store(to, early);
        if (paired) continue;
        if (then == ADD) late += load(to + HALF);
        store(to + HALF, late);
    }
}

/* One or two tiles of rows times a cell. Tiles multiply without the rest of the core, which meanwhile puts the rows of the batch
 * before where they belong. */
ALWAYS void byte_products(const int tiles, const int paired, const Then then, const Rows *x, const uint8_t *w, int64_t inputs, int fetches,
                          int64_t stride, ByteBatch *b, const ByteBatch *before) {
    int64_t width = padded(x), at_once = before->rows * STEP_OF_TILES / inputs + 1;
    const int8_t *q = x->quantised + b->row * width;
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 2) _tile_zero(2);
    if (tiles == 2) _tile_zero(3);
    for (int64_t k = 0, done = 0; k < inputs; k += STEP_OF_TILES, w += STEP_OF_TILES * CELL) {
        if (fetches)
            for (int64_t i = 0; i < STEP_OF_TILES * CELL; i += 64) __builtin_prefetch(w + TILES_AHEAD + i, 0, 2);
        _tile_loadd(4, q + k, width);
        _tile_loadd(6, w, CELL * 4);
        _tile_loadd(7, w + HALF * 4, CELL * 4);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, q + b->height * width + k, width);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        int64_t end = smaller(done + at_once, before->rows);
        put_rows(paired, then, before, x, stride, done, end);
        done = end;
    }
    _tile_stored(0, b->sums[0][0], 64);
    _tile_stored(1, b->sums[0][1], 64);
    if (tiles == 2) _tile_stored(2, b->sums[1][0], 64);
    if (tiles == 2) _tile_stored(3, b->sums[1][1], 64);
}

/* Cells [cell, last). With KEEP_BEST, finish() gets the results. */
ALWAYS void byte_tiles(const int paired, const Then then, const Matrix *m, int64_t cell, int64_t last, const Rows *x, int64_t first,
                       int64_t end, const Out *out) {
    int64_t tiles = (end - first + TILE_HEIGHT - 1) / TILE_HEIGHT, height = (end - first + tiles - 1) / tiles;
    int64_t inputs = m->groups * GROUP, columns = paired ? HALF : CELL, stride = out->stride;
    ByteBatch batches[2], *b = &batches[0], *before = &batches[1];
    before->rows = 0;
    tiles_for(FOR_PRODUCTS, height);
    for (; cell < last; cell++)
        for (int64_t row = first; row < end; row += 2 * height) {
            const float *units = (const float *)m->scales + cell * CELL;
            const uint8_t *w = m->numbers + cell * cell_bytes(m);
            b->row = row, b->rows = smaller(2 * height, end - row), b->height = height;
            b->units[0] = load(units), b->units[1] = load(units + HALF);
            b->bias = m->bias ? m->bias + cell * CELL : NULL, b->to = out->data + cell * columns;
            for (int64_t r = 0; then != KEEP_BEST && r < b->rows; r++)  /* the other members' lines come while tiles multiply */
                for (int64_t i = 0; i < columns; i += LANES) __builtin_prefetch(b->to + (row + r) * stride + i, 1, 3);
            if (b->rows > height) byte_products(2, paired, then, x, w, inputs, row == first, stride, b, before);
            else byte_products(1, paired, then, x, w, inputs, row == first, stride, b, before);
            if (then == KEEP_BEST) {
                _Alignas(64) float results[2 * TILE_HEIGHT][CELL];
                for (int64_t r = 0; r < b->rows; r++)
                    for (int h = 0; h < 2; h++) store(results[r] + h * HALF, tile_value(b, x, r, h));
                finish(m, cell, b->rows, results, row, out);
            } else {
                ByteBatch *other = before;
                before = b, b = other;
            }
        }
    put_rows(paired, then, before, x, stride, 0, before->rows);
}

static void byte_tiles_times_rows(const Matrix *m, int64_t cell, int64_t last, const Rows *x, int64_t first, int64_t end, const Out *out) {
    int64_t columns = m->paired ? HALF : CELL, whole = out->then == KEEP_BEST ? cell : larger(cell, smaller(last, out->width / columns));
    if (m->paired) byte_tiles(1, STORE, m, cell, whole, x, first, end, out);
    else if (out->then == STORE) byte_tiles(0, STORE, m, cell, whole, x, first, end, out);
    else byte_tiles(0, ADD, m, cell, whole, x, first, end, out);
    byte_tiles(0, KEEP_BEST, m, whole, last, x, first, end, out);
}

#endif
