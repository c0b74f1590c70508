/* Rows on their way into a product: normed, and quantised as the weights want it (groups.h, wholes.h).
 *
 * What becomes of a row depends on that row alone: the sums go through lanes of fixed meaning.
 */
#pragma once

#include "memory.h"
#include "simd.h"

#define GROUP 32     /* numbers of a block of GGUF's weights, and of a group of activations */
#define SUM_LANES 16

typedef struct {
    int64_t width, groups;   /* numbers and groups of a row; a width that is no multiple of GROUP is never quantised */
    int64_t stride;          /* rows that there is room for: from one group's numbers to the next group's */
    float *plain;            /* [rows][width] */
    int8_t *quantised, *low; /* the rest is of quantised rows: see groups.h and wholes.h */
    float *scales, *scaled_sums;
    int32_t *sums, *low_sums;
} Rows;

/* False where there is not enough memory. */
static int rows_room(Rows *rows, int64_t count, int64_t width) {
    /* Not a round number: strides of a power of two would crowd into a few lines of the first cache. */
    *rows = (Rows){.width = width, .groups = width / GROUP, .stride = round_up(count, 16) + 16};
    int64_t bytes = rows->stride * round_up(width, 2 * GROUP), groups = rows->stride * (rows->groups + 2) * 4;
    rows->plain = room(count * width * 4), rows->quantised = room(bytes), rows->low = room(bytes);
    rows->scales = room(groups), rows->scaled_sums = room(groups), rows->sums = room(groups), rows->low_sums = room(groups);
    return rows->plain && rows->quantised && rows->low && rows->scales && rows->scaled_sums && rows->sums && rows->low_sums;
}

static void rows_free(Rows *rows) {
    free(rows->plain), free(rows->quantised), free(rows->low);
    free(rows->scales), free(rows->scaled_sums), free(rows->sums), free(rows->low_sums);
}

static void norm_row(const float *restrict x, const float *restrict weight, int64_t width, float eps, float *restrict out) {
    float sums[SUM_LANES] = {0};
    int64_t whole = width / SUM_LANES * SUM_LANES;
    for (int64_t i = 0; i < whole; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) sums[j] = FUSED(x[i + j], x[i + j], sums[j]);
    for (int64_t i = whole; i < width; i++) sums[i - whole] = FUSED(x[i], x[i], sums[i - whole]);
    for (int step = SUM_LANES / 2; step; step /= 2)
        for (int j = 0; j < step; j++) sums[j] += sums[j + step];
    float factor = 1.0f / sqrtf(sums[0] / (float)width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}
