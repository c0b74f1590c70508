/* Products of any kind of weights: which kernel takes which rows, and how a product is dealt out to the team. */
#pragma once

#include "matmul_int8.h"
#if HAS_AMX
#include "matmul_int8_amx.h"
#include "matmul_q4_amx.h"
#else
#include "matmul_q4.h"
#endif

/* Functions that matmul_q4.h and matmul_q4_amx.h both have:
 *
 *   quantize_row_q8   floats of a row become what the products take
 *   plan_q4           groups of a matrix, and bytes of its scales and corrections
 *   pack_q4           GGUF's blocks of rows become the outputs `places` of one panel
 *   copy_row_q8       a row that was quantised, in another place
 *   q4_times_rows     rows [first, end) through one panel
 */

/* ---- numbers of any kind ---- */

/* Rows [first, end) through panels [panel, last). `scratch` holds a panel as bytes. */
static void int8_times_rows(const Matrix *m, int64_t panel, int64_t last, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                             const Out *out) {
    (void)scratch;
#if HAS_AMX
    if (end - first >= INT8_AMX_FROM) {
        int8_amx_times_rows(m, panel, last, x, first, end, out);
        return;
    }
#endif
    for (; panel < last; panel++) {
        const uint8_t *w = m->numbers + panel * panel_bytes(m);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        if (end - first >= SMMLA_FROM) int8_smmla_times_rows(m, panel, w, x, first, end, scratch, out);
        else tiles_times_rows(int8_sdot_of_panel, SDOT_ROWS, m, w, panel, x, first, end, out);
#elif defined(__aarch64__)
        tiles_times_rows(int8_sdot_of_panel, SDOT_ROWS, m, w, panel, x, first, end, out);
#else
        tiles_times_rows(tile_bytes, TILE_ROWS, m, w, panel, x, first, end, out);
#endif
    }
}

/* Fills in the fields that follow from kind and size, and returns the bytes of numbers, scales and corrections. */
static void plan(Matrix *m, int64_t sizes[3]) {
    m->panels = (m->outputs + PANEL - 1) / PANEL, m->groups = 0, sizes[1] = sizes[2] = 0;
    if (m->kind == ROTATED_INT8) plan_int8(m, sizes);
    else if (m->kind != F32) plan_q4(m, sizes);
    sizes[0] = m->panels * panel_bytes(m);
}

/* Quantises a row for this matrix. */
static void quantize_for(const Matrix *m, const Rows *rows, int64_t row) {
    if (m->kind == ROTATED_INT8) quantize_row_int8(m, rows, row);
    else if (m->kind != F32) quantize_row_q8(m, rows, row);
}

/* A row that was quantised for this matrix, or one like it, becomes row `to` of others. */
static void copy_row(const Matrix *m, const Rows *from, int64_t row, const Rows *into, int64_t to) {
    if (m->kind == F32) memcpy(into->plain + to * into->width, from->plain + row * from->width, (size_t)from->width * 4);
    else if (m->kind == ROTATED_INT8) copy_row_int8(from, row, into, to);
    else copy_row_q8(from, row, into, to);
}

static void panels_times_rows(const Matrix *m, int64_t panel, int64_t last, const Rows *x, int64_t first, int64_t end, uint8_t *scratch,
                             const Out *out) {
    if (m->kind == ROTATED_INT8) {
        int8_times_rows(m, panel, last, x, first, end, scratch, out);
        return;
    }
    for (; panel < last; panel++) {
        if (m->kind == F32) tiles_times_rows(tile_f32, TILE_ROWS, m, m->numbers + panel * panel_bytes(m), panel, x, first, end, out);
        else q4_times_rows(m, panel, x, first, end, scratch, out);
    }
}

/* How the panels of a product are dealt out: long runs first, so that a member reads on where it has read (what it fetches ahead is
 * its own next panel), then shorter and shorter ones, so that all are done at the same time. */
typedef struct { int64_t first, end; } Run;

ALWAYS int64_t run_length(int64_t left, int64_t threads) { return max_int(1, left / (2 * threads)); }

static int64_t runs_of(int64_t panels, int64_t threads) {
    int64_t runs = 0;
    for (int64_t length; (length = run_length(panels, threads)) > 1; runs += threads) panels -= length * threads;
    return runs + panels;
}

static Run run_number(int64_t number, int64_t panels, int64_t threads) {
    int64_t first = 0, length;
    for (; (length = run_length(panels - first, threads)) > 1 && number >= threads; number -= threads) first += length * threads;
    return (Run){first + number * length, first + (number + 1) * length};
}

/* Number of chunks of a product: runs of panels, or where there are very many rows, (panel, rows). */
static int64_t chunks_of(const Matrix *m, int64_t rows, int64_t threads) {
    int64_t row_chunks = (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
    return row_chunks > 1 ? m->panels * row_chunks : runs_of(m->panels, threads);
}

/* A phase: a whole product. */
static void multiply(Member *me, const Matrix *m, const Rows *x, int64_t rows, uint8_t *scratch, const Out *out) {
    int64_t row_chunks = (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, threads = me->team->threads;
    int64_t chunks = chunks_of(m, rows, threads);
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;) {
        int64_t first = chunk % row_chunks * ROWS_PER_CHUNK, end = min_int(first + ROWS_PER_CHUNK, rows);
        Run run = row_chunks > 1 ? (Run){chunk / row_chunks, chunk / row_chunks + 1} : run_number(chunk, m->panels, threads);
        panels_times_rows(m, run.first, run.end, x, first, end, scratch, out);
    }
    amx_end();
    barrier(me, chunks);
}
