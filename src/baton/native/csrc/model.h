/* A model as Python describes it (native/library.py): its shape, its weights, and where its pool lies. */
#pragma once

#include "attention_types.h"
#include "exchange.h"
#include "matmul.h"

#define PHASES_OF_A_LAYER 13
#define MORE_PHASES_WITH_EXPERTS 7
#define MORE_PHASES_WITH_RANKS 4
#define MEETINGS_OF_A_LAYER 2
#define HEAD_UNIT 32  /* tokens (models/config.py) */

typedef struct { const float *weight, *bias; } Norm;  /* weight NULL: there is none. bias NULL: nothing is added */

/* In place of an MLP: experts.h. All experts of a layer are of one kind each, and take rows that were quantised for the first of them. */
typedef struct {
    const Matrix *gate_up, *down;  /* [experts of this rank]; NULL: the layer has an MLP */
    Matrix router;                 /* float32: an output for each expert, and with shared_gate one more */
    const float *correction;       /* [experts] that is added to shares to pick by, or NULL */
} Mixture;

typedef struct {
    Norm attention_norm, mlp_norm;             /* before them */
    Norm attention_post_norm, mlp_post_norm;   /* of what they add to the residual */
    const float *sinks;            /* [heads] or NULL (attention_types.h) */
    const float *q_norm, *k_norm;  /* [head_dim], or [heads * head_dim] with qk_norm_across_heads, or NULL */
    const float *cosines, *sines;  /* [positions][head_dim / 2]: of the angle of each pair of dimensions (models/rotary.py) */
    Matrix qkv, output;
    Matrix gate_up, down;          /* of the MLP, or of the shared expert */
    Mixture mixture;
    int64_t window;                /* 0: none */
} LayerWeights;

typedef struct {
    int64_t count, per_token, inner;  /* count 0: no layer has experts */
    int64_t shared;                   /* width of an MLP for every row; 0: none */
    int32_t shared_gate;              /* what it gives is multiplied by the sigmoid of one more output of the router */
    int32_t sigmoid;                  /* logits become shares by a sigmoid, and not by a softmax */
    int32_t normalised;               /* shares of the picked ones add up to 1 */
    float scale;                      /* of shares, in the end */
    int64_t first, own;               /* experts that this rank has */
} Experts;

typedef struct {
    int64_t layers, hidden, vocabulary;
    int64_t inner;                 /* of an MLP; 0: every layer has experts */
    Shape attention;
    Experts experts;
    float norm_eps, embedding_scale;
    int32_t kv_kind, embedding_kind;
    int32_t layer_norm;            /* norms of the residual subtract the mean */
    int32_t qk_norm_across_heads;
    int32_t parallel;              /* attention and MLP read the same normed rows */
    int32_t reserved;
    int64_t positions;             /* that the tables of angles have */
    const uint8_t *embedding;      /* [vocabulary] rows as the file has them, in one of the four kinds */
    int64_t embedding_row_bytes;
    Norm final_norm;
    const LayerWeights *blocks;
    Matrix head;
    void *pool;                    /* block 0, layer 0 */
    Exchange *exchange;            /* with the other ranks; NULL: there is only one */
} Model;

static int64_t qkv_width(const Model *m) { return (m->attention.heads + 2 * m->attention.kv_heads) * m->attention.head_dim; }

/* One layer stands for all. */
static int norms_what_is_added(const Model *m) { return m->blocks[0].attention_post_norm.weight != NULL; }

/* Upper bound, of any job. */
static int64_t phases_of(const Model *model) {
    int64_t of_layer = PHASES_OF_A_LAYER + (model->experts.count ? MORE_PHASES_WITH_EXPERTS : 0);
    return 4 + (of_layer + (model->exchange ? MORE_PHASES_WITH_RANKS : 0)) * model->layers;
}

/* Tokens [first, end) whose logits a rank computes (models/shard.py). */
typedef struct { int64_t first, end; } HeadShare;

static HeadShare head_share(const Model *m, int64_t rank) {
    if (!m->exchange) return (HeadShare){0, m->vocabulary};
    int64_t units = (m->vocabulary + HEAD_UNIT - 1) / HEAD_UNIT, ranks = m->exchange->ranks;
    return (HeadShare){units * rank / ranks * HEAD_UNIT, min_int(units * (rank + 1) / ranks * HEAD_UNIT, m->vocabulary)};
}

static HeadShare own_head(const Model *m) { return head_share(m, m->exchange ? m->exchange->rank : 0); }

/* ---- experts ---- */

static int64_t router_width(const Model *m) { return m->experts.count + m->experts.shared_gate; }

/* An expert, and which pairs of a row and a pick it works on at once. */
typedef struct { int32_t expert, first, end; } Unit;

/* As many as there can be, whatever is picked: some are empty. */
static int64_t units_of(const Model *m, int64_t rows) {
    int64_t pairs = rows * m->experts.per_token;
    return min_int(m->experts.own, pairs) + pairs / EXPERT_ROWS;
}
