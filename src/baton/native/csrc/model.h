/* A model as Python describes it (native/library.py): its shape, its weights, and where its pool lies. */
#pragma once

#include "attention_types.h"
#include "matmul.h"

#define PHASES_OF_A_LAYER 13

typedef struct { const float *weight, *bias; } Norm;  /* weight NULL: there is none. bias NULL: nothing is added */

typedef struct {
    Norm attention_norm, mlp_norm;             /* before them */
    Norm attention_post_norm, mlp_post_norm;   /* of what they add to the residual */
    const float *q_norm, *k_norm;  /* [head_dim], or [heads * head_dim] with qk_norm_across_heads, or NULL */
    const float *cosines, *sines;  /* [positions][head_dim / 2]: of the angle of each pair of dimensions (models/rotary.py) */
    Matrix qkv, output, gate_up, down;
    int64_t window;                /* 0: none */
} LayerWeights;

typedef struct {
    int64_t layers, hidden, vocabulary, inner;
    Shape attention;
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
} Model;

static int64_t qkv_width(const Model *m) { return (m->attention.heads + 2 * m->attention.kv_heads) * m->attention.head_dim; }

/* One layer stands for all. */
static int norms_what_is_added(const Model *m) { return m->blocks[0].attention_post_norm.weight != NULL; }

/* Upper bound, of any job. */
static int64_t phases_of(const Model *model) { return 4 + PHASES_OF_A_LAYER * model->layers; }
