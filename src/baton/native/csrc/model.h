/* A model as Python describes it (native/library.py): its shape, its weights, and where its pool lies. */
#pragma once

#include "attention_types.h"
#include "matmul.h"

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
    float norm_eps;
    int32_t kv_kind, embedding_kind;
    int64_t positions;             /* that the tables of angles have */
    const float *cosines, *sines;  /* [positions][head_dim / 2]: of the angle of each pair of dimensions (models/rotary.py) */
    const uint8_t *embedding;      /* [vocabulary] rows as the file has them, in one of the four kinds */
    int64_t embedding_row_bytes;
    const float *final_norm;
    const LayerWeights *blocks;
    Matrix head;
    void *pool;                    /* block 0, layer 0 */
} Model;

static int64_t qkv_width(const Model *m) { return (m->attention.heads + 2 * m->attention.kv_heads) * m->attention.head_dim; }

/* Upper bound, of any job. */
static int64_t phases_of(const Model *model) { return 4 + PHASES_OF_A_LAYER * model->layers; }
