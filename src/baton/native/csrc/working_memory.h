/* What a model is run with: threads, and the memory between one product and the next. No step leaves anything here for another. */
#pragma once

#include "model.h"
#include "sample.h"

typedef struct {
    int64_t rows;                  /* that the buffers hold */
    float *hidden;                 /* [rows][hidden]: the residual stream */
    float *picked;                 /* [rows][hidden]: those whose logits are wanted */
    float *added;                  /* [rows][hidden]: what is normed before it is added to the residual; NULL where nothing is */
    float *qkv;                    /* [rows][heads + 2 kv_heads][head_dim] */
    Rows normed, output, down;     /* what the products of that name take */
    int64_t *item_starts;
    int64_t sequences;
    float *parts;                  /* of attention */
    int64_t part_floats;
    Best *best;                    /* [threads][rows] */
} Buffers;

typedef struct {
    const Model *model;
    Team *team;
    Buffers shared;
    Rows *alone;                   /* [threads] ALONE_ROWS rows, wide enough for anything */
    uint8_t **scratch;             /* [threads] one panel as bytes */
    DrawRoom *drawing;             /* [threads], made when first needed */
} Decoder;

/* ---- memory ---- */

static void buffers_free(Buffers *b) {
    free(b->hidden), free(b->picked), free(b->added), free(b->qkv), free(b->item_starts), free(b->best), free(b->parts);
    rows_free(&b->normed), rows_free(&b->output), rows_free(&b->down);
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
    if (norms_what_is_added(m)) b->added = alloc_aligned(tokens * m->hidden * 4);
    b->item_starts = alloc_aligned((sequences + 1) * 8);
    b->best = alloc_aligned(decoder->team->threads * tokens * (int64_t)sizeof *b->best);
    int ok = rows_alloc(&b->normed, tokens, m->hidden) && rows_alloc(&b->output, tokens, q_width);
    ok = ok && rows_alloc(&b->down, tokens, m->inner);
    ok = ok && (b->added || !norms_what_is_added(m));
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
    for (int i = 0; i < threads && decoder->scratch; i++) free(decoder->scratch[i]);
    for (int i = 0; i < threads && decoder->drawing; i++) draw_room_free(&decoder->drawing[i]);
    free(decoder->alone), free(decoder->scratch), free(decoder->drawing);
    buffers_free(&decoder->shared);
    free(decoder);
}

/* NULL: not enough memory. The model must outlive the decoder. */
static Decoder *decoder_new(const Model *model, int64_t threads) {
    Decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder) return NULL;
    decoder->model = model;
    decoder->team = team_new((int)threads, phases_of(model));
    decoder->alone = calloc((size_t)threads, sizeof *decoder->alone);
    decoder->scratch = calloc((size_t)threads, sizeof *decoder->scratch);
    decoder->drawing = calloc((size_t)threads, sizeof *decoder->drawing);
    if (!decoder->team || !decoder->alone || !decoder->scratch || !decoder->drawing) return decoder_free(decoder), NULL;
    int64_t widest = max_int(max_int(model->hidden, model->inner), model->attention.heads * model->attention.head_dim);
    for (int i = 0; i < decoder->team->threads; i++) {
        decoder->scratch[i] = alloc_aligned(scratch_bytes(widest));
        if (!rows_alloc(&decoder->alone[i], ALONE_ROWS, widest) || !decoder->scratch[i]) return decoder_free(decoder), NULL;
    }
    return decoder;
}
