/* The decoder of models/decoder.py in C: what Python calls (native/library.py).
 *
 * Python calls twice a step: baton_hidden, then baton_logits or baton_likeliest for the rows that are due. There is no state between steps
 * but the pool: everything else is working memory.
 *
 *   layers.h           a step: token ids to hidden rows
 *   experts.h          a layer's mixture of experts
 *   head.h             hidden rows to logits, logits to tokens
 *   working_memory.h   what both need
 *   packing.h          before the first step: weights as the products read them
 */

#include "head.h"
#include "layers.h"
#include "packing.h"

/* ---- at load ---- */

/* 0, or the system's error. Must be called before any thread is created. */
int baton_allow(void) {
#if HAS_AMX
    const long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return (int)syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    return 0;
#endif
}

/* Bytes of the structures that Python fills in (native/library.py), up to `count` of them; how many there are. */
int64_t baton_sizes(int64_t *sizes, int64_t count) {
    const int64_t all[] = {sizeof(Matrix), sizeof(Mixture), sizeof(LayerWeights), sizeof(Shape), sizeof(Experts), sizeof(Model), sizeof(Step), sizeof(Exchange)};
    const int64_t there = sizeof all / sizeof *all;
    for (int64_t i = 0; i < min_int(count, there); i++) sizes[i] = all[i];
    return there;
}

int baton_has_tiles(void) { return HAS_AMX; }

/* Kind, outputs and inputs are given; fills in the rest of its shape, and the bytes of numbers, scales, corrections. */
void baton_plan(Matrix *matrix, int64_t sizes[3]) { plan(matrix, sizes); }

/* Rows of a file's tensor, stored as `stored` and `row_bytes` long, become the outputs that `places` says. `squares`: [inputs] or NULL:
 * the squares of the weights are added. 0, or 1 where there is not enough memory. */
int baton_pack(const Matrix *matrix, int64_t stored, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count,
               float *squares, int64_t threads) {
    return pack_rows(&(Packing){matrix, (int)stored, rows, row_bytes, places, count, squares, NULL, 0, 0}, (int)threads);
}

/* NULL: not enough memory. The model must outlive the decoder. */
Decoder *baton_new(const Model *model, int64_t threads) { return decoder_new(model, threads); }

void baton_free(Decoder *decoder) { decoder_free(decoder); }

/* ---- a step ---- */

int64_t baton_threads(const Decoder *decoder) { return decoder->team->threads; }

/* The calling thread advances this word from now on, several times per layer. NULL: no word. */
void baton_progress(Decoder *decoder, _Atomic uint64_t *word) { decoder->team->progress = word ? word : &decoder->team->unwatched; }

/* The hidden rows of the step, before the last norm: valid until the next call. NULL: not enough memory, or a rank is missing. */
const float *baton_hidden(Decoder *decoder, const Step *step) {
    Exchange *exchange = decoder->model->exchange;
    if (!buffers_fit(decoder, step->tokens, step->sequences)) return NULL;
    if (exchange && step->tokens * decoder->model->hidden * 4 > exchange->slot_bytes) return NULL;
    const Shape *shape = &decoder->model->attention;
    KVKind kind = (KVKind)decoder->model->kv_kind;
    int64_t rows = item_starts(step, shape, kind, decoder->team->threads, decoder->shared.item_starts);
    int64_t items = decoder->shared.item_starts[step->sequences], splits = splits_of_items(step, shape, kind, decoder->team->threads, items);
    if (!parts_fit(decoder, part_floats(shape, items, splits))) return NULL;
    Hidden job = {decoder, *step, rows, items, splits, exchange ? exchange->meetings : 0};
    TEAM_RUN(decoder->team, hidden_job, &job, phases_of(decoder->model));
    if (exchange) exchange->meetings += (uint32_t)decoder->model->layers * MEETINGS_OF_A_LAYER;
    return exchange && atomic_load(&exchange->missing) ? NULL : decoder->shared.hidden;
}

/* logits: [rows][vocabulary]. 0, or 1 where there is not enough memory or a rank is missing. */
int baton_logits(Decoder *decoder, const float *hidden, int64_t rows, float *logits) {
    return run_logits(decoder, hidden, rows, logits, NULL) || gather_logits(decoder, rows, logits);
}

/* tokens: see head.h. */
int baton_likeliest(Decoder *decoder, const float *hidden, int64_t rows, const uint32_t *const *allowed, int64_t *tokens) {
    return likeliest_tokens(decoder, hidden, rows, allowed, tokens);
}

int baton_choose(Decoder *decoder, float *logits, const Draw *draws, const uint32_t *const *allowed, int64_t rows, int64_t *tokens) {
    return drawn_tokens(decoder, logits, draws, allowed, rows, tokens);
}

/* ---- ranks (exchange.h) ---- */

int baton_sum(Exchange *exchange, float *numbers, int64_t count) { return exchange_sum(exchange, numbers, count); }

int baton_gather(Exchange *exchange, const uint8_t *part, int64_t bytes, uint8_t *out) { return exchange_gather(exchange, part, bytes, out); }

/* ---- for tests ---- */

/* One product by itself, for tests and measurements. x: [rows][inputs], out: [rows][outputs of the matrix]. */
typedef struct { Decoder *decoder; const Matrix *matrix; const float *x; int64_t rows; float *out; Rows *buffer; int64_t width; } Product;

static void product_job(Member *me, const void *with) {
    const Product *job = with;
    Source from = {job->x, {NULL, NULL}, job->matrix};
    prepare_shared(me, job->decoder, &from, job->rows, job->buffer);
    uint8_t *scratch = alloc_aligned(scratch_bytes(job->matrix->inputs));
    multiply(me, job->matrix, job->buffer, job->rows, scratch, &(Out){STORE, job->out, job->width, job->width, NULL, NULL});
    free(scratch);
}

int baton_product(Decoder *decoder, const Matrix *matrix, const float *x, int64_t rows, float *out, int64_t width) {
    Rows buffer;
    if (!rows_alloc(&buffer, rows, matrix->inputs)) return 1;
    Product job = {decoder, matrix, x, rows, out, &buffer, width};
    TEAM_RUN(decoder->team, product_job, &job, phases_of(decoder->model));
    team_rest(decoder->team);
    rows_free(&buffer);
    return 0;
}

/* Picks of rows of a router's logits, for tests. logits: [rows][experts], picks and shares: [rows][per_token]. */
void baton_route(const Experts *experts, const float *correction, const float *logits, int64_t rows, int32_t *picks, float *shares) {
    for (int64_t row = 0; row < rows; row++)
        pick_experts(experts, correction, logits + row * experts->count, picks + row * experts->per_token, shares + row * experts->per_token);
}

/* One layer's attention by itself, for tests. qkv: [tokens][heads + 2 * kv_heads][head_dim], out: [tokens][heads][head_dim]. */
typedef struct { AttentionArgs *layer; KVKind kind; } Attention;

static void attention_job(Member *me, const void *with) {
    const Attention *job = with;
    store_all(me, job->layer, job->kind, NULL, NULL);
    attend_all(me, job->layer, job->kind);
}

int baton_attention(Decoder *decoder, const Step *step, const Shape *shape, void *pool, const float *qkv, int64_t window,
                    const float *sinks, int64_t kv_kind, float *out) {
    int64_t *starts = alloc_aligned((step->sequences + 1) * 8);
    if (!starts) return 1;
    AttentionArgs layer = {
        .step = step, .shape = shape, .pool = pool, .qkv = qkv, .out = out, .window = window, .sinks = sinks, .item_starts = starts,
        .qkv_stride = (shape->heads + 2 * shape->kv_heads) * shape->head_dim,
        .item_rows = item_starts(step, shape, (KVKind)kv_kind, decoder->team->threads, starts),
    };
    layer.items = starts[step->sequences];
    layer.splits = splits_of_items(step, shape, (KVKind)kv_kind, decoder->team->threads, layer.items);
    if (!parts_fit(decoder, part_floats(shape, layer.items, layer.splits))) return free(starts), 1;
    layer.parts = decoder->shared.parts;
    Attention job = {&layer, (KVKind)kv_kind};
    TEAM_RUN(decoder->team, attention_job, &job, phases_of(decoder->model));
    team_rest(decoder->team);
    free(starts);
    return 0;
}
