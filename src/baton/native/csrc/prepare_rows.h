/* Prepares rows for a product: normalised and quantised, by the team or by every member for itself. */
#pragma once

#include "working_memory.h"

typedef struct {
    const float *rows;      /* [tokens][width] */
    Norm norm;
    const Matrix *matrix;   /* that takes them */
} Source;

static void norm_of_row(const Model *m, const Norm *norm, const float *x, int64_t width, float *to) {
    if (m->layer_norm) layer_norm_row(x, norm->weight, norm->bias, width, m->norm_eps, to);
    else norm_row(x, norm->weight, width, m->norm_eps, to);
}

static void prepare_row(const Decoder *decoder, const Source *from, int64_t row, const Rows *into) {
    int64_t width = into->width;
    const float *x = from->rows + row * width;
    float *to = into->plain + row * width;
    if (from->norm.weight) norm_of_row(decoder->model, &from->norm, x, width, to);
    else if (x != to) memcpy(to, x, (size_t)width * 4);
    quantize_for(from->matrix, into, row);
}

/* Two phases: the slots of all ranks are added to the residual, as sums, normed first where there is such a norm. */
static void add_of_ranks(Member *me, const Decoder *decoder, int64_t rows, const Norm *norm, uint32_t meeting) {
    const Model *m = decoder->model;
    while (next_chunk(me, 1) >= 0) meet(m->exchange, meeting);
    barrier(me, 1);
    for (int64_t row; (row = next_chunk(me, rows)) >= 0;) {
        float sum[m->hidden], normed[m->hidden], *hidden = decoder->shared.hidden + row * m->hidden;
        sum_slots(m->exchange, meeting, row * m->hidden, m->hidden, sum);
        if (norm->weight) norm_of_row(m, norm, sum, m->hidden, normed);
        const float *added = norm->weight ? normed : sum;
        for (int64_t i = 0; i < m->hidden; i++) hidden[i] += added[i];
    }
    barrier(me, rows);
}

/* A phase: rows ready for a product. */
static void prepare_shared(Member *me, const Decoder *decoder, const Source *from, int64_t rows, const Rows *into) {
    int64_t chunks = (rows + PREPARED_ROWS - 1) / PREPARED_ROWS;
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;)
        for (int64_t row = chunk * PREPARED_ROWS; row < min_int((chunk + 1) * PREPARED_ROWS, rows); row++)
            prepare_row(decoder, from, row, into);
    barrier(me, chunks);
}

/* Rows ready for a product: by the team, or by everybody for themselves where there are few. Who will take no chunk of the product,
 * because it rests or comes too late, does not need them. */
static const Rows *prepare(Member *me, Decoder *decoder, const Source *from, int64_t rows, Rows *shared) {
    if (rows <= ALONE_ROWS) {
        Rows *own = &decoder->alone[me->number];
        own->width = shared->width, own->groups = shared->groups;
        if (!any_left(me, chunks_of(from->matrix, rows, me->team->threads))) return own;
        for (int64_t row = 0; row < rows; row++) prepare_row(decoder, from, row, own);
        return own;
    }
    prepare_shared(me, decoder, from, rows, shared);
    return shared;
}
