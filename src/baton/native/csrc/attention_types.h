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
 * keys are taken in key tiles that start at fixed positions; within one, each score is one chain of products over head_dim,
 * each output one chain over tokens, and sums over tokens go through lanes of fixed meaning. What another row of the tile
 * needs and this one may not see has weight zero, and adding zero times something finite changes nothing.
 */
#pragma once

#include "tuning.h"
#include "simd.h"
#include "thread_team.h"

#define ROWS_AT_ONCE 6  /* whose running sums stay in registers; the switches have a case for each number */
#define KEY_TILE 64      /* keys between two rescalings, rounded to whole blocks */
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
    const float *sinks;       /* [heads] or NULL: a score that takes its share of the softmax and gives nothing (gpt-oss) */
    int64_t item_rows;
    const int64_t *item_starts;  /* [sequences + 1] first chunk of each sequence */
    int64_t items;
    int64_t splits;            /* that an item is cut into, at most; 1: it is not (attention_int8.h) */
    float *parts;             /* part_floats() */
} AttentionArgs;

/* Which of `count` runs holds `index`; run i is [starts[i], starts[i + 1]). */
static int64_t run_of(const int64_t *starts, int64_t count, int64_t index) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (starts[middle] <= index) low = middle; else high = middle;
    }
    return low;
}

/* One chunk: up to item_rows rows of one sequence and one kv head. */
typedef struct {
    const AttentionArgs *layer;
    const int32_t *table;
    int64_t head;          /* kv head */
    int64_t context;       /* position of the sequence's first token of this step */
    int64_t first_token;   /* its row in the flat batch */
    int64_t first, rows;   /* rows of the item, counted within (sequence, kv head) */
    int64_t key_tile, width;
} Item;

ALWAYS int64_t position_of(const Item *item, int64_t group, int64_t row) {
    return item->context + (item->first + row) / group;
}

ALWAYS int64_t first_seen(const Item *item, int64_t position) {
    int64_t window = item->layer->window;
    return window ? max_int(0, position - window + 1) : 0;
}

/* The answer of a row that has a sink beside its keys. `total`: of its weights, against its largest score `top`. A sink joins last, whatever
 * the keys were cut into: it costs nothing in the loops over keys. */
ALWAYS void store_beside_sink(float sink, float top, float total, const float *out, int64_t dim, float *to) {
    float apart = exp_negative(sink > top ? top - sink : sink - top);
    float factor = sink > top ? apart / FMA(total, apart, 1.0f) : 1.0f / (total + apart);
    for (int64_t d = 0; d < dim; d++) to[d] = out[d] * factor;
}

/* Softmax of one row over one key tile: scores become weights; returns what the sums so far must be multiplied by.
 * `totals`: of the weights, lane by lane; they are added up when the row is done. */
ALWAYS float softmax(float *restrict scores, int64_t width, int64_t low, int64_t high, float *maximum, float *restrict totals) {
    for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int64_t t = high; t < width; t++) scores[t] = -INFINITY;
    f32v best = load(scores);
    for (int64_t t = LANES; t < width; t += LANES) best = max_lanes(load(scores + t), best);
    float top = max_of_lanes(best), before = *maximum;
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
#include "attention_float_template.h"
#undef KV
#undef OF_KV
#undef LOAD_KV
#undef TO_KV
#undef FROM_KV

#define KV f16
#define OF_KV(name) name##_f16
#define LOAD_KV load_f16
#define TO_KV to_f16
#define FROM_KV f32_of
#include "attention_float_template.h"
#undef KV
#undef OF_KV
#undef LOAD_KV
#undef TO_KV
#undef FROM_KV
