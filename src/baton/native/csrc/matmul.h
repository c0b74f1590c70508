/* Products of any kind of weights: which kernel takes which rows, and how a product is dealt out to the team. */
#pragma once

#include "matmul_int8.h"
#if HAS_TILES
#include "matmul_int8_amx.h"
#include "matmul_q4_amx.h"
#else
#include "matmul_q4.h"
#endif

/* ---- numbers of four bits ----
 *
 *   quantise_row           floats of a row become what the products take
 *   plan_nibbles           groups of a matrix, and bytes of its scales and minima
 *   pack_nibbles           GGUF's blocks of rows become the outputs `places` of one cell
 *   nibbles_times_rows     rows [first, end) through one cell
 */


/* ---- numbers of any kind ---- */

/* Rows [first, end) through cells [cell, last). `scratch` holds a cell as bytes. */
static void bytes_times_rows(const Matrix *m, int64_t cell, int64_t last, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                             const Out *out) {
    (void)scratch;
#if HAS_TILES
    if (end - first >= BYTE_TILES_FROM) {
        byte_tiles_times_rows(m, cell, last, x, first, end, out);
        return;
    }
#endif
    for (; cell < last; cell++) {
        const uint8_t *w = m->numbers + cell * cell_bytes(m);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if (end - first >= SQUARES_FROM) byte_squares_times_rows(m, cell, w, x, first, end, scratch, out);
        else tiles_times_rows(byte_dots_of_cell, DOTS_ROWS, m, w, cell, x, first, end, out);
#elif defined(__aarch64__)
        tiles_times_rows(byte_dots_of_cell, DOTS_ROWS, m, w, cell, x, first, end, out);
#else
        tiles_times_rows(tile_bytes, TILE_ROWS, m, w, cell, x, first, end, out);
#endif
    }
}

/* Fills in what follows from kind and size, and says how many bytes numbers, scales and minima take. */
static void plan(Matrix *m, int64_t bytes[3]) {
    m->cells = (m->outputs + CELL - 1) / CELL, m->groups = 0, bytes[1] = bytes[2] = 0;
    if (m->kind == INT8) plan_bytes(m, bytes);
    else if (m->kind != F32) plan_nibbles(m, bytes);
    bytes[0] = m->cells * cell_bytes(m);
}

/* A row as this matrix takes it. */
static void quantise_for(const Matrix *m, const Rows *rows, int64_t row) {
    if (m->kind == INT8) bytes_of_row(m, rows, row);
    else if (m->kind != F32) quantise_row(rows, row);
}

static void cells_times_rows(const Matrix *m, int64_t cell, int64_t last, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                             const Out *out) {
    if (m->kind == INT8) {
        bytes_times_rows(m, cell, last, x, first, end, scratch, out);
        return;
    }
    for (; cell < last; cell++) {
        if (m->kind == F32) tiles_times_rows(tile_f32, TILE_ROWS, m, m->numbers + cell * cell_bytes(m), cell, x, first, end, out);
        else nibbles_times_rows(m, cell, x, first, end, scratch, out);
    }
}

/* How the cells of a product are dealt out: long runs first, so that a member reads on where it has read (what it fetches ahead is
 * its own next cell), then shorter and shorter ones, so that all are done at the same time. */
typedef struct { int64_t first, end; } Run;

ALWAYS int64_t run_length(int64_t left, int64_t threads) { return larger(1, left / (2 * threads)); }

static int64_t runs_of(int64_t cells, int64_t threads) {
    int64_t runs = 0;
    for (int64_t length; (length = run_length(cells, threads)) > 1; runs += threads) cells -= length * threads;
    return runs + cells;
}

static Run run_number(int64_t number, int64_t cells, int64_t threads) {
    int64_t first = 0, length;
    for (; (length = run_length(cells - first, threads)) > 1 && number >= threads; number -= threads) first += length * threads;
    return (Run){first + number * length, first + (number + 1) * length};
}

/* Of a product: runs of cells, or where there are very many rows, (cell, rows). */
static int64_t pieces_of(const Matrix *m, int64_t rows, int64_t threads) {
    int64_t layers = (rows + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE;
    return layers > 1 ? m->cells * layers : runs_of(m->cells, threads);
}

/* A phase: a whole product. */
static void multiply(Member *me, const Matrix *m, const Rows *x, int64_t rows, uint8_t *scratch, const Out *out) {
    int64_t layers = (rows + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE, threads = me->team->threads;
    int64_t pieces = pieces_of(m, rows, threads);
    for (int64_t piece; (piece = take(me, pieces)) >= 0;) {
        int64_t first = piece % layers * ROWS_OF_A_PIECE, end = smaller(first + ROWS_OF_A_PIECE, rows);
        Run run = layers > 1 ? (Run){piece / layers, piece / layers + 1} : run_number(piece, m->cells, threads);
        cells_times_rows(m, run.first, run.end, x, first, end, scratch, out);
    }
    tiles_end();
    meet(me, pieces);
}
