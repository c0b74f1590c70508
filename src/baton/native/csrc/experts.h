/* A mixture of experts in place of a layer's MLP (models/layers/experts.py): a router picks a few of many small MLPs for each row.
 *
 *   scores      the router's product, in float32
 *   picks       of each row: softmax or sigmoid, the highest scores, of equal ones the lower expert; the row is quantised for the experts
 *   sort        (row, pick) pairs by expert, those of one expert in the order of rows: a counting sort, by one member
 *   gate, up    unit by unit: an expert and up to EXPERT_ROWS of its rows, gathered by the member that multiplies them
 *   down        the same, from the rows of the pairs to the outputs of the pairs
 *   sum         of each row: outputs times shares in the order of picks, then the shared expert's
 *
 * The result of a row depends on that row alone: every product has the same bits for any rows beside it (matrix.h), and no sum goes over
 * rows. How many chunks a phase has depends on the number of rows and not on the picks: a member that comes late must know it, too.
 */
#pragma once

#include "prepare_rows.h"

ALWAYS int64_t pairs_of(const Model *m, int64_t rows) { return rows * m->experts.per_token; }

/* ---- picks ---- */

ALWAYS float sigmoid(float x) {
    float e = exp_negative(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

/* Logits become shares. NaN is kept, and its row fails alone. */
static void router_shares(const Experts *experts, const float *logits, float *shares) {
    int64_t count = experts->count;
    if (experts->sigmoid) {
        for (int64_t e = 0; e < count; e++) shares[e] = sigmoid(logits[e]);
        return;
    }
    float most = logits[0], sum = 0.0f;
    for (int64_t e = 1; e < count; e++) most = logits[e] > most ? logits[e] : most;
    for (int64_t e = 0; e < count; e++) shares[e] = exp_negative(logits[e] - most), sum += shares[e];
    for (int64_t e = 0; e < count; e++) shares[e] /= sum;
}

static void pick_experts(const Experts *experts, const float *correction, const float *logits, int32_t *picks, float *shares) {
    int64_t count = experts->count;
    float all[count], scores[count], sum = 0.0f;
    uint8_t picked[count];
    memset(picked, 0, (size_t)count);
    router_shares(experts, logits, all);
    for (int64_t e = 0; e < count; e++) scores[e] = correction ? all[e] + correction[e] : all[e];
    for (int64_t i = 0; i < experts->per_token; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; e++)
            if (!picked[e] && (best < 0 || scores[e] > scores[best])) best = e;
        picked[best] = 1, picks[i] = (int32_t)best, shares[i] = all[best], sum += all[best];
    }
    for (int64_t i = 0; i < experts->per_token; i++) shares[i] = (experts->normalised ? shares[i] / sum : shares[i]) * experts->scale;
}

/* A phase: picks of all rows, and the rows as the experts take them. */
static void route_rows(Member *me, const Decoder *decoder, const LayerWeights *block, const Norm *norm, int64_t rows) {
    const Model *m = decoder->model;
    const Buffers *b = &decoder->shared;
    const ExpertBuffers *e = &b->experts;
    int64_t chunks = (rows + PREPARED_ROWS - 1) / PREPARED_ROWS, k = m->experts.per_token, width = router_width(m);
    Source from = {b->hidden, *norm, &block->mixture.gate_up[0]};
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;)
        for (int64_t row = chunk * PREPARED_ROWS; row < min_int((chunk + 1) * PREPARED_ROWS, rows); row++) {
            pick_experts(&m->experts, block->mixture.correction, e->scores + row * width, e->picks + row * k, e->shares + row * k);
            prepare_row(decoder, &from, row, &b->normed);
        }
    barrier(me, chunks);
}

/* ---- sort ---- */

static void cut_units(const ExpertBuffers *e, const int32_t *ends, int64_t count, int64_t units) {
    int64_t unit = 0;
    for (int32_t expert = 0, first = 0; expert < count; first = ends[expert], expert++)
        for (int32_t at = first; at < ends[expert]; at += EXPERT_ROWS)
            e->units[unit++] = (Unit){expert, at, (int32_t)min_int(at + EXPERT_ROWS, ends[expert])};
    for (; unit < units; unit++) e->units[unit] = (Unit){0, 0, 0};
}

#define OF_ANOTHER_RANK -1

ALWAYS int is_own(const Model *m, int64_t expert) { return expert >= m->experts.first && expert < m->experts.first + m->experts.own; }

/* A phase of one chunk. Pairs of experts that another rank has are left out. */
static void sort_pairs(Member *me, const Decoder *decoder, int64_t rows) {
    const Model *m = decoder->model;
    const ExpertBuffers *e = &decoder->shared.experts;
    int64_t k = m->experts.per_token, pairs = pairs_of(m, rows);
    while (next_chunk(me, 1) >= 0) {
        int32_t next[m->experts.own + 1];  /* of each expert: where its next pair goes; when all are there, where they end */
        memset(next, 0, sizeof next);
        for (int64_t i = 0; i < pairs; i++)
            if (is_own(m, e->picks[i])) next[e->picks[i] - m->experts.first + 1]++;
        for (int64_t x = 1; x <= m->experts.own; x++) next[x] += next[x - 1];
        for (int64_t i = 0; i < pairs; i++) {
            int32_t place = is_own(m, e->picks[i]) ? next[e->picks[i] - m->experts.first]++ : OF_ANOTHER_RANK;
            e->places[i] = place;
            if (place != OF_ANOTHER_RANK) e->rows[place] = (int32_t)(i / k);
        }
        cut_units(e, next, m->experts.own, units_of(m, rows));
    }
    barrier(me, 1);
}

/* ---- grouped products ---- */

/* Runs of panels that a unit is cut into: enough chunks for every member where there are few units. */
static int64_t unit_parts(const Matrix *m, int64_t units, int64_t threads) {
    return min_int(m->panels, max_int(1, CHUNKS_PER_MEMBER * threads / units));
}

static Run unit_run(const Matrix *m, int64_t part, int64_t parts) { return (Run){m->panels * part / parts, m->panels * (part + 1) / parts}; }

/* A phase: gate and up of every pair. */
static void experts_gate_up(Member *me, const Decoder *decoder, const Mixture *mixture, int64_t rows) {
    const Model *m = decoder->model;
    const Buffers *b = &decoder->shared;
    const ExpertBuffers *e = &b->experts;
    int64_t units = units_of(m, rows), inner = m->experts.inner, parts = unit_parts(&mixture->gate_up[0], units, me->team->threads);
    Rows *own = &decoder->gathered[me->number];
    for (int64_t chunk; (chunk = next_chunk(me, units * parts)) >= 0;) {
        const Unit *unit = &e->units[chunk / parts];
        const Matrix *matrix = &mixture->gate_up[unit->expert];
        int64_t count = unit->end - unit->first;
        if (!count) continue;
        for (int64_t r = 0; r < count; r++) copy_row(matrix, &b->normed, e->rows[unit->first + r], own, r);
        Run run = unit_run(matrix, chunk % parts, parts);
        panels_times_rows(matrix, run.first, run.end, own, 0, count, decoder->scratch[me->number],
                          &(Out){STORE, e->down.plain + unit->first * inner, inner, inner, NULL, NULL});
    }
    amx_end();
    barrier(me, units * parts);
}

/* A phase: down of every pair. Pairs of a unit are neighbours, so nothing is gathered. */
static void experts_down(Member *me, const Decoder *decoder, const Mixture *mixture, int64_t rows) {
    const Model *m = decoder->model;
    const ExpertBuffers *e = &decoder->shared.experts;
    int64_t units = units_of(m, rows), parts = unit_parts(&mixture->down[0], units, me->team->threads);
    for (int64_t chunk; (chunk = next_chunk(me, units * parts)) >= 0;) {
        const Unit *unit = &e->units[chunk / parts];
        const Matrix *matrix = &mixture->down[unit->expert];
        Run run = unit_run(matrix, chunk % parts, parts);
        if (unit->first < unit->end)
            panels_times_rows(matrix, run.first, run.end, &e->down, unit->first, unit->end, decoder->scratch[me->number],
                              &(Out){STORE, e->out, m->hidden, m->hidden, NULL, NULL});
    }
    amx_end();
    barrier(me, units * parts);
}

/* ---- a layer ---- */

/* The MLP that every row goes through, into b->added. */
static void shared_expert(Member *me, Decoder *decoder, const LayerWeights *block, const Norm *norm, int64_t rows) {
    const Model *m = decoder->model;
    Buffers *b = &decoder->shared;
    uint8_t *scratch = decoder->scratch[me->number];
    Rows *between = &b->experts.shared;
    const Rows *normed = prepare(me, decoder, &(Source){b->hidden, *norm, &block->gate_up}, rows, &b->normed);
    multiply(me, &block->gate_up, normed, rows, scratch, &(Out){STORE, between->plain, between->width, between->width, NULL, NULL});
    const Rows *gated = prepare(me, decoder, &(Source){between->plain, {NULL, NULL}, &block->down}, rows, between);
    multiply(me, &block->down, gated, rows, scratch, &(Out){STORE, b->added, m->hidden, m->hidden, NULL, NULL});
}

/* Phases: outputs of all pairs and of the shared expert, which add_mixture() adds up. */
static void mixture(Member *me, Decoder *decoder, const LayerWeights *block, const Norm *norm, int64_t rows) {
    const Model *m = decoder->model;
    Buffers *b = &decoder->shared;
    const Mixture *of = &block->mixture;
    const Rows *normed = prepare(me, decoder, &(Source){b->hidden, *norm, &of->router}, rows, &b->normed);
    multiply(me, &of->router, normed, rows, decoder->scratch[me->number],
             &(Out){STORE, b->experts.scores, router_width(m), router_width(m), NULL, NULL});
    route_rows(me, decoder, block, norm, rows);
    sort_pairs(me, decoder, rows);
    experts_gate_up(me, decoder, of, rows);
    prepare_shared(me, decoder, &(Source){b->experts.down.plain, {NULL, NULL}, &of->down[0]}, pairs_of(m, rows), &b->experts.down);
    experts_down(me, decoder, of, rows);
    if (m->experts.shared) shared_expert(me, decoder, block, norm, rows);
}

static void sum_of_picks(const Decoder *decoder, int64_t row, float *restrict sum) {
    const Model *m = decoder->model;
    const ExpertBuffers *e = &decoder->shared.experts;
    int64_t k = m->experts.per_token;
    for (int64_t i = 0; i < m->hidden; i++) sum[i] = 0.0f;
    for (int64_t pick = row * k; pick < (row + 1) * k; pick++) {
        if (e->places[pick] == OF_ANOTHER_RANK) continue;
        const float *restrict out = e->out + e->places[pick] * m->hidden;
        for (int64_t i = 0; i < m->hidden; i++) sum[i] = FMA(out[i], e->shares[pick], sum[i]);
    }
    if (!m->experts.shared) return;
    const float *restrict shared = decoder->shared.added + row * m->hidden;
    float gate = m->experts.shared_gate ? sigmoid(e->scores[row * router_width(m) + m->experts.count]) : 1.0f;
    for (int64_t i = 0; i < m->hidden; i++) sum[i] = FMA(shared[i], gate, sum[i]);
}

/* A phase: what mixture() found is added to the residual, summed over ranks or normed first where that is due. */
static void add_mixture(Member *me, const Decoder *decoder, const Norm *norm, int64_t rows, uint32_t meeting) {
    const Model *m = decoder->model;
    if (m->exchange) {
        float *slot = slot_of(m->exchange, m->exchange->rank, meeting);
        for (int64_t row; (row = next_chunk(me, rows)) >= 0;) sum_of_picks(decoder, row, slot + row * m->hidden);
        barrier(me, rows);
        add_of_ranks(me, decoder, rows, norm, meeting);
        return;
    }
    for (int64_t row; (row = next_chunk(me, rows)) >= 0;) {
        float sum[m->hidden], normed[m->hidden], *hidden = decoder->shared.hidden + row * m->hidden;
        sum_of_picks(decoder, row, sum);
        if (norm->weight) norm_of_row(m, norm, sum, m->hidden, normed);
        const float *added = norm->weight ? normed : sum;
        for (int64_t i = 0; i < m->hidden; i++) hidden[i] += added[i];
    }
    barrier(me, rows);
}
