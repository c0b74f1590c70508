/* Weights as the products read them, and the products.
 *
 * A *cell* is 32 outputs wide and as long as a row of activations. It is read from its first byte to its last, and as many
 * rows of activations as there are go through it while it is in the first caches. Within a cell, numbers that follow each
 * other along the row lie in fours, output beside output: a vector of them meets four activations that are spread to all
 * lanes, and no sum across lanes is ever needed.
 *
 *   F32   [cell][input][output]                                  float
 *   INT8  [cell][group][8 fours][output][4]                      byte + WEIGHT8_OFFSET      scale: [cell][group][output] half
 *   INT4  [cell][group][4 pairs of fours][output][4]             two nibbles, fours p and p + 4     value = scale * (nibble - 8)
 *   INT4M the same                                                value = scale * nibble + minimum
 *
 * These are GGUF's Q8_0, Q4_0 and Q4_1 with words of four bytes put elsewhere: no number changes.
 *
 * A product of a group is exact, in integers; sums over groups are one chain of fused multiply-adds in the order of the
 * groups. So the bits of an output depend on its row and its weights, not on the batch, the tile or the thread, and the
 * same comes out of every kernel of this file.
 */
#pragma once

#include "activations.h"
#include "team.h"

#define CELL 32
#define FOURS (GROUP / 4)
#define TILE_OUTPUTS (TILE_PARTS * LANES)
#define ROWS_OF_A_PIECE 128  /* of a piece of work: enough to make use of a cell that was fetched */
#define UNPACK_FROM 12       /* rows for which it pays to turn the nibbles of a cell into bytes first */

typedef enum { F32, INT8, INT4, INT4M } Kind;

typedef struct {
    int32_t kind;
    int32_t paired;           /* outputs 0-15 of a cell are gates, 16-31 what they let through: 16 results */
    int64_t outputs, inputs;  /* `outputs` as they are stored */
    int64_t cells, groups;
    const uint8_t *numbers;
    const half *scales, *minima;
    const float *bias;        /* [cells * CELL] or NULL */
} Matrix;

/* ---- packing ---- */

static int64_t cell_bytes(const Matrix *m) {
    return m->kind == F32 ? m->inputs * CELL * 4 : m->kind == INT8 ? m->groups * GROUP * CELL : m->groups * GROUP * CELL / 2;
}

/* Row `from` of GGUF blocks (or of floats) becomes output `to`. */
static void pack_row(const Matrix *m, const uint8_t *row, int64_t to) {
    int64_t cell = to / CELL, at = to % CELL;
    uint8_t *numbers = (uint8_t *)m->numbers + cell * cell_bytes(m);
    if (m->kind == F32) {
        for (int64_t k = 0; k < m->inputs; k++) memcpy(numbers + (k * CELL + at) * 4, row + k * 4, 4);
        return;
    }
    int words = m->kind == INT8 ? FOURS : FOURS / 2;
    const uint32_t offset = m->kind == INT8 && WEIGHT8_OFFSET ? 0x80808080u : 0;
    for (int64_t g = 0; g < m->groups; g++) {
        int64_t scale = (cell * m->groups + g) * CELL + at;
        memcpy((half *)m->scales + scale, row, 2), row += 2;
        if (m->kind == INT4M) memcpy((half *)m->minima + scale, row, 2), row += 2;
        for (int w = 0; w < words; w++, row += 4) {
            uint32_t word;
            memcpy(&word, row, 4);
            word ^= offset;
            memcpy(numbers + ((g * words + w) * CELL + at) * 4, &word, 4);
        }
    }
}

/* ---- tiles: `rows` rows of activations times TILE_OUTPUTS outputs of a cell, from `at` on ---- */

/* Bytes of weights: a cell of INT8 as it is packed, or one of nibbles that was unpacked into bytes. */
ALWAYS void tile_of_bytes(const int rows, const int kind, const Matrix *m, const uint8_t *w, int64_t cell, int at,
                          const Rows *x, int64_t first, float (*out)[CELL]) {
    floats sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = spread(0.0f);
    const half *scales = m->scales + cell * m->groups * CELL + at;
    const half *minima = m->minima + cell * m->groups * CELL + at;
    const int8_t *q = x->quantised + first * x->width;
    w += at * 4;
    for (int64_t g = 0; g < m->groups; g++, scales += CELL, minima += CELL, q += GROUP) {
        ints whole[TILE_ROWS][TILE_PARTS];
        for (int r = 0; r < rows; r++) {
            const int offset = kind == INT8 ? WEIGHT8_OFFSET : kind == INT4 ? 8 : 0;
            ints start = spread_int(offset ? -offset * x->sums[g * x->stride + first + r] : 0);
            for (int p = 0; p < TILE_PARTS; p++) whole[r][p] = start;
        }
#pragma GCC unroll 8
        for (int f = 0; f < FOURS; f++, w += CELL * 4) {
            bytes weights[TILE_PARTS];
            for (int p = 0; p < TILE_PARTS; p++) weights[p] = load_bytes(w + p * LANES * 4);
            for (int r = 0; r < rows; r++) {
                bytes four = spread_word(q + r * x->width + f * 4);
                for (int p = 0; p < TILE_PARTS; p++)
                    whole[r][p] = kind == INT8 ? dot_full(whole[r][p], weights[p], four) : dot_small(whole[r][p], weights[p], four);
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
    const half *scales = m->scales + cell * m->groups * CELL + at;
    const half *minima = m->minima + cell * m->groups * CELL + at;
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

ALWAYS void tile_of_floats(const int rows, const Matrix *m, const uint8_t *numbers, int at, const Rows *x, int64_t first,
                           float (*out)[CELL]) {
    floats sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = spread(0.0f);
    const float *w = (const float *)numbers + at, *row = x->plain + first * x->width;
    for (int64_t k = 0; k < m->inputs; k++, w += CELL)
        for (int p = 0; p < TILE_PARTS; p++) {
            floats weights = load(w + p * LANES);
            for (int r = 0; r < rows; r++) sum[r][p] = fused(spread(row[r * x->width + k]), weights, sum[r][p]);
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

/* ---- one tile of all the outputs of a cell ---- */

typedef enum { AS_BYTES, AS_NIBBLES, AS_FLOATS } Form;

ALWAYS void tile_of_cell(const int rows, const Form form, const int kind, const Matrix *m, const uint8_t *w, int64_t cell,
                         const Rows *x, int64_t first, float (*out)[CELL]) {
    for (int at = 0; at < CELL; at += TILE_OUTPUTS) {
        if (form == AS_FLOATS) tile_of_floats(rows, m, w, at, x, first, out);
        else if (form == AS_NIBBLES) tile_of_nibbles(rows, kind, m, w, cell, at, x, first, out);
        else tile_of_bytes(rows, kind, m, w, cell, at, x, first, out);
    }
}

#define TILE(name, form, kind)                                                                                          \
    static void name(int rows, const Matrix *m, const uint8_t *w, int64_t cell, const Rows *x, int64_t first,           \
                     float (*out)[CELL]) {                                                                              \
        switch (rows) {                                                                                                 \
            case 1: tile_of_cell(1, form, kind, m, w, cell, x, first, out); break;                                      \
            case 2: tile_of_cell(2, form, kind, m, w, cell, x, first, out); break;                                      \
            TILE_3(form, kind) TILE_4(form, kind) TILE_5_6(form, kind)                                                  \
        }                                                                                                               \
    }
#define TILE_CASE(n, form, kind) case n: tile_of_cell(n, form, kind, m, w, cell, x, first, out); break;
#if TILE_ROWS >= 3
#define TILE_3(form, kind) TILE_CASE(3, form, kind)
#else
#define TILE_3(form, kind)
#endif
#if TILE_ROWS >= 4
#define TILE_4(form, kind) TILE_CASE(4, form, kind)
#else
#define TILE_4(form, kind)
#endif
#if TILE_ROWS >= 6
#define TILE_5_6(form, kind) TILE_CASE(5, form, kind) TILE_CASE(6, form, kind)
#else
#define TILE_5_6(form, kind)
#endif

TILE(tile_f32, AS_FLOATS, F32)
TILE(tile_int8, AS_BYTES, INT8)
TILE(tile_int4, AS_NIBBLES, INT4)
TILE(tile_int4m, AS_NIBBLES, INT4M)
TILE(tile_int4_bytes, AS_BYTES, INT4)
TILE(tile_int4m_bytes, AS_BYTES, INT4M)

/* ---- what is done with a tile's outputs ---- */

typedef enum { STORE, ADD } Then;

typedef struct {
    Then then;
    float *data;      /* [rows][stride] */
    int64_t stride, width;
} Out;

/* Adds the bias, pairs gates, and stores what exists of the outputs of one cell. */
static void finish(const Matrix *m, int64_t cell, int64_t rows, float (*tile)[CELL], int64_t first, const Out *out) {
    int64_t columns = m->paired ? CELL / 2 : CELL, begin = cell * columns;
    int64_t width = smaller(columns, out->width - begin);
    for (int64_t r = 0; r < rows; r++) {
        float *restrict t = tile[r], *restrict to = out->data + (first + r) * out->stride + begin;
        if (m->bias)
            for (int j = 0; j < CELL; j++) t[j] += m->bias[cell * CELL + j];
        if (m->paired)
            for (int j = 0; j < CELL / 2; j++) t[j] = silu(t[j]) * t[j + CELL / 2];
        if (out->then == ADD)
            for (int64_t j = 0; j < width; j++) to[j] += t[j];
        else
            for (int64_t j = 0; j < width; j++) to[j] = t[j];
    }
}

#if defined(__aarch64__)
#include "neon.h"
#endif

/* Rows [first, end) through one cell. `scratch` holds a cell as bytes. */
static void cell_times_rows(const Matrix *m, int64_t cell, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                            const Out *out) {
    const uint8_t *w = m->numbers + cell * cell_bytes(m);
#if defined(__aarch64__)
    if (m->kind != F32) {
        neon_cell_times_rows(m, cell, w, x, first, end, scratch, out);
        return;
    }
#endif
    void (*tile)(int, const Matrix *, const uint8_t *, int64_t, const Rows *, int64_t, float (*)[CELL]) =
        m->kind == F32 ? tile_f32 : m->kind == INT8 ? tile_int8 : m->kind == INT4 ? tile_int4 : tile_int4m;
    if ((m->kind == INT4 || m->kind == INT4M) && end - first >= UNPACK_FROM) {
        unpack_cell(m, w, scratch);
        w = scratch;
        tile = m->kind == INT4 ? tile_int4_bytes : tile_int4m_bytes;
    }
    while (first < end) {
        float results[TILE_ROWS][CELL];
        int64_t rows = smaller(TILE_ROWS, end - first);
        tile((int)rows, m, w, cell, x, first, results);
        finish(m, cell, rows, results, first, out);
        first += rows;
    }
}

/* A phase: a whole product; pieces are (cells, rows), cells of one piece beside each other. */
static void multiply(Member *me, const Matrix *m, const Rows *x, int64_t rows, uint8_t *scratch, const Out *out) {
    int64_t cells_at_once = larger(1, m->cells / (8 * me->team->threads));
    if (rows > ROWS_OF_A_PIECE) cells_at_once = 1;
    int64_t stripes = (m->cells + cells_at_once - 1) / cells_at_once, layers = (rows + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE;
    for (int64_t piece; (piece = take(me, stripes * layers)) >= 0;) {
        int64_t first = piece % layers * ROWS_OF_A_PIECE, cell = piece / layers * cells_at_once;
        for (int64_t c = cell; c < smaller(cell + cells_at_once, m->cells); c++)
            cell_times_rows(m, c, x, first, smaller(first + ROWS_OF_A_PIECE, rows), scratch, out);
    }
    meet(me, stripes * layers);
}
