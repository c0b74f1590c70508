/* Computes logits from hidden rows, and tokens from logits. */
#pragma once

#include "prepare_rows.h"

/* ---- logits ---- */

typedef struct {
    Decoder *decoder;
    int64_t rows;
    float *logits;                 /* NULL: only the best of each row, into Buffers.best */
    const uint32_t *const *allowed;  /* those that may be the best (Out) */
} Logits;

static void logits_job(Member *me, const void *with) {
    const Logits *job = with;
    Decoder *decoder = job->decoder;
    const Model *m = decoder->model;
    Buffers *b = &decoder->shared;
    Source from = {b->picked, m->final_norm, &m->head};
    const Rows *normed = prepare(me, decoder, &from, job->rows, &b->normed);
    Then then = job->logits ? STORE : KEEP_BEST;
    multiply(me, &m->head, normed, job->rows, decoder->scratch[me->number],
             &(Out){then, job->logits, m->vocabulary, m->vocabulary, b->best + me->number * b->rows, job->allowed});
}

static int run_logits(Decoder *decoder, const float *hidden, int64_t rows, float *logits, const uint32_t *const *allowed) {
    /* `hidden` is not a buffer that is made anew here: rows of a step never outnumber its tokens. */
    if (!buffers_fit(decoder, rows, 1)) return 1;
    memcpy(decoder->shared.picked, hidden, (size_t)(rows * decoder->model->hidden) * sizeof *hidden);
    Logits job = {decoder, rows, logits, allowed};
    TEAM_RUN(decoder->team, logits_job, &job, phases_of(decoder->model));
    return 0;
}

/* ---- tokens ---- */

/* tokens: [rows] the likeliest ones, or an error code per row (sample.h). allowed: [rows] bit masks of allowed tokens, NULL for a row
 * without one; NULL: no masks. Returns 0, or 1 if there is not enough memory. */
static int likeliest_tokens(Decoder *decoder, const float *hidden, int64_t rows, const uint32_t *const *allowed, int64_t *tokens) {
    int threads = decoder->team->threads;
    if (!buffers_fit(decoder, rows, 1)) return 1;
    Best *all = decoder->shared.best;
    int64_t stride = decoder->shared.rows;
    for (int64_t i = 0; i < threads * stride; i++) all[i] = NOTHING_YET;
    if (run_logits(decoder, hidden, rows, NULL, allowed)) return 1;
    for (int64_t r = 0; r < rows; r++) {
        Best best = NOTHING_YET;
        for (int t = 0; t < threads; t++) {
            const Best *found = &all[t * stride + r];
            int32_t broken = best.broken | found->broken;
            if (is_better(found, &best)) best = *found;
            best.broken = broken;
        }
        tokens[r] = best.broken ? DRAW_NOT_FINITE : best.place == NOTHING_YET.place ? DRAW_NOTHING_LEFT : best.place;
    }
    return 0;
}

typedef struct { Decoder *decoder; float *logits; const Draw *draws; const uint32_t *const *allowed; int64_t rows; int64_t *tokens; } Choice;

static void choice_job(Member *me, const void *with) {
    const Choice *job = with;
    int64_t vocabulary = job->decoder->model->vocabulary;
    for (int64_t row; (row = next_chunk(me, job->rows)) >= 0;)
        job->tokens[row] = draw_row(job->logits + row * vocabulary, vocabulary, &job->draws[row], job->allowed ? job->allowed[row] : NULL,
                                    &job->decoder->drawing[me->number]);
    barrier(me, job->rows);
}

/* tokens: [rows] drawn by `draws` [rows] from logits [rows][vocabulary], or an error code per row (sample.h). allowed: as above; the
 * logits of other tokens become minus infinity. Returns 0, or 1 if there is not enough memory. */
static int drawn_tokens(Decoder *decoder, float *logits, const Draw *draws, const uint32_t *const *allowed, int64_t rows, int64_t *tokens) {
    for (int i = 0; i < decoder->team->threads; i++)
        if (!decoder->drawing[i].words && !draw_room(&decoder->drawing[i], decoder->model->vocabulary)) return 1;
    Choice job = {decoder, logits, draws, allowed, rows, tokens};
    TEAM_RUN(decoder->team, choice_job, &job, phases_of(decoder->model));
    return 0;
}
