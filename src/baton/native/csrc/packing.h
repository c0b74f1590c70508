/* From a file's rows to a matrix (matrix.h), by several threads: whoever is free takes the next rows.
 *
 * Outputs are apart in memory, so rows need no order; but sums of floats do. So the squares of the weights are summed up for each
 * run of rows, and the runs in their order: the same bits with any number of threads.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "matrix.h"
#include "memory.h"

#define RUN_ROWS 64        /* taken at once */
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

/* What a thread needs beside: the floats of a row, one over the balance, a row as Q4_1. */
typedef struct { float *x, *inverse; uint8_t *blocks; } PackingRoom;

static void pack_row(const Packing *p, const PackingRoom *room, int64_t row, float *squares) {
    const Matrix *m = p->matrix;
    const uint8_t *from = p->rows + row * p->row_bytes;
    int64_t to = p->places[row];
    if (m->kind == p->stored && m->kind != F32 && m->kind != INT8) {
        pack_nibbles(m, from, to);
        return;
    }
    if (m->kind == INT4M && p->stored == Q4_K) {
        q4_1_of_q4_k(from, m->inputs, room->blocks);
        pack_nibbles(m, room->blocks, to);
        return;
    }
    floats_of_row(p->stored, from, m->inputs, room->x);
    if (m->kind == INT4M) {
        q4_1_of_floats(room->x, m->inputs, room->blocks);
        pack_nibbles(m, room->blocks, to);
    } else if (m->kind == F32) {
        pack_floats(m, (const uint8_t *)room->x, to);
    } else {
        for (int64_t i = 0; squares && i < m->inputs; i++) squares[i] += room->x[i] * room->x[i];
        pack_bytes(m, room->x, room->inverse, to);
    }
}

static void *packer(void *with) {
    Packing *p = with;
    int64_t inputs = p->matrix->inputs, runs = (p->count + RUN_ROWS - 1) / RUN_ROWS;
    PackingRoom own = {room(inputs * 4), room(inputs * 4), room(round_up(inputs, GROUP) / GROUP * Q4_1_BYTES)};
    if (!own.x || !own.inverse || !own.blocks) p->failed = 1;
    for (int64_t i = 0; !p->failed && p->matrix->kind == INT8 && i < inputs; i++)
        own.inverse[i] = 1.0f / ((const float *)p->matrix->minima)[i];
    for (int64_t run; !p->failed && (run = p->next++) < runs;) {
        float *squares = p->of_runs ? p->of_runs + run * inputs : NULL;
        for (int64_t row = run * RUN_ROWS; row < smaller((run + 1) * RUN_ROWS, p->count); row++) pack_row(p, &own, row, squares);
    }
    free(own.x), free(own.inverse), free(own.blocks);
    return NULL;
}

/* 0, or 1 where there is not enough memory. Where the system gives no further thread, those that there are do it all. */
static int pack_rows(Packing *p, int threads) {
    int64_t inputs = p->matrix->inputs, runs = (p->count + RUN_ROWS - 1) / RUN_ROWS;
    if (p->squares && !(p->of_runs = calloc((size_t)(runs * inputs), 4))) return 1;
    pthread_t others[PACKERS_MOST];
    int begun = 0;
    for (int64_t wanted = smaller(smaller(threads, runs), PACKERS_MOST) - 1; begun < wanted; begun++)
        if (pthread_create(&others[begun], NULL, packer, p)) break;
    packer(p);
    while (begun) pthread_join(others[--begun], NULL);
    for (int64_t run = 0; p->of_runs && run < runs; run++)
        for (int64_t i = 0; i < inputs; i++) p->squares[i] += p->of_runs[run * inputs + i];
    free(p->of_runs);
    return p->failed;
}
