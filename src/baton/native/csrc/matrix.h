/* Weights as the products read them, and what is done with results. matmul.h chooses among the kernels.
 *
 * A *panel* is 32 outputs wide and as long as a row of activations. It is read from its first byte to its last, and as many
 * rows of activations as there are go through it while it is in the first caches. Within a panel, numbers that follow each
 * other along the row lie in fours, output beside output: a vector of them meets four activations that are spread to all
 * lanes, and no sum across lanes is ever needed.
 *
 *   F32            [panel][input][output]                        float
 *   ROTATED_INT8   [panel][four][output][4]                      bytes
 *   GROUPED_INT8   [panel][four][output][4]                      bytes
 *   Q4_0, Q4_1,    [panel][group][4 pairs of fours][output][4]   two nibbles, fours p and p + 4
 *   MXFP4          (matmul_q4_amx.h: half of a panel's outputs first)
 *
 * The meaning of the numbers, how rows are quantized to meet them, and how they are multiplied:
 *
 *   matmul_int8.h     weights of 8 bits: both sides rotated, then bytes with one scale for a row
 *   matmul_q4.h       GGUF's own numbers: weights of 4 bits, and the head in 8; activations in one or two bytes with a scale for every 32 of them
 *   matmul_q4_amx.h   the same on processors with tiles: activations in two bytes with one scale for a row, integers to the very end
 *
 * In all of them, the bits of an output depend on its row and its weights, and not on the batch, the tile or the thread.
 */
#pragma once

#include "tuning.h"
#include "gguf_blocks.h"
#include "thread_team.h"
#include "amx.h"

#define PANEL 32
#define HALF_PANEL 16                 /* outputs of half a panel */
#define GROUP_WORDS (GROUP / 4)
#define TILE_OUTPUTS (TILE_PARTS * LANES)

enum { SILU_GATES = 1, GELU_GATES, OAI_GATES };
#define OAI_LIMIT 7.0f    /* of gpt-oss (models/config.py): where gate and up are cut off, */
#define OAI_SLOPE 1.702f  /* and how steep the sigmoid is */

/* A weight is unit * (step * (nibble - 8) + centre). */
typedef struct { int16_t step, centre; } Linear;

typedef struct {
    int32_t kind;
    int32_t paired;           /* not 0: outputs 0-15 of a panel are gates, 16-31 what they let through: 16 results. One of ..._GATES */
    int64_t outputs, inputs;  /* `outputs` as they are stored */
    int64_t panels, groups;    /* these: see plan() */
    const uint8_t *numbers;
    const void *scales;
    union {                   /* what a kind needs beside: */
        const void *corrections;
        const f16 *minima;          /* Q4_1 (matmul_q4.h) */
        const float *input_scales;  /* ROTATED_INT8 (matmul_int8.h) */
        const Linear *linears;      /* 4 bits on tiles (matmul_q4_amx.h) */
    };
    const float *bias;        /* [panels * CELL] or NULL */
    float *input_squares;             /* [rows][inputs] or NULL: ROTATED_INT8 leaves the squares of the activations that it is given here */
} Matrix;

static int64_t panel_bytes(const Matrix *m) {
    if (m->kind == F32) return m->inputs * PANEL * 4;
    int64_t of_bytes = m->groups * GROUP * PANEL;
    return m->kind == ROTATED_INT8 || m->kind == GROUPED_INT8 ? of_bytes : of_bytes / 2;
}

/* ---- what is done with a tile's outputs ---- */

typedef enum { STORE, ADD, KEEP_BEST } Then;

typedef struct { float value; int32_t place, broken; } Best;  /* `broken`: not all of a row are finite */

typedef struct {
    Then then;
    float *data;      /* [rows][stride] */
    int64_t stride, width;
    Best *best;       /* [rows] of this thread; instead of data */
    const uint32_t *const *allowed;  /* [rows] with KEEP_BEST: a bit for each output that may be it, or NULL: any. NULL: any of any row */
} Out;

static const Best NOTHING_YET = {-INFINITY, INT32_MAX, 0};

/* The largest one; of equal ones the first. */
ALWAYS int is_better(const Best *a, const Best *b) { return a->value > b->value || (a->value == b->value && a->place < b->place); }

/* `allowed`: bit j says whether t[j] may be the best. It is looked at only where the largest of all would be one: seldom. What is broken
 * is so whether it is allowed or not. */
static void keep_best(const float *t, int64_t width, int64_t begin, uint32_t allowed, Best *best) {
    float top = t[0];
    int32_t broken = 0;
    if (width == PANEL) {
        f32v tops = load(t);
        for (int j = LANES; j < PANEL; j += LANES) tops = max_lanes(load(t + j), tops);
        top = max_of_lanes(tops);
    }
    for (int64_t j = 0; j < width; j++) {
        int32_t bits;
        memcpy(&bits, t + j, 4);
        broken |= (bits & 0x7fffffff) >= 0x7f800000;
        if (width != PANEL && t[j] > top) top = t[j];
    }
    best->broken |= broken;
    if (!(top > best->value)) return;
    for (uint32_t left = allowed & (UINT32_MAX >> (PANEL - width)); left; left &= left - 1) {
        int j = __builtin_ctz(left);
        if (t[j] > best->value) best->value = t[j], best->place = (int32_t)(begin + j);
    }
}

/* Which outputs of a panel may be the best of a row: a panel is as wide as a word. */
ALWAYS uint32_t allowed_of(const Out *out, int64_t row, int64_t panel) {
    return out->allowed && out->allowed[row] ? out->allowed[row][panel] : UINT32_MAX;
}

/* gpt-oss: both are cut off, and 1 is added to what the gate lets through. What is no number stays so: it is the second operand. */
ALWAYS f32v oai_lanes(f32v gate, f32v up) {
    const f32v limit = broadcast(OAI_LIMIT);
    gate = min_lanes(limit, gate), up = max_lanes(-limit, min_lanes(limit, up));
    return gated_lanes(gate, gate * broadcast(OAI_SLOPE)) * (up + broadcast(1.0f));
}

ALWAYS f32v gate_lanes(const int paired, f32v gate, f32v up) {
    if (paired == OAI_GATES) return oai_lanes(gate, up);
    return (paired == GELU_GATES ? gelu_lanes(gate) : silu_lanes(gate)) * up;
}

/* A loop for each kind of gates: to ask within the loop costs a twentieth of the product. */
ALWAYS void gate_row(const int paired, float *restrict t) {
    for (int j = 0; j < HALF_PANEL; j += LANES) store(t + j, gate_lanes(paired, load(t + j), load(t + j + HALF_PANEL)));
}

/* Adds the bias, pairs gates, and stores what exists of the outputs of one panel. */
ALWAYS void finish_row(const Matrix *m, const float *bias, float *restrict t, float *restrict to, Then then, int64_t width) {
    if (bias)
        for (int j = 0; j < PANEL; j++) t[j] += bias[j];
    if (m->paired == SILU_GATES) gate_row(SILU_GATES, t);
    else if (m->paired == GELU_GATES) gate_row(GELU_GATES, t);
    else if (m->paired) gate_row(OAI_GATES, t);
    if (then == ADD)
        for (int64_t j = 0; j < width; j++) to[j] += t[j];
    else
        for (int64_t j = 0; j < width; j++) to[j] = t[j];
}

static void finish(const Matrix *m, int64_t panel, int64_t rows, float (*tile)[PANEL], int64_t first, const Out *out) {
    int64_t columns = m->paired ? PANEL / 2 : PANEL, begin = panel * columns, width = min_int(columns, out->width - begin);
    const float *bias = m->bias ? m->bias + panel * PANEL : NULL;
    for (int64_t r = 0; r < rows; r++) {
        if (out->then == KEEP_BEST) {
            finish_row(m, bias, tile[r], NULL, STORE, 0);
            keep_best(tile[r], width, begin, allowed_of(out, first + r, panel), out->best + first + r);
            continue;
        }
        float *to = out->data + (first + r) * out->stride + begin;
        if (width == PANEL) finish_row(m, bias, tile[r], to, out->then, PANEL);  /* known sizes become vectors */
        else if (width == PANEL / 2) finish_row(m, bias, tile[r], to, out->then, PANEL / 2);
        else finish_row(m, bias, tile[r], to, out->then, width);
    }
}

/* ---- tiles: `rows` rows of activations times TILE_OUTPUTS outputs of a panel, from `at` on ---- */

/* A function for each number of rows that a tile may have: its sums are in registers only if the compiler knows how many. */
#define TILE(name, tile, kind)                                                                                          \
    static void name(int rows, const Matrix *m, const uint8_t *w, int64_t panel, const Rows *x, int64_t first,           \
                     float (*out)[PANEL]) {                                                                              \
        for (int at = 0; at < PANEL; at += TILE_OUTPUTS) switch (rows) {                                                 \
            TILE_CASE(1, tile, kind) TILE_CASE(2, tile, kind) TILE_CASE(3, tile, kind)                                  \
            TILE_CASE(4, tile, kind) TILE_CASE(5, tile, kind) TILE_CASE(6, tile, kind)                                  \
        }                                                                                                               \
    }
/* Nothing for more rows than a tile has. */
#define TILE_CASE(n, tile, kind) case n: if (n <= TILE_ROWS) tile(n <= TILE_ROWS ? n : 1, kind, m, w, panel, at, x, first, out); break;

typedef void (*Tile)(int rows, const Matrix *m, const uint8_t *w, int64_t panel, const Rows *x, int64_t first, float (*out)[PANEL]);

/* Rows [first, end) through one panel, tile by tile. */
static void tiles_times_rows(Tile tile, int64_t tile_rows, const Matrix *m, const uint8_t *w, int64_t panel, const Rows *x,
                             int64_t first, int64_t end, const Out *out) {
    while (first < end) {
        float results[TILE_ROWS][PANEL];
        int64_t rows = min_int(tile_rows, end - first);
        tile((int)rows, m, w, panel, x, first, results);
        finish(m, panel, rows, results, first, out);
        first += rows;
    }
}

ALWAYS void tile_of_floats(const int rows, const int kind, const Matrix *m, const uint8_t *numbers, int64_t panel, int at,
                           const Rows *x, int64_t first, float (*out)[PANEL]) {
    (void)kind, (void)panel;
    f32v sum[TILE_ROWS][TILE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) sum[r][p] = broadcast(0.0f);
    const float *w = (const float *)numbers + at, *row = x->plain + first * x->width;
    for (int64_t k = 0; k < m->inputs; k++, w += PANEL)
        for (int p = 0; p < TILE_PARTS; p++) {
            f32v weights = load(w + p * LANES);
            for (int r = 0; r < rows; r++) sum[r][p] = fma_lanes(broadcast(row[r * x->width + k]), weights, sum[r][p]);
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < TILE_PARTS; p++) store(&out[r][at + p * LANES], sum[r][p]);
}

TILE(tile_f32, tile_of_floats, F32)

/* A row of floats becomes output `to`. */
static void pack_floats(const Matrix *m, const float *row, int64_t to) {
    float *numbers = (float *)(void *)((uint8_t *)m->numbers + to / PANEL * panel_bytes(m)) + to % PANEL;
    for (int64_t k = 0; k < m->inputs; k++) numbers[k * PANEL] = row[k];
}
