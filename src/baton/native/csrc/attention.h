/* Paged attention over a flat batch. Reads the KV blocks in place, through the block table.
 *
 * One layer of one step has two phases: every new token's key and value go to their place in the pool, then every new token
 * looks at its own sequence up to itself. A chunk of a prompt and a single decoded token are the same thing here, of
 * different length.
 *
 * A block of one layer (see kvpool/layout.py), for each kv head:
 *
 *   keys     [head_dim][block_size]    turned: the scores of neighbouring tokens lie in one vector, no sum across lanes
 *   values   [block_size][head_dim]    as they come: the output of one token lies in one vector
 *
 * A *row* is one (token, query head). The rows that share a kv head are handled together, ROWS_AT_ONCE at a time, so that a
 * key that was loaded serves all of them: the heads of a group when decoding, several tokens as well in a prompt.
 *
 * The answer of a row does not depend on what else is in the batch, on the chunk it came in, or on the number of threads:
 * keys are taken in segments that start at fixed positions; within one, each score is one chain of products over head_dim,
 * each output one chain over tokens, and sums over tokens go through lanes of fixed meaning. What another row of the tile
 * needs and this one may not see has weight zero, and adding zero times something finite changes nothing.
 */
#pragma once

#include "simd.h"
#include "team.h"

#define ROWS_AT_ONCE 6  /* whose running sums stay in registers; the switches have a case for each number */
#define ITEM_ROWS 48    /* of a piece of work: one segment of keys and values stays in the first cache for all of them */
#define SEGMENT 64      /* keys between two rescalings, rounded to whole blocks */
#define COLUMNS_MAX 4   /* vectors of keys, or of head_dim, that are worked on at once */

/* As many running sums as there are registers for: each is a chain, and only many chains keep the adders busy. */
#if LANES == 16 || defined(__aarch64__)
#define COLUMNS(rows) 4
#else
#define COLUMNS(rows) ((rows) <= 3 ? 4 : 2)
#endif

#define LOWEST -1e30f  /* the maximum of nothing; finite, so that no inf - inf appears */

typedef struct {
    int64_t sequences, tokens;
    int64_t table_stride;     /* entries from one slot's table to the next */
    const int32_t *tables;    /* [slots][table_stride] block numbers */
    const int64_t *slots;     /* [sequences] whose table */
    const int64_t *starts;    /* [sequences + 1] first row of each sequence in the flat batch */
    const int64_t *contexts;  /* [sequences] tokens that were in the pool before this step */
    const int32_t *token_ids; /* [tokens] */
    const int64_t *positions; /* [tokens] */
} Step;

typedef struct {
    int64_t heads, kv_heads, head_dim, block_size;
    int64_t block_stride;     /* numbers from one block of this layer to the next */
    int64_t values_at;        /* numbers from a block's keys to its values */
    float scale;
} Shape;

typedef struct {
    const Step *step;
    const Shape *shape;
    void *pool;               /* this layer of block 0 */
    const float *qkv;         /* [tokens][heads + 2 * kv_heads][head_dim], already rotated */
    int64_t qkv_stride;
    float *out;               /* [tokens][heads][head_dim] */
    int64_t window;           /* 0: none */
    int64_t item_rows;
    const int64_t *item_starts;  /* [sequences + 1] first piece of work of each sequence */
    int64_t items;
    int64_t spans;            /* that an item is cut into, at most; 1: it is not (attention_bytes.h) */
    float *parts;             /* part_floats() */
} Layer;

/* Which of `count` runs holds `index`; run i is [starts[i], starts[i + 1]). */
static int64_t run_of(const int64_t *starts, int64_t count, int64_t index) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (starts[middle] <= index) low = middle; else high = middle;
    }
    return low;
}

/* One piece of work: up to item_rows rows of one sequence and one kv head. */
typedef struct {
    const Layer *layer;
    const int32_t *table;
    int64_t head;          /* kv head */
    int64_t context;       /* position of the sequence's first token of this step */
    int64_t first_token;   /* its row in the flat batch */
    int64_t first, rows;   /* rows of the item, counted within (sequence, kv head) */
    int64_t segment, width;
} Item;

ALWAYS int64_t position_of(const Item *item, int64_t group, int64_t row) {
    return item->context + (item->first + row) / group;
}

ALWAYS int64_t first_seen(const Item *item, int64_t position) {
    int64_t window = item->layer->window;
    return window ? larger(0, position - window + 1) : 0;
}

/* Softmax of one row over one segment: scores become weights; returns what the sums so far must be multiplied by.
 * `totals`: of the weights, lane by lane; they are added up when the row is done. */
ALWAYS float soften(float *restrict scores, int64_t width, int64_t low, int64_t high, float *maximum, float *restrict totals) {
    for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int64_t t = high; t < width; t++) scores[t] = -INFINITY;
    floats best = load(scores);
    for (int64_t t = LANES; t < width; t += LANES) best = larger_lanes(load(scores + t), best);
    float top = largest_lane(best), before = *maximum;
    top = top > before ? top : before;
    *maximum = top;
    float keep = exp_negative(before - top), sum[LANES];
    for (int j = 0; j < LANES; j++) sum[j] = totals[j] * keep;
    for (int64_t t = 0; t < width; t += LANES)
        for (int j = 0; j < LANES; j++) {
            float weight = exp_negative(scores[t + j] - top);
            scores[t + j] = weight;
            sum[j] += weight;
        }
    for (int j = 0; j < LANES; j++) totals[j] = sum[j];
    return keep;
}

#define KV float
#define OF_KV(name) name##_float
#define LOAD_KV load
#define TO_KV(x) (x)
#define FROM_KV(x) (x)
#include "attention_kernel.h"
#undef KV
#undef OF_KV
#undef LOAD_KV
#undef TO_KV
#undef FROM_KV

#define KV half
#define OF_KV(name) name##_half
#define LOAD_KV load_half
#define TO_KV as_half
#define FROM_KV float_of
#include "attention_kernel.h"
#undef KV
#undef OF_KV
#undef LOAD_KV
#undef TO_KV
#undef FROM_KV

#include "attention_bytes.h"
#include "attention_tiles.h"

typedef enum { KV_FLOAT, KV_HALF, KV_PAIRS, KV_BYTES } KVKind;

/* Bytes of what `block_stride` and `values_at` count. */
ALWAYS int64_t kv_number_bytes(KVKind kind) { return kind == KV_FLOAT ? 4 : kind == KV_BYTES ? 1 : 2; }

static void store_token(const Layer *layer, KVKind kind, int64_t sequence, int64_t token) {
    if (kind == KV_FLOAT) store_token_float(layer, sequence, token);
    else if (kind == KV_HALF) store_token_half(layer, sequence, token);
    else if (kind == KV_PAIRS) store_token_pairs(layer, sequence, token);
    else store_token_bytes(layer, sequence, token);
}

/* How many rows a piece has: many, to make use of the keys that it loads, unless some of the team would get nothing. */
static int64_t item_starts(const Step *step, const Shape *shape, KVKind kind, int threads, int64_t *starts) {
    int64_t group = shape->heads / shape->kv_heads, rows = ITEM_ROWS;
    /* A tile costs the same for one row, and bytes not much less; nor do floats on ARM (1,000 tokens: 4.6 ms together, 6.3 apart). */
    int many_cost_more = LANES != 4 && (kind == KV_FLOAT || kind == KV_HALF);
    if (many_cost_more && step->tokens * shape->kv_heads < 4 * threads) rows = 1;
    starts[0] = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        int64_t own = (step->starts[s + 1] - step->starts[s]) * group;
        starts[s + 1] = starts[s] + (own + rows - 1) / rows * shape->kv_heads;
    }
    return rows;
}

/* Into how many spans items are cut: where there are too few for the team, and what they see is long. */
static int64_t spans_of_items(const Step *step, const Shape *shape, KVKind kind, int threads, int64_t items) {
    if (kind != KV_BYTES || items >= 4 * threads) return 1;
    int64_t longest = 1;
    for (int64_t s = 0; s < step->sequences; s++) {
        int64_t tokens = step->starts[s + 1] - step->starts[s];
        if (tokens * (shape->heads / shape->kv_heads) > SPLIT_ROWS) return 1;
        longest = larger(longest, step->contexts[s] + tokens);
    }
    return (longest + BYTES_SPAN - 1) / BYTES_SPAN;
}

/* For all spans of all items. */
static int64_t part_floats(const Shape *shape, int64_t items, int64_t spans) {
    return spans == 1 ? 0 : items * spans * PART_FLOATS(SPLIT_ROWS, shape->head_dim);
}

static Item item_of(const Layer *layer, int64_t number) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t sequence = run_of(layer->item_starts, step->sequences, number);
    int64_t within = number - layer->item_starts[sequence], group = shape->heads / shape->kv_heads;
    int64_t tokens = step->starts[sequence + 1] - step->starts[sequence];
    int64_t first = within / shape->kv_heads * layer->item_rows;
    int64_t segment = shape->block_size * larger(1, SEGMENT / shape->block_size);
    return (Item){
        .layer = layer,
        .table = step->tables + step->slots[sequence] * step->table_stride,
        .head = within % shape->kv_heads,
        .context = step->contexts[sequence],
        .first_token = step->starts[sequence],
        .first = first,
        .rows = smaller(layer->item_rows, tokens * group - first),
        .segment = segment,
        .width = round_up(segment, LANES),
    };
}

/* Two phases: attention of a layer whose items are cut. */
static void attend_by_spans(Member *me, const Layer *layer) {
    for (int64_t piece; (piece = take(me, layer->items * layer->spans)) >= 0;) {
        Item item = item_of(layer, piece / layer->spans);
        attend_one_span(layer, &item, piece / layer->spans, piece % layer->spans);
    }
    tiles_end();
    meet(me, layer->items * layer->spans);
    for (int64_t number; (number = take(me, layer->items)) >= 0;) {
        Item item = item_of(layer, number);
        join_spans(layer, &item, number);
    }
    meet(me, layer->items);
}

/* A phase: attention of a layer. From the last piece to the first: the end of a long prompt sees most keys. Where there is enough
 * for everybody, all heads of a token go to one member, and several tokens: their keys lie side by side, and the next ones are
 * fetched while it works. */
static void attend_all(Member *me, const Layer *layer, KVKind kind) {
    if (layer->spans > 1) {
        attend_by_spans(me, layer);
        return;
    }
    int64_t heads = layer->shape->kv_heads, enough = 8 * me->team->threads, at_once = heads * (layer->items / heads / enough);
    if (at_once == 0) at_once = 1;
    int64_t pieces = (layer->items + at_once - 1) / at_once;
    for (int64_t piece; (piece = take(me, pieces)) >= 0;) {
        int64_t number = (pieces - 1 - piece) * at_once, end = smaller(number + at_once, layer->items);
        Item item = item_of(layer, number), next;
        for (; number < end; number++, item = next) {
            if (number + 1 < end) next = item_of(layer, number + 1);
            if (kind == KV_FLOAT) attend_float(&item);
            else if (kind == KV_HALF) attend_half(&item);
            else if (kind == KV_PAIRS) attend_pairs(&item);
            else attend_bytes(&item, number + 1 < end ? &next : NULL);
        }
    }
    tiles_end();
    meet(me, pieces);
}

/* A phase: keys and values of all tokens go to the pool; before that, `turn` is called for each. Tokens of a prompt are dealt out in
 * whole blocks: keys of all tokens of a block are in every line of it, and two members must not write to one. */
typedef void (*Turn)(const void *with, int64_t token);

static void store_all(Member *me, const Layer *layer, KVKind kind, Turn turn, const void *with) {
    const Step *step = layer->step;
    int64_t at_once = larger(1, step->tokens / (8 * me->team->threads));
    if (step->tokens > 2 * step->sequences) at_once = round_up(at_once, layer->shape->block_size);
    int64_t pieces = (step->tokens + at_once - 1) / at_once;
    for (int64_t piece; (piece = take(me, pieces)) >= 0;)
        for (int64_t token = piece * at_once; token < smaller((piece + 1) * at_once, step->tokens); token++) {
            if (turn) turn(with, token);
            store_token(layer, kind, run_of(step->starts, step->sequences, token), token);
        }
    meet(me, pieces);
}
