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
    HeadShare own = own_head(m);
    float *logits = job->logits ? job->logits + own.first : NULL;
    multiply(me, &m->head, normed, job->rows, decoder->scratch[me->number],
             &(Out){then, logits, m->vocabulary, own.end - own.first, b->best + me->number * b->rows, job->allowed});
}

static int run_logits(Decoder *decoder, const float *hidden, int64_t rows, float *logits, const uint32_t *const *allowed) {
    /* `hidden` is not a buffer that is made anew here: rows of a step never outnumber its tokens. */
    if (!buffers_fit(decoder, rows, 1)) return 1;
    memcpy(decoder->shared.picked, hidden, (size_t)(rows * decoder->model->hidden) * sizeof *hidden);
    Logits job = {decoder, rows, logits, allowed};
    TEAM_RUN(decoder->team, logits_job, &job, phases_of(decoder->model));
    return 0;
}

/* Logits of the other ranks, for rows whose own part is there. As many rows at once as a slot holds. */
static int gather_logits(Decoder *decoder, int64_t rows, float *logits) {
    const Model *m = decoder->model;
    Exchange *x = m->exchange;
    if (!x) return 0;
    HeadShare own = own_head(m);
    int64_t widest = (m->vocabulary + HEAD_UNIT - 1) / HEAD_UNIT / x->ranks * HEAD_UNIT + HEAD_UNIT, most = max_int(1, x->slot_bytes / 4 / widest);
    for (int64_t first = 0; first < rows; first += most) {
        uint32_t meeting = x->meetings++;
        int64_t end = min_int(first + most, rows);
        float *slot = slot_of(x, x->rank, meeting);
        for (int64_t row = first; row < end; row++)
            memcpy(slot + (row - first) * widest, logits + row * m->vocabulary + own.first, (size_t)(own.end - own.first) * 4);
        if (!meet(x, meeting)) return 1;
        for (int64_t rank = 0; rank < x->ranks; rank++) {
            HeadShare share = head_share(m, rank);
            for (int64_t row = first; row < end; row++)
                memcpy(logits + row * m->vocabulary + share.first, (float *)slot_of(x, rank, meeting) + (row - first) * widest,
                       (size_t)(share.end - share.first) * 4);
        }
    }
    return 0;
}

/* ---- tokens ---- */

/* The better of two findings about a row. */
static Best better_of(Best best, const Best *found) {
    int32_t broken = best.broken | found->broken;
    if (is_better(found, &best)) best = *found;
    best.broken = broken;
    return best;
}

/* The best of all ranks, for rows whose own best is there. */
static int best_of_ranks(const Model *m, Best *best, int64_t rows) {
    Exchange *x = m->exchange;
    if (!x) return 0;
    uint32_t meeting = x->meetings++;
    memcpy(slot_of(x, x->rank, meeting), best, (size_t)rows * sizeof *best);
    if (!meet(x, meeting)) return 1;
    for (int64_t r = 0; r < rows; r++) {
        best[r] = NOTHING_YET;
        for (int64_t rank = 0; rank < x->ranks; rank++) best[r] = better_of(best[r], (const Best *)slot_of(x, rank, meeting) + r);
    }
    return 0;
}

/* tokens: [rows] the likeliest ones, or an error code per row (sample.h). allowed: [rows] bit masks of allowed tokens, NULL for a row
 * without one; NULL: no masks. Returns 0, or 1 if there is not enough memory. */
static int likeliest_tokens(Decoder *decoder, const float *hidden, int64_t rows, const uint32_t *const *allowed, int64_t *tokens) {
    int threads = decoder->team->threads;
    if (!buffers_fit(decoder, rows, 1)) return 1;
    Best *all = decoder->shared.best;
    int64_t stride = decoder->shared.rows;
    for (int64_t i = 0; i < threads * stride; i++) all[i] = NOTHING_YET;
    int64_t first = own_head(decoder->model).first;
    const uint32_t *own[max_int(rows, 1)];  /* masks from this rank's first token on */
    for (int64_t r = 0; allowed && r < rows; r++) own[r] = allowed[r] ? allowed[r] + first / 32 : NULL;
    if (run_logits(decoder, hidden, rows, NULL, allowed ? own : NULL)) return 1;
    for (int64_t r = 0; r < rows; r++) {
        for (int t = 1; t < threads; t++) all[r] = better_of(all[r], &all[t * stride + r]);
        if (all[r].place != NOTHING_YET.place) all[r].place += (int32_t)first;
    }
    if (best_of_ranks(decoder->model, all, rows)) return 1;
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = all[r].broken ? DRAW_NOT_FINITE : all[r].place == NOTHING_YET.place ? DRAW_NOTHING_LEFT : all[r].place;
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
