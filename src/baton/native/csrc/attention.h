/* Attention for any kind of keys and values: divides the rows of a step into items, and distributes them to the team. */
#pragma once

#include "attention_types.h"
#include "attention_int8.h"

typedef enum { KV_F32, KV_F16, KV_INT8 } KVKind;

/* Bytes of what `block_stride` and `values_at` count. */
ALWAYS int64_t kv_number_bytes(KVKind kind) { return kind == KV_F32 ? 4 : kind == KV_INT8 ? 1 : 2; }

static void store_token(const AttentionArgs *layer, KVKind kind, int64_t sequence, int64_t token) {
    if (kind == KV_F32) store_token_float(layer, sequence, token);
    else if (kind == KV_F16) store_token_f16(layer, sequence, token);
    else store_token_int8(layer, sequence, token);
}

/* How many rows a chunk has: many, to make use of the keys that it loads, unless some of the team would get nothing. */
static int64_t item_starts(const Step *step, const Shape *shape, KVKind kind, int threads, int64_t *starts) {
    int64_t group = shape->heads / shape->kv_heads, rows = ITEM_ROWS;
    /* A tile costs the same for one row, and bytes not much less; nor do floats on ARM (1,000 tokens: 4.6 ms together, 6.3 apart). */
    int many_cost_more = LANES != 4 && (kind == KV_F32 || kind == KV_F16);
    if (many_cost_more && step->tokens * shape->kv_heads < 4 * threads) rows = 1;
    starts[0] = 0;
    for (int64_t s = 0; s < step->sequences; s++) {
        int64_t own = (step->starts[s + 1] - step->starts[s]) * group;
        starts[s + 1] = starts[s] + (own + rows - 1) / rows * shape->kv_heads;
    }
    return rows;
}

/* Number of splits per item: more than one if there are too few items for the team, and their contexts are long. */
static int64_t splits_of_items(const Step *step, const Shape *shape, KVKind kind, int threads, int64_t items) {
    if (kind != KV_INT8 || items >= 4 * threads) return 1;
    int64_t longest = 1;
    for (int64_t s = 0; s < step->sequences; s++) {
        int64_t tokens = step->starts[s + 1] - step->starts[s];
        if (tokens * (shape->heads / shape->kv_heads) > SPLIT_ROWS) return 1;
        longest = max_int(longest, step->contexts[s] + tokens);
    }
    return (longest + KEY_SPLIT - 1) / KEY_SPLIT;
}

/* For all splits of all items. */
static int64_t part_floats(const Shape *shape, int64_t items, int64_t splits) {
    return splits == 1 ? 0 : items * splits * PART_FLOATS(SPLIT_ROWS, shape->head_dim);
}

static Item item_of(const AttentionArgs *layer, int64_t number) {
    const Step *step = layer->step;
    const Shape *shape = layer->shape;
    int64_t sequence = run_of(layer->item_starts, step->sequences, number);
    int64_t within = number - layer->item_starts[sequence], group = shape->heads / shape->kv_heads;
    int64_t tokens = step->starts[sequence + 1] - step->starts[sequence];
    int64_t first = within / shape->kv_heads * layer->item_rows;
    int64_t key_tile = shape->block_size * max_int(1, KEY_TILE / shape->block_size);
    return (Item){
        .layer = layer,
        .table = step->tables + step->slots[sequence] * step->table_stride,
        .head = within % shape->kv_heads,
        .context = step->contexts[sequence],
        .first_token = step->starts[sequence],
        .first = first,
        .rows = min_int(layer->item_rows, tokens * group - first),
        .key_tile = key_tile,
        .width = round_up(key_tile, LANES),
    };
}

/* Two phases: attention of a layer whose items are split. */
static void attend_by_splits(Member *me, const AttentionArgs *layer) {
    for (int64_t chunk; (chunk = next_chunk(me, layer->items * layer->splits)) >= 0;) {
        Item item = item_of(layer, chunk / layer->splits);
        attend_one_split(layer, &item, chunk / layer->splits, chunk % layer->splits);
    }
    amx_end();
    barrier(me, layer->items * layer->splits);
    for (int64_t number; (number = next_chunk(me, layer->items)) >= 0;) {
        Item item = item_of(layer, number);
        join_splits(layer, &item, number);
    }
    barrier(me, layer->items);
}

/* A phase: attention of a layer. From the last chunk to the first: the end of a long prompt sees most keys. If there is enough work
 * for all members, all heads of a token go to one member, and several tokens: their keys are adjacent, and the next ones are
 * prefetched. */
static void attend_all(Member *me, const AttentionArgs *layer, KVKind kind) {
    if (layer->splits > 1) {
        attend_by_splits(me, layer);
        return;
    }
    int64_t heads = layer->shape->kv_heads, enough = 8 * me->team->threads, at_once = heads * (layer->items / heads / enough);
    if (at_once == 0) at_once = 1;
    int64_t chunks = (layer->items + at_once - 1) / at_once;
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;) {
        int64_t number = (chunks - 1 - chunk) * at_once, end = min_int(number + at_once, layer->items);
        Item item = item_of(layer, number), next;
        for (; number < end; number++, item = next) {
            if (number + 1 < end) next = item_of(layer, number + 1);
            if (kind == KV_F32) attend_float(&item);
            else if (kind == KV_F16) attend_f16(&item);
            else attend_int8(&item, number + 1 < end ? &next : NULL);
        }
    }
    amx_end();
    barrier(me, chunks);
}

/* A phase: keys and values of all tokens go to the pool; before that, `turn` is called for each. Tokens of a prompt are dealt out in
 * whole blocks: keys of all tokens of a block are in every line of it, and two members must not write to one. */
typedef void (*RowFunction)(const void *with, int64_t token);

static void store_all(Member *me, const AttentionArgs *layer, KVKind kind, RowFunction before, const void *with) {
    const Step *step = layer->step;
    int64_t at_once = max_int(1, step->tokens / (8 * me->team->threads));
    if (step->tokens > 2 * step->sequences) at_once = round_up(at_once, layer->shape->block_size);
    int64_t chunks = (step->tokens + at_once - 1) / at_once;
    for (int64_t chunk; (chunk = next_chunk(me, chunks)) >= 0;)
        for (int64_t token = chunk * at_once; token < min_int((chunk + 1) * at_once, step->tokens); token++) {
            if (before) before(with, token);
            store_token(layer, kind, run_of(step->starts, step->sequences, token), token);
        }
    barrier(me, chunks);
}
