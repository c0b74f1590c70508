/* The decoder of models/decoder.py, whole steps at a time: token ids in, hidden rows out, keys and values in the pool.
 *
 * A step is a fixed list of phases that the team walks through together (thread_team.h). There is no state between steps but the
 * pool: everything else is scratch. Python calls twice a step: baton_hidden, then baton_logits or
 * baton_likeliest for the rows that are due.
 */

#include "attention.h"
#include "sample.h"
#include "matmul.h"
#include "packing.h"

#define PHASES_OF_A_LAYER 11

typedef struct {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  /* [head_dim] or NULL */
    Matrix qkv, output, gate_up, down;
    int64_t window;                /* 0: none */
} LayerWeights;

typedef struct {
    int64_t layers, hidden, vocabulary, inner;
    Shape attention;
    float norm_eps, rope_factor;
    int32_t kv_kind, embedding_kind;
    const float *frequencies;      /* [head_dim / 2] radians a position */
    const uint8_t *embedding;      /* [vocabulary] rows as the file has them, in one of the four kinds */
    int64_t embedding_row_bytes;
    const float *final_norm;
    const LayerWeights *blocks;
    Matrix head;
    void *pool;                    /* block 0, layer 0 */
} Model;

typedef struct {
    int64_t rows;                  /* that the buffers hold */
    float *hidden;                 /* [rows][hidden]: the residual stream */
    float *picked;                 /* [rows][hidden]: those whose logits are wanted */
    float *cosines, *sines;        /* [rows][head_dim / 2] */
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
} Runner;

/* ---- memory ---- */

static void buffers_free(Buffers *b) {
    free(b->hidden), free(b->picked), free(b->cosines), free(b->sines), free(b->qkv), free(b->item_starts), free(b->best), free(b->parts);
    rows_free(&b->normed), rows_free(&b->output), rows_free(&b->down);
    memset(b, 0, sizeof *b);
}

static int64_t qkv_width(const Model *m) { return (m->attention.heads + 2 * m->attention.kv_heads) * m->attention.head_dim; }

/* For a panel that a product unpacks: bytes, and for every group of them scales and minima as floats. */
static int64_t scratch_bytes(int64_t inputs) { return round_up(inputs, AMX_STEP) * (PANEL + PANEL / GROUP * 8); }

/* Upper bound, of any job. */
static int64_t phases_of(const Model *model) { return 4 + PHASES_OF_A_LAYER * model->layers; }

/* Room for this step; what the largest step so far needed is kept. */
static int buffers_fit(Runner *runner, int64_t tokens, int64_t sequences) {
    Buffers *b = &runner->shared;
    const Model *m = runner->model;
    if (tokens <= b->rows && sequences <= b->sequences) return 1;
    tokens = max_int(tokens, b->rows), sequences = max_int(sequences, b->sequences);
    team_rest(runner->team);
    buffers_free(b);
    int64_t pairs = m->attention.head_dim / 2, q_width = m->attention.heads * m->attention.head_dim;
    b->hidden = alloc_aligned(tokens * m->hidden * 4), b->picked = alloc_aligned(tokens * m->hidden * 4);
    b->cosines = alloc_aligned(tokens * pairs * 4), b->sines = alloc_aligned(tokens * pairs * 4);
    b->qkv = alloc_aligned(tokens * qkv_width(m) * 4);
    b->item_starts = alloc_aligned((sequences + 1) * 8);
    b->best = alloc_aligned(runner->team->threads * tokens * (int64_t)sizeof *b->best);
    int ok = rows_alloc(&b->normed, tokens, m->hidden) && rows_alloc(&b->output, tokens, q_width);
    ok = ok && rows_alloc(&b->down, tokens, m->inner);
    if (!ok || !b->hidden || !b->picked || !b->cosines || !b->sines || !b->qkv || !b->item_starts || !b->best) return buffers_free(b), 0;
    b->rows = tokens, b->sequences = sequences;
    return 1;
}

static int parts_fit(Runner *runner, int64_t floats_needed) {
    Buffers *b = &runner->shared;
    if (floats_needed <= b->part_floats) return 1;
    team_rest(runner->team);
    free(b->parts);
    b->parts = alloc_aligned(floats_needed * 4), b->part_floats = b->parts ? floats_needed : 0;
    return b->parts != NULL;
}

/* ---- phases ---- */

static void embed(const Model *m, int64_t token, float *restrict out) {
    const uint8_t *row = m->embedding + token * m->embedding_row_bytes;
    floats_of_row(m->embedding_kind, row, m->hidden, out);
}

static void begin_row(const Runner *runner, const Step *step, int64_t row) {
    const Model *m = runner->model;
    int64_t pairs = m->attention.head_dim / 2;
    embed(m, step->token_ids[row], runner->shared.hidden + row * m->hidden);
    for (int64_t i = 0; i < pairs; i++) {
        float angle = (float)step->positions[row] * m->frequencies[i];
        runner->shared.cosines[row * pairs + i] = cosf(angle) * m->rope_factor;
        runner->shared.sines[row * pairs + i] = sinf(angle) * m->rope_factor;
    }
}

/* Queries and keys of one token: normed where the model wants it, then turned, first half against second. */
typedef struct { const Runner *runner; const LayerWeights *block; } RopeArgs;

static void rope_row(const void *with, int64_t row) {
    const Runner *runner = ((const RopeArgs *)with)->runner;
    const LayerWeights *block = ((const RopeArgs *)with)->block;
    const Model *m = runner->model;
    const Shape *shape = &m->attention;
    int64_t dim = shape->head_dim, pairs = dim / 2;
    const float *restrict cosines = runner->shared.cosines + row * pairs, *restrict sines = runner->shared.sines + row * pairs;
    float *restrict x = runner->shared.qkv + row * qkv_width(m);
    for (int64_t head = 0; head < shape->heads + shape->kv_heads; head++, x += dim) {
        const float *norm = head < shape->heads ? block->q_norm : block->k_norm;
        if (norm) {
            float normed[dim];
            norm_row(x, norm, dim, m->norm_eps, normed);
            memcpy(x, normed, (size_t)dim * 4);
        }
        for (int64_t i = 0; i < pairs; i++) {
            float a = x[i], b = x[i + pairs];
            x[i] = FMA(-b, sines[i], a * cosines[i]);
            x[i + pairs] = FMA(a, sines[i], b * cosines[i]);
        }
    }
}

typedef struct {
    const float *rows;      /* [tokens][width] */
    const float *weight;    /* of the norm, or NULL */
    const Matrix *matrix;   /* that takes them */
} Source;

static void prepare_row(const Runner *runner, const Source *from, int64_t row, const Rows *into) {
    int64_t width = into->width;
    const float *x = from->rows + row * width;
    float *to = into->plain + row * width;
    if (from->weight) norm_row(x, from->weight, width, runner->model->norm_eps, to);
    else if (x != to) memcpy(to, x, (size_t)width * 4);
    quantize_for(from->matrix, into, row);
}

/* A phase: rows ready for a product. */
static void prepare_shared(Member *me, const Runner *runner, const Source *from, int64_t rows, const Rows *into) {
    int64_t chunks = (rows + PREPARED_ROWS - 1) / PREPARED_ROWS;
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;)
        for (int64_t row = chunk * PREPARED_ROWS; row < min_int((chunk + 1) * PREPARED_ROWS, rows); row++)
            prepare_row(runner, from, row, into);
    barrier(me, chunks);
}

/* Rows ready for a product: by the team, or by everybody for themselves where there are few. Who will take no chunk of the product,
 * because it rests or comes too late, does not need them. */
static const Rows *prepare(Member *me, Runner *runner, const Source *from, int64_t rows, Rows *shared) {
    if (rows <= ALONE_ROWS) {
        Rows *own = &runner->alone[me->number];
        own->width = shared->width, own->groups = shared->groups;
        if (!any_left(me, chunks_of(from->matrix, rows, me->team->threads))) return own;
        for (int64_t row = 0; row < rows; row++) prepare_row(runner, from, row, own);
        return own;
    }
    prepare_shared(me, runner, from, rows, shared);
    return shared;
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
    Runner *runner;
    Step step;
    int64_t item_rows, items, splits;
} Hidden;

static void layer_phases(Member *me, const Hidden *job, int64_t number) {
    Runner *runner = job->runner;
    const Model *m = runner->model;
    const Step *step = &job->step;
    const LayerWeights *block = &m->blocks[number];
    Buffers *b = &runner->shared;
    uint8_t *scratch = runner->scratch[me->number];
    int64_t tokens = step->tokens, hidden = m->hidden;

    const Rows *normed = prepare(me, runner, &(Source){b->hidden, block->attention_norm, &block->qkv}, tokens, &b->normed);
    PHASE(NORM)
    multiply(me, &block->qkv, normed, tokens, scratch, &(Out){STORE, b->qkv, qkv_width(m), qkv_width(m), NULL, NULL});
    PHASE(QKV)

    AttentionArgs layer = {
        .step = step, .shape = &m->attention,
        .pool = (char *)m->pool + number * 2 * m->attention.values_at * kv_number_bytes((KVKind)m->kv_kind),
        .qkv = b->qkv, .qkv_stride = qkv_width(m),
        .out = b->output.plain, .window = block->window,
        .item_rows = job->item_rows, .item_starts = b->item_starts, .items = job->items,
        .splits = job->splits, .parts = b->parts,
    };
    store_all(me, &layer, m->kv_kind, rope_row, &(RopeArgs){runner, block});
    PHASE(TURN)
    attend_all(me, &layer, m->kv_kind);
    PHASE(ATTEND)

    const Rows *attended = prepare(me, runner, &(Source){b->output.plain, NULL, &block->output}, tokens, &b->output);
    multiply(me, &block->output, attended, tokens, scratch, &(Out){ADD, b->hidden, hidden, hidden, NULL, NULL});
    PHASE(OUTPUT)

    normed = prepare(me, runner, &(Source){b->hidden, block->mlp_norm, &block->gate_up}, tokens, &b->normed);
    PHASE(NORM2)
    multiply(me, &block->gate_up, normed, tokens, scratch, &(Out){STORE, b->down.plain, m->inner, m->inner, NULL, NULL});
    PHASE(GATE_UP)

    const Rows *gated = prepare(me, runner, &(Source){b->down.plain, NULL, &block->down}, tokens, &b->down);
    PHASE(GATED)
    multiply(me, &block->down, gated, tokens, scratch, &(Out){ADD, b->hidden, hidden, hidden, NULL, NULL});
    PHASE(DOWN)
}

static void hidden_job(Member *me, const void *with) {
    const Hidden *job = with;
    const Model *m = job->runner->model;
#if defined(BATON_PHASES)
    if (me->number == 0) phase_since = nanoseconds();
#endif
    for (int64_t row; (row = next_chunk(me, job->step.tokens)) >= 0;) begin_row(job->runner, &job->step, row);
    barrier(me, job->step.tokens);
    PHASE(BEGIN)
    for (int64_t number = 0; number < m->layers; number++) layer_phases(me, job, number);
}

typedef struct {
    Runner *runner;
    int64_t rows;
    float *logits;                 /* NULL: only the best of each row, into Buffers.best */
    const uint32_t *const *allowed;  /* those that may be the best (Out) */
} Logits;

static void logits_job(Member *me, const void *with) {
    const Logits *job = with;
    Runner *runner = job->runner;
    const Model *m = runner->model;
    Buffers *b = &runner->shared;
    Source from = {b->picked, m->final_norm, &m->head};
    const Rows *normed = prepare(me, runner, &from, job->rows, &b->normed);
    Then then = job->logits ? STORE : KEEP_BEST;
    multiply(me, &m->head, normed, job->rows, runner->scratch[me->number],
             &(Out){then, job->logits, m->vocabulary, m->vocabulary, b->best + me->number * b->rows, job->allowed});
}

/* ---- what Python calls ---- */

/* 0, or what the system said. Has to come before any thread is made. */
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
    const int64_t all[] = {sizeof(Matrix), sizeof(LayerWeights), sizeof(Shape), sizeof(Model), sizeof(Step)};
    const int64_t there = sizeof all / sizeof *all;
    for (int64_t i = 0; i < min_int(count, there); i++) sizes[i] = all[i];
    return there;
}

int baton_has_tiles(void) { return HAS_AMX; }

/* Kind, outputs and inputs are given; fills in the rest of its shape, and the bytes of numbers, scales, minima. */
void baton_plan(Matrix *matrix, int64_t bytes[3]) { plan(matrix, bytes); }

/* Rows of a file's tensor, stored as `stored` and `row_bytes` long, become the outputs that `places` says. `squares`: [inputs] or NULL:
 * the squares of the weights are added. 0, or 1 where there is not enough memory. */
int baton_pack(const Matrix *matrix, int64_t stored, const uint8_t *rows, int64_t row_bytes, const int64_t *places, int64_t count,
               float *squares, int64_t threads) {
    return pack_rows(&(Packing){matrix, (int)stored, rows, row_bytes, places, count, squares, NULL, 0, 0}, (int)threads);
}

void baton_free(Runner *runner) {
    if (!runner) return;
    int threads = runner->team ? runner->team->threads : 0;
    if (runner->team) team_free(runner->team);
    for (int i = 0; i < threads && runner->alone; i++) rows_free(&runner->alone[i]);
    for (int i = 0; i < threads && runner->scratch; i++) free(runner->scratch[i]);
    for (int i = 0; i < threads && runner->drawing; i++) draw_room_free(&runner->drawing[i]);
    free(runner->alone), free(runner->scratch), free(runner->drawing);
    buffers_free(&runner->shared);
    free(runner);
}

/* NULL: not enough memory. The model must outlive the runner. */
Runner *baton_new(const Model *model, int64_t threads) {
    Runner *runner = calloc(1, sizeof *runner);
    if (!runner) return NULL;
    runner->model = model;
    runner->team = team_new((int)threads, phases_of(model));
    runner->alone = calloc((size_t)threads, sizeof *runner->alone);
    runner->scratch = calloc((size_t)threads, sizeof *runner->scratch);
    runner->drawing = calloc((size_t)threads, sizeof *runner->drawing);
    if (!runner->team || !runner->alone || !runner->scratch || !runner->drawing) return baton_free(runner), NULL;
    int64_t widest = max_int(max_int(model->hidden, model->inner), model->attention.heads * model->attention.head_dim);
    for (int i = 0; i < runner->team->threads; i++) {
        runner->scratch[i] = alloc_aligned(scratch_bytes(widest));
        if (!rows_alloc(&runner->alone[i], ALONE_ROWS, widest) || !runner->scratch[i]) return baton_free(runner), NULL;
    }
    return runner;
}

int64_t baton_threads(const Runner *runner) { return runner->team->threads; }

/* From now on this word is advanced, several times per layer, by the thread that calls. NULL: no word any more. */
void baton_progress(Runner *runner, _Atomic uint64_t *word) { runner->team->progress = word ? word : &runner->team->unwatched; }

/* The hidden rows of the step, before the last norm: valid until the next call. NULL: not enough memory. */
const float *baton_hidden(Runner *runner, const Step *step) {
    if (!buffers_fit(runner, step->tokens, step->sequences)) return NULL;
    const Shape *shape = &runner->model->attention;
    KVKind kind = (KVKind)runner->model->kv_kind;
    int64_t rows = item_starts(step, shape, kind, runner->team->threads, runner->shared.item_starts);
    int64_t items = runner->shared.item_starts[step->sequences], splits = splits_of_items(step, shape, kind, runner->team->threads, items);
    if (!parts_fit(runner, part_floats(shape, items, splits))) return NULL;
    Hidden job = {runner, *step, rows, items, splits};
    TEAM_RUN(runner->team, hidden_job, &job, phases_of(runner->model));
    return runner->shared.hidden;
}

static int run_logits(Runner *runner, const float *hidden, int64_t rows, float *logits, const uint32_t *const *allowed) {
    /* `hidden` is not a buffer that is made anew here: rows of a step never outnumber its tokens. */
    if (!buffers_fit(runner, rows, 1)) return 1;
    memcpy(runner->shared.picked, hidden, (size_t)(rows * runner->model->hidden) * sizeof *hidden);
    Logits job = {runner, rows, logits, allowed};
    TEAM_RUN(runner->team, logits_job, &job, phases_of(runner->model));
    return 0;
}

/* logits: [rows][vocabulary]. 0, or 1 where there is not enough memory. */
int baton_logits(Runner *runner, const float *hidden, int64_t rows, float *logits) { return run_logits(runner, hidden, rows, logits, NULL); }

/* tokens: [rows] the likeliest ones, or what is wrong with a row (sample.h). allowed: [rows] bits of the tokens that may be it, or NULL where
 * any may; NULL: any of any row. 0, or 1 where there is not enough memory. */
int baton_likeliest(Runner *runner, const float *hidden, int64_t rows, const uint32_t *const *allowed, int64_t *tokens) {
    int threads = runner->team->threads;
    if (!buffers_fit(runner, rows, 1)) return 1;
    Best *all = runner->shared.best;
    int64_t stride = runner->shared.rows;
    for (int64_t i = 0; i < threads * stride; i++) all[i] = NOTHING_YET;
    if (run_logits(runner, hidden, rows, NULL, allowed)) return 1;
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

/* tokens: [rows] as `draws` [rows] say, out of logits [rows][vocabulary], or what is wrong with a row (sample.h). 0, or 1 where there is
 * not enough memory. */
typedef struct { Runner *runner; const float *logits; const Draw *draws; int64_t rows; int64_t *tokens; } Choice;

static void choice_job(Member *me, const void *with) {
    const Choice *job = with;
    int64_t vocabulary = job->runner->model->vocabulary;
    for (int64_t row; (row = next_chunk(me, job->rows)) >= 0;)
        job->tokens[row] = draw_row(job->logits + row * vocabulary, vocabulary, &job->draws[row], &job->runner->drawing[me->number]);
    barrier(me, job->rows);
}

int baton_choose(Runner *runner, const float *logits, const Draw *draws, int64_t rows, int64_t *tokens) {
    for (int i = 0; i < runner->team->threads; i++)
        if (!runner->drawing[i].words && !draw_room(&runner->drawing[i], runner->model->vocabulary)) return 1;
    Choice job = {runner, logits, draws, rows, tokens};
    TEAM_RUN(runner->team, choice_job, &job, phases_of(runner->model));
    return 0;
}

/* One product by itself, for tests and measurements. x: [rows][inputs], out: [rows][outputs of the matrix]. */
typedef struct { Runner *runner; const Matrix *matrix; const float *x; int64_t rows; float *out; Rows *buffer; int64_t width; } Product;

static void product_job(Member *me, const void *with) {
    const Product *job = with;
    Source from = {job->x, NULL, job->matrix};
    prepare_shared(me, job->runner, &from, job->rows, job->buffer);
    uint8_t *scratch = alloc_aligned(scratch_bytes(job->matrix->inputs));
    multiply(me, job->matrix, job->buffer, job->rows, scratch, &(Out){STORE, job->out, job->width, job->width, NULL, NULL});
    free(scratch);
}

int baton_product(Runner *runner, const Matrix *matrix, const float *x, int64_t rows, float *out, int64_t width) {
    Rows buffer;
    if (!rows_alloc(&buffer, rows, matrix->inputs)) return 1;
    Product job = {runner, matrix, x, rows, out, &buffer, width};
    TEAM_RUN(runner->team, product_job, &job, phases_of(runner->model));
    team_rest(runner->team);
    rows_free(&buffer);
    return 0;
}

/* One layer's attention by itself, for tests. qkv: [tokens][heads + 2 * kv_heads][head_dim], out: [tokens][heads][head_dim]. */
typedef struct { AttentionArgs *layer; KVKind kind; } Attention;

static void attention_job(Member *me, const void *with) {
    const Attention *job = with;
    store_all(me, job->layer, job->kind, NULL, NULL);
    attend_all(me, job->layer, job->kind);
}

int baton_attention(Runner *runner, const Step *step, const Shape *shape, void *pool, const float *qkv, int64_t window,
                    int64_t kv_kind, float *out) {
    int64_t *starts = alloc_aligned((step->sequences + 1) * 8);
    if (!starts) return 1;
    AttentionArgs layer = {
        .step = step, .shape = shape, .pool = pool, .qkv = qkv, .out = out, .window = window, .item_starts = starts,
        .qkv_stride = (shape->heads + 2 * shape->kv_heads) * shape->head_dim,
        .item_rows = item_starts(step, shape, (KVKind)kv_kind, runner->team->threads, starts),
    };
    layer.items = starts[step->sequences];
    layer.splits = splits_of_items(step, shape, (KVKind)kv_kind, runner->team->threads, layer.items);
    if (!parts_fit(runner, part_floats(shape, layer.items, layer.splits))) return free(starts), 1;
    layer.parts = runner->shared.parts;
    Attention job = {&layer, (KVKind)kv_kind};
    TEAM_RUN(runner->team, attention_job, &job, phases_of(runner->model));
    team_rest(runner->team);
    free(starts);
    return 0;
}
