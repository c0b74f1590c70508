/* Products of bytes (matmul_int8.h) on Intel's tiles: the results of one batch of rows are put where they belong while the next is multiplied. */
#pragma once

#include "matmul_int8.h"

#if HAS_AMX

/* Rows of up to two tiles times a panel, and where they belong. */
typedef struct {
    _Alignas(64) int32_t sums[2][2][TILE_HEIGHT][LANES];  /* [tile of rows][half of the panel] */
    int64_t row, rows;
    int64_t height;              /* rows of a tile */
    f32v units[2];             /* of the halves of the panel */
    const float *bias;           /* of the panel, or NULL */
    float *to;                   /* column of the panel, row 0 */
} Int8Batch;

ALWAYS f32v tile_value(const Int8Batch *b, const Rows *x, int64_t r, int h) {
    const int32_t *sums = r < b->height ? b->sums[0][h][r] : b->sums[1][h][r - b->height];
    i32v whole = _mm512_sub_epi32(_mm512_load_si512(sums), broadcast_int(WEIGHT8_OFFSET * x->sums[b->row + r]));
    return int8_value(whole, b->units[h], x->scales[b->row + r]);
}

/* Rows [first, end) of a batch: what finish() does, without memory in between. */
ALWAYS void put_rows(const int paired, const Then then, const Int8Batch *b, const Rows *x, int64_t stride, int64_t first, int64_t end) {
    for (int64_t r = first; r < end; r++) {
        f32v early = tile_value(b, x, r, 0), late = tile_value(b, x, r, 1);
        float *to = b->to + (b->row + r) * stride;
        if (b->bias) early += load(b->bias), late += load(b->bias + HALF_PANEL);
        if (paired) early = gate_lanes(paired, early, late);
        if (then == ADD) early += load(to);
        store(to, early);
        if (paired) continue;
        if (then == ADD) late += load(to + HALF_PANEL);
        store(to + HALF_PANEL, late);
    }
}

/* One or two tiles of rows times a panel. Tiles multiply without the rest of the core, which meanwhile puts the rows of the batch
 * before where they belong. */
ALWAYS void int8_products(const int tiles, const int paired, const Then then, const Rows *x, const uint8_t *w, int64_t inputs, int fetches,
                          int64_t stride, Int8Batch *b, const Int8Batch *before) {
    int64_t width = padded(x), at_once = before->rows * AMX_STEP / inputs + 1;
    const int8_t *q = x->quantized + b->row * width;
    _tile_zero(0);
    _tile_zero(1);
    if (tiles == 2) _tile_zero(2);
    if (tiles == 2) _tile_zero(3);
    for (int64_t k = 0, done = 0; k < inputs; k += AMX_STEP, w += AMX_STEP * PANEL) {
        if (fetches)
            for (int64_t i = 0; i < AMX_STEP * PANEL; i += 64) __builtin_prefetch(w + TILES_AHEAD + i, 0, 2);
        _tile_loadd(4, q + k, width);
        _tile_loadd(6, w, PANEL * 4);
        _tile_loadd(7, w + HALF_PANEL * 4, PANEL * 4);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        if (tiles == 2) {
            _tile_loadd(5, q + b->height * width + k, width);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        int64_t end = min_int(done + at_once, before->rows);
        put_rows(paired, then, before, x, stride, done, end);
        done = end;
    }
    _tile_stored(0, b->sums[0][0], 64);
    _tile_stored(1, b->sums[0][1], 64);
    if (tiles == 2) _tile_stored(2, b->sums[1][0], 64);
    if (tiles == 2) _tile_stored(3, b->sums[1][1], 64);
}

/* Cells [panel, last). With KEEP_BEST, finish() gets the results. */
ALWAYS void int8_amx(const int paired, const Then then, const Matrix *m, int64_t panel, int64_t last, const Rows *x, int64_t first,
                       int64_t end, const Out *out) {
    int64_t tiles = (end - first + TILE_HEIGHT - 1) / TILE_HEIGHT, height = (end - first + tiles - 1) / tiles;
    int64_t inputs = m->groups * GROUP, columns = paired ? HALF_PANEL : PANEL, stride = out->stride;
    Int8Batch batches[2], *b = &batches[0], *before = &batches[1];
    before->rows = 0;
    amx_for(height);
    for (; panel < last; panel++)
        for (int64_t row = first; row < end; row += 2 * height) {
            const float *units = (const float *)m->scales + panel * PANEL;
            const uint8_t *w = m->numbers + panel * panel_bytes(m);
            b->row = row, b->rows = min_int(2 * height, end - row), b->height = height;
            b->units[0] = load(units), b->units[1] = load(units + HALF_PANEL);
            b->bias = m->bias ? m->bias + panel * PANEL : NULL, b->to = out->data + panel * columns;
            for (int64_t r = 0; then != KEEP_BEST && r < b->rows; r++)  /* the other members' lines come while tiles multiply */
                for (int64_t i = 0; i < columns; i += LANES) __builtin_prefetch(b->to + (row + r) * stride + i, 1, 3);
            if (b->rows > height) int8_products(2, paired, then, x, w, inputs, row == first, stride, b, before);
            else int8_products(1, paired, then, x, w, inputs, row == first, stride, b, before);
            if (then == KEEP_BEST) {
                _Alignas(64) float results[2 * TILE_HEIGHT][PANEL];
                for (int64_t r = 0; r < b->rows; r++)
                    for (int h = 0; h < 2; h++) store(results[r] + h * HALF_PANEL, tile_value(b, x, r, h));
                finish(m, panel, b->rows, results, row, out);
            } else {
                Int8Batch *other = before;
                before = b, b = other;
            }
        }
    put_rows(paired, then, before, x, stride, 0, before->rows);
}

static void int8_amx_times_rows(const Matrix *m, int64_t panel, int64_t last, const Rows *x, int64_t first, int64_t end, const Out *out) {
    int64_t columns = m->paired ? HALF_PANEL : PANEL, whole = out->then == KEEP_BEST ? panel : max_int(panel, min_int(last, out->width / columns));
    if (m->paired == OAI_GATES) int8_amx(OAI_GATES, STORE, m, panel, whole, x, first, end, out);
    else if (m->paired == GELU_GATES) int8_amx(GELU_GATES, STORE, m, panel, whole, x, first, end, out);
    else if (m->paired) int8_amx(SILU_GATES, STORE, m, panel, whole, x, first, end, out);
    else if (out->then == STORE) int8_amx(0, STORE, m, panel, whole, x, first, end, out);
    else int8_amx(0, ADD, m, panel, whole, x, first, end, out);
    int8_amx(0, KEEP_BEST, m, whole, last, x, first, end, out);
}

#endif
