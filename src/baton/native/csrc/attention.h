/* Attention for any kind of keys and values: how the rows of a step are cut into items, and dealt out to the team. */
#pragma once

#include "attention_types.h"
#include "attention_int8.h"
#include "attention_bf16_amx.h"

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
