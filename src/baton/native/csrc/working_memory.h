/* Threads and working memory of a decoder. No state is kept from step to step. */
#pragma once

#include "model.h"
#include "sample.h"

/* Pairs of a row and a pick lie by expert, those of one expert in the order of rows. */
typedef struct {
    float *scores;                 /* [rows][router_width] */
    int32_t *picks;                /* [rows][per_token]: experts */
    float *shares;                 /* [rows][per_token] */
    int32_t *places;               /* [rows][per_token]: which pair it is */
    int32_t *rows;                 /* [pairs]: whose it is */
    Unit *units;
    Rows down;                     /* [pairs]: what the experts' products of that name take */
    float *out;                    /* [pairs][hidden] */
    Rows shared;                   /* [rows]: what the shared expert's last product takes */
} ExpertBuffers;

typedef struct {
    int64_t rows;                  /* that the buffers hold */
    float *hidden;                 /* [rows][hidden]: the residual stream */
    float *picked;                 /* [rows][hidden]: those whose logits are wanted */
    float *added;                  /* [rows][hidden]: what is normed before it is added to the residual, or the shared expert's; or NULL */
    float *qkv;                    /* [rows][heads + 2 kv_heads][head_dim] */
    Rows normed, output, down;     /* what the products of that name take */
    int64_t *item_starts;
    int64_t sequences;
    float *parts;                  /* of attention */
    int64_t part_floats;
    Best *best;                    /* [threads][rows] */
    ExpertBuffers experts;
} Buffers;

typedef struct {
    const Model *model;
    Team *team;
    Buffers shared;
    Rows *alone;                   /* [threads] ALONE_ROWS rows, wide enough for anything */
    Rows *gathered;                /* [threads] EXPERT_ROWS rows of an expert */
    uint8_t **scratch;             /* [threads] one panel as bytes */
    DrawRoom *drawing;             /* [threads], made when first needed */
} Decoder;

/* ---- memory ---- */

static void expert_buffers_free(ExpertBuffers *e) {
    free(e->scores), free(e->picks), free(e->shares), free(e->places), free(e->rows), free(e->units), free(e->out);
    rows_free(&e->down), rows_free(&e->shared);
}

static int expert_buffers_fit(ExpertBuffers *e, const Model *m, int64_t rows) {
    int64_t pairs = rows * m->experts.per_token;
    if (!pairs) return 1;
    e->scores = alloc_aligned(rows * router_width(m) * 4), e->units = alloc_aligned(units_of(m, rows) * (int64_t)sizeof *e->units);
    e->picks = alloc_aligned(pairs * 4), e->shares = alloc_aligned(pairs * 4), e->places = alloc_aligned(pairs * 4), e->rows = alloc_aligned(pairs * 4);
    e->out = alloc_aligned(pairs * m->hidden * 4);
    int ok = rows_alloc(&e->down, pairs, m->experts.inner) && rows_alloc(&e->shared, rows, m->experts.shared);
    return ok && e->scores && e->units && e->picks && e->shares && e->places && e->rows && e->out;
}

static void buffers_free(Buffers *b) {
    free(b->hidden), free(b->picked), free(b->added), free(b->qkv), free(b->item_starts), free(b->best), free(b->parts);
    rows_free(&b->normed), rows_free(&b->output), rows_free(&b->down), expert_buffers_free(&b->experts);
    memset(b, 0, sizeof *b);
}

/* For a panel that a product unpacks: bytes, and for every group of them scales and minima as floats. */
static int64_t scratch_bytes(int64_t inputs) { return round_up(inputs, AMX_STEP) * (PANEL + PANEL / GROUP * 8); }

/* Room for this step; what the largest step so far needed is kept. */
static int buffers_fit(Decoder *decoder, int64_t tokens, int64_t sequences) {
    Buffers *b = &decoder->shared;
    const Model *m = decoder->model;
    if (tokens <= b->rows && sequences <= b->sequences) return 1;
    tokens = max_int(tokens, b->rows), sequences = max_int(sequences, b->sequences);
    team_rest(decoder->team);
    buffers_free(b);
    int64_t q_width = m->attention.heads * m->attention.head_dim;
    b->hidden = alloc_aligned(tokens * m->hidden * 4), b->picked = alloc_aligned(tokens * m->hidden * 4);
    b->qkv = alloc_aligned(tokens * qkv_width(m) * 4);
    int adds = norms_what_is_added(m) || m->experts.shared;
    if (adds) b->added = alloc_aligned(tokens * m->hidden * 4);
    b->item_starts = alloc_aligned((sequences + 1) * 8);
    b->best = alloc_aligned(decoder->team->threads * tokens * (int64_t)sizeof *b->best);
    int ok = rows_alloc(&b->normed, tokens, m->hidden) && rows_alloc(&b->output, tokens, q_width);
    ok = ok && rows_alloc(&b->down, tokens, m->inner);
    ok = ok && (b->added || !adds) && expert_buffers_fit(&b->experts, m, tokens);
    if (!ok || !b->hidden || !b->picked || !b->qkv || !b->item_starts || !b->best) return buffers_free(b), 0;
    b->rows = tokens, b->sequences = sequences;
    return 1;
}

static int parts_fit(Decoder *decoder, int64_t floats_needed) {
    Buffers *b = &decoder->shared;
    if (floats_needed <= b->part_floats) return 1;
    team_rest(decoder->team);
    free(b->parts);
    b->parts = alloc_aligned(floats_needed * 4), b->part_floats = b->parts ? floats_needed : 0;
    return b->parts != NULL;
}

static void decoder_free(Decoder *decoder) {
    if (!decoder) return;
    int threads = decoder->team ? decoder->team->threads : 0;
    if (decoder->team) team_free(decoder->team);
    for (int i = 0; i < threads && decoder->alone; i++) rows_free(&decoder->alone[i]);
    for (int i = 0; i < threads && decoder->gathered; i++) rows_free(&decoder->gathered[i]);
    for (int i = 0; i < threads && decoder->scratch; i++) free(decoder->scratch[i]);
    for (int i = 0; i < threads && decoder->drawing; i++) draw_room_free(&decoder->drawing[i]);
    free(decoder->alone), free(decoder->gathered), free(decoder->scratch), free(decoder->drawing);
    buffers_free(&decoder->shared);
    free(decoder);
}

/* Memory of each member. */
static int members_fit(Decoder *decoder) {
    const Model *m = decoder->model;
    int64_t widest = max_int(max_int(m->hidden, m->inner), m->attention.heads * m->attention.head_dim);
    widest = max_int(widest, max_int(m->experts.inner, m->experts.shared));
    for (int i = 0; i < decoder->team->threads; i++) {
        decoder->scratch[i] = alloc_aligned(scratch_bytes(widest));
        if (!rows_alloc(&decoder->alone[i], ALONE_ROWS, widest) || !decoder->scratch[i]) return 0;
        if (m->experts.count && !rows_alloc(&decoder->gathered[i], EXPERT_ROWS, m->hidden)) return 0;
    }
    return 1;
}

/* NULL: not enough memory. The model must outlive the decoder. */
static Decoder *decoder_new(const Model *model, int64_t threads) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NULL;
    decoder->model = model;
    decoder->team = team_new((int)threads, phases_of(model));
    decoder->alone = calloc((size_t)threads, sizeof *decoder->alone);
    decoder->gathered = calloc((size_t)threads, sizeof *decoder->gathered);
    decoder->scratch = calloc((size_t)threads, sizeof *decoder->scratch);
    decoder->drawing = calloc((size_t)threads, sizeof *decoder->drawing);
    int ok = decoder->team && decoder->alone && decoder->gathered && decoder->scratch && decoder->drawing;
    if (!ok || !members_fit(decoder)) return decoder_free(decoder), NULL;
    return decoder;
}
