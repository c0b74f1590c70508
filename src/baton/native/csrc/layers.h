/* A step through all layers: token ids in, hidden rows out, keys and values in the pool. Every product, every attention and what lies between
 * them is a phase that the team walks through together (thread_team.h). */
#pragma once

#include "attention.h"
#include "experts.h"

/* ---- one token ---- */

static void embed(const Model *m, int64_t token, float *restrict out) {
    const uint8_t *row = m->embedding + token * m->embedding_row_bytes;
    floats_of_row(m->embedding_kind, row, m->hidden, out);
    if (m->embedding_scale != 1.0f)
        for (int64_t i = 0; i < m->hidden; i++) out[i] *= m->embedding_scale;
}

static int has_angles(const Model *m, int64_t position) { return position >= 0 && position < m->positions; }

/* A position that the tables do not have gives no numbers: its sequence fails alone, and nothing is read from elsewhere. */
static void begin_row(const Decoder *decoder, const Step *step, int64_t row) {
    const Model *m = decoder->model;
    float *hidden = decoder->shared.hidden + row * m->hidden;
    if (has_angles(m, step->positions[row])) embed(m, step->token_ids[row], hidden);
    else for (int64_t i = 0; i < m->hidden; i++) hidden[i] = NAN;
}

static void norm_in_place(float *x, const float *weight, int64_t width, float eps) {
    float normed[width];
    norm_row(x, weight, width, eps, normed);
    memcpy(x, normed, (size_t)width * 4);
}

/* Queries and keys of one token: normed where the model wants it, then turned, first half against second. */
typedef struct { const Decoder *decoder; const LayerWeights *block; const int64_t *positions; } RopeArgs;

static void rope_row(const void *with, int64_t row) {
    const Decoder *decoder = ((const RopeArgs *)with)->decoder;
    const LayerWeights *block = ((const RopeArgs *)with)->block;
    const Model *m = decoder->model;
    const Shape *shape = &m->attention;
    int64_t dim = shape->head_dim, pairs = dim / 2, position = ((const RopeArgs *)with)->positions[row];
    if (!has_angles(m, position)) return;
    const float *restrict cosines = block->cosines + position * pairs, *restrict sines = block->sines + position * pairs;
    float *restrict x = decoder->shared.qkv + row * qkv_width(m);
    if (m->qk_norm_across_heads) {
        norm_in_place(x, block->q_norm, shape->heads * dim, m->norm_eps);
        norm_in_place(x + shape->heads * dim, block->k_norm, shape->kv_heads * dim, m->norm_eps);
    }
    for (int64_t head = 0; head < shape->heads + shape->kv_heads; head++, x += dim) {
        const float *norm = head < shape->heads ? block->q_norm : block->k_norm;
        if (norm && !m->qk_norm_across_heads) norm_in_place(x, norm, dim, m->norm_eps);
        for (int64_t i = 0; i < pairs; i++) {
            float a = x[i], b = x[i + pairs];
            x[i] = FMA(-b, sines[i], a * cosines[i]);
            x[i + pairs] = FMA(a, sines[i], b * cosines[i]);
        }
    }
}

/* ---- where the time goes: compiled in for bench/kernel_times.c alone ---- */

#if defined(BATON_PHASES)
enum { BEGIN, NORM, QKV, TURN, ATTEND, OUTPUT, NORM2, GATE_UP, GATED, DOWN, PHASES };
int64_t baton_phases[PHASES];  /* nanoseconds of the first member, its waiting included */
static int64_t phase_since;
#define PHASE(name)                                          \
    if (me->number == 0) {                                   \
        int64_t now = nanoseconds();                         \
        baton_phases[name] += now - phase_since;             \
        phase_since = now;                                   \
    }
#else
#define PHASE(name)
#endif

/* ---- a step ---- */

typedef struct {
    Decoder *decoder;
    Step step;
    int64_t item_rows, items, splits;
    uint32_t meeting;  /* with other ranks: the first of this step */
} Hidden;

/* Add the result of attention or MLP to the residual: at once, or summed over ranks or normed first. */
static void add_product(Member *me, Decoder *decoder, const Matrix *matrix, const Rows *rows, int64_t tokens, const Norm *norm,
                        uint32_t meeting) {
    const Model *m = decoder->model;
    Buffers *b = &decoder->shared;
    uint8_t *scratch = decoder->scratch[me->number];
    int64_t hidden = m->hidden;
    if (m->exchange) {
        float *slot = slot_of(m->exchange, m->exchange->rank, meeting);
        multiply(me, matrix, rows, tokens, scratch, &(Out){STORE, slot, hidden, hidden, NULL, NULL});
        add_of_ranks(me, decoder, tokens, norm, meeting);
        return;
    }
    if (!norm->weight) {
        multiply(me, matrix, rows, tokens, scratch, &(Out){ADD, b->hidden, hidden, hidden, NULL, NULL});
        return;
    }
    multiply(me, matrix, rows, tokens, scratch, &(Out){STORE, b->added, hidden, hidden, NULL, NULL});
    for (int64_t row; (row = next_chunk(me, tokens)) >= 0;) {
        float *to = b->hidden + row * hidden, *added = b->added + row * hidden, normed[hidden];
        norm_of_row(m, norm, added, hidden, normed);
        for (int64_t i = 0; i < hidden; i++) to[i] += normed[i];
    }
    barrier(me, tokens);
}

/* The MLP up to the product that is added to the residual: its rows between the two products, in b->down, or what experts give. */
static void begin_mlp(Member *me, Decoder *decoder, const LayerWeights *block, const Norm *norm, int64_t tokens) {
    const Model *m = decoder->model;
    Buffers *b = &decoder->shared;
    if (block->mixture.gate_up) {
        mixture(me, decoder, block, norm, tokens);
        PHASE(GATE_UP)
        return;
    }
    const Rows *normed = prepare(me, decoder, &(Source){b->hidden, *norm, &block->gate_up}, tokens, &b->normed);
    PHASE(NORM2)
    multiply(me, &block->gate_up, normed, tokens, decoder->scratch[me->number], &(Out){STORE, b->down.plain, m->inner, m->inner, NULL, NULL});
    PHASE(GATE_UP)
}

/* The rest of it. */
static void end_mlp(Member *me, Decoder *decoder, const LayerWeights *block, int64_t tokens, uint32_t meeting) {
    Buffers *b = &decoder->shared;
    if (block->mixture.gate_up) {
        add_mixture(me, decoder, &block->mlp_post_norm, tokens, meeting);
    } else {
        const Rows *gated = prepare(me, decoder, &(Source){b->down.plain, {NULL, NULL}, &block->down}, tokens, &b->down);
        PHASE(GATED)
        add_product(me, decoder, &block->down, gated, tokens, &block->mlp_post_norm, meeting);
    }
    PHASE(DOWN)
}

static void layer_phases(Member *me, const Hidden *job, int64_t number) {
    Decoder *decoder = job->decoder;
    const Model *m = decoder->model;
    const Step *step = &job->step;
    const LayerWeights *block = &m->blocks[number];
    Buffers *b = &decoder->shared;
    uint8_t *scratch = decoder->scratch[me->number];
    int64_t tokens = step->tokens;
    uint32_t meeting = job->meeting + (uint32_t)number * MEETINGS_OF_A_LAYER;

    const Rows *normed = prepare(me, decoder, &(Source){b->hidden, block->attention_norm, &block->qkv}, tokens, &b->normed);
    PHASE(NORM)
    multiply(me, &block->qkv, normed, tokens, scratch, &(Out){STORE, b->qkv, qkv_width(m), qkv_width(m), NULL, NULL});
    PHASE(QKV)

    AttentionArgs layer = {
        .step = step, .shape = &m->attention,
        .pool = (char *)m->pool + number * 2 * m->attention.values_at * kv_number_bytes((KVKind)m->kv_kind),
        .qkv = b->qkv, .qkv_stride = qkv_width(m),
        .out = b->output.plain, .window = block->window, .sinks = block->sinks,
        .item_rows = job->item_rows, .item_starts = b->item_starts, .items = job->items,
        .splits = job->splits, .parts = b->parts,
    };
    store_all(me, &layer, m->kv_kind, rope_row, &(RopeArgs){decoder, block, step->positions});
    PHASE(TURN)
    attend_all(me, &layer, m->kv_kind);
    PHASE(ATTEND)

    const Norm none = {NULL, NULL};
    /* Side by side: the MLP reads the residual before attention is added to it. */
    if (m->parallel) begin_mlp(me, decoder, block, &block->attention_norm, tokens);
    const Rows *attended = prepare(me, decoder, &(Source){b->output.plain, none, &block->output}, tokens, &b->output);
    add_product(me, decoder, &block->output, attended, tokens, &block->attention_post_norm, meeting);
    PHASE(OUTPUT)

    if (!m->parallel) begin_mlp(me, decoder, block, &block->mlp_norm, tokens);
    end_mlp(me, decoder, block, tokens, meeting + 1);
}

static void hidden_job(Member *me, const void *with) {
    const Hidden *job = with;
    const Model *m = job->decoder->model;
#if defined(BATON_PHASES)
    if (me->number == 0) phase_since = nanoseconds();
#endif
    for (int64_t row; (row = next_chunk(me, job->step.tokens)) >= 0;) begin_row(job->decoder, &job->step, row);
    barrier(me, job->step.tokens);
    PHASE(BEGIN)
    for (int64_t number = 0; number < m->layers; number++) layer_phases(me, job, number);
}
