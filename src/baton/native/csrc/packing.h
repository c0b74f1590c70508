/* Packs a file's rows into a matrix (matrix.h), by several threads: a free thread takes the next rows.
 *
 * Outputs are apart in memory, so rows need no order; but sums of floats do. So the squares of the weights are summed for each
 * run of rows, and the runs in order: the same bits with any number of threads.
 */
#pragma once

#include "tuning.h"
#include <pthread.h>
#include <stdatomic.h>

#include "matmul.h"
#include "alloc.h"

#define PACKERS_MOST 256

typedef struct {
    const Matrix *matrix;
    int stored;
    const uint8_t *rows;
    int64_t row_bytes;
    const int64_t *places;
    int64_t count;
    float *squares;        /* [inputs] or NULL */
    float *of_runs;        /* [runs][inputs] or NULL */
    _Atomic int64_t next;  /* run */
    _Atomic int failed;
} Packing;

/* Room of one thread. */
typedef struct {
    float *x, *inverse;  /* [inputs] of a row, and one over the input scale */
    uint8_t *rows;       /* of a panel, on their way into it */
} PackingRoom;

/* Bytes of a row on its way: Q4_1, Q8_0, or bytes. Not a power of two: rows that are read side by side would share cache sets. */
static int64_t room_stride(const Matrix *m) {
    return m->groups * (m->kind == ROTATED_INT8 ? GROUP : m->kind == GROUPED_INT8 ? Q8_0_BYTES : Q4_1_BYTES) + LINE;
}

static void add_squares(const float *restrict x, int64_t count, float *restrict squares) {
    for (int64_t i = 0; i < count; i++) squares[i] += x[i] * x[i];
}

static int is_packed_as_stored(int kind, int stored) {
    return kind == GROUPED_INT8 ? stored == Q8_0 : kind == stored && (kind == Q4_0 || kind == Q4_1 || kind == MXFP4);
}

/* Rows [first, first + count): outputs of one panel. */
static void pack_panel(const Packing *p, const PackingRoom *own, int64_t first, int64_t count, float *squares) {
    const Matrix *m = p->matrix;
    const uint8_t *from = p->rows + first * p->row_bytes;
    const int64_t *places = p->places + first;
    if (is_packed_as_stored(m->kind, p->stored)) {
        pack_q4(m, from, p->row_bytes, places, count);
        return;
    }
    for (int64_t r = 0; r < count; r++, from += p->row_bytes) {
        uint8_t *row = own->rows + r * room_stride(m);
        if (m->kind == Q4_1 && p->stored == Q4_K) {
            q4_1_of_q4_k(from, m->inputs, row);
            continue;
        }
        floats_of_row(p->stored, from, m->inputs, own->x);
        if (m->kind == F32) pack_floats(m, own->x, places[r]);
        if (m->kind == Q4_1) q4_1_of_floats(own->x, m->inputs, row);
        if (m->kind == GROUPED_INT8) q8_0_of_floats(own->x, m->inputs, row);
        if (m->kind != ROTATED_INT8) continue;
        if (squares) add_squares(own->x, m->inputs, squares);
        quantize_weights_int8(m, own->x, own->inverse, places[r], (int8_t *)row);
    }
    if (m->kind == Q4_1 || m->kind == GROUPED_INT8) pack_q4(m, own->rows, room_stride(m), places, count);
    if (m->kind == ROTATED_INT8) pack_int8(m, (const int8_t *)own->rows, room_stride(m), places, count);
}

static void pack_run(const Packing *p, const PackingRoom *own, int64_t first, int64_t end, float *squares) {
    while (first < end) {
        int64_t next = first + 1;
        while (next < end && p->places[next] / PANEL == p->places[first] / PANEL) next++;
        pack_panel(p, own, first, next - first, squares);
        first = next;
    }
}

static void *packer(void *with) {
    Packing *p = with;
    const Matrix *m = p->matrix;
    int64_t inputs = m->inputs, runs = (p->count + RUN_ROWS - 1) / RUN_ROWS;
    PackingRoom own = {alloc_aligned(inputs * 4), alloc_aligned(inputs * 4), alloc_aligned(PANEL * room_stride(m))};
    if (!own.x || !own.inverse || !own.rows) p->failed = 1;
    for (int64_t i = 0; !p->failed && m->kind == ROTATED_INT8 && i < inputs; i++) own.inverse[i] = 1.0f / m->input_scales[i];
    for (int64_t run; !p->failed && (run = p->next++) < runs;) {
        float *squares = p->of_runs ? p->of_runs + run * inputs : NULL;
        pack_run(p, &own, run * RUN_ROWS, min_int((run + 1) * RUN_ROWS, p->count), squares);
    }
    free(own.x), free(own.inverse), free(own.rows);
    return NULL;
}

/* 0, or 1 if there is not enough memory. If the system provides fewer threads, these do all the work. */
static int pack_rows(Packing *p, int threads) {
    int64_t inputs = p->matrix->inputs, runs = (p->count + RUN_ROWS - 1) / RUN_ROWS;
    if (p->squares && !(p->of_runs = calloc((size_t)(runs * inputs), 4))) return 1;
    pthread_t others[PACKERS_MOST];
    int begun = 0;
    for (int64_t wanted = min_int(min_int(threads, runs), PACKERS_MOST) - 1; begun < wanted; begun++)
        if (pthread_create(&others[begun], NULL, packer, p)) break;
    packer(p);
    while (begun) pthread_join(others[--begun], NULL);
    for (int64_t run = 0; p->of_runs && run < runs; run++)
        for (int64_t i = 0; i < inputs; i++) p->squares[i] += p->of_runs[run * inputs + i];
    free(p->of_runs);
    return p->failed;
}
