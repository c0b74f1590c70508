/* Rows on their way into a product: normed, and quantised in groups of 32 numbers with a scale each.
 *
 * What becomes of a row depends on that row alone: the sums go through lanes of fixed meaning.
 */
#pragma once

#include "simd.h"

#define GROUP 32     /* numbers with one scale, in weights (as GGUF has them) and in activations */
#define SUM_LANES 16
#define LEAST 1e-36f  /* the inverse of a largest number below it would be infinite: such a group is all zeros */

typedef struct {
    int64_t width, groups;   /* numbers and groups of a row; a width that is no multiple of GROUP is never quantised */
    int64_t stride;          /* rows that there is room for: from one group's numbers to the next group's */
    float *plain;            /* [rows][width] */
    int8_t *quantised;       /* [rows][width] */
    float *scales;           /* [groups][stride]: neighbouring rows are wanted together */
    int32_t *sums;           /* [groups][stride] of the quantised numbers: for taking back an offset of the weights */
    float *scaled_sums;      /* [groups][stride] scale * sum: what a minimum of the weights is multiplied by */
} Rows;

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

/* Compared as integers: the bits of numbers that are not negative have the order of the numbers, a NaN is above them all,
 * and so it becomes the scale: what is not finite stays so. */
#if LANES == 16
ALWAYS float largest_of_group(const float *x) {
    ints low = _mm512_castps_si512(_mm512_abs_ps(load(x))), high = _mm512_castps_si512(_mm512_abs_ps(load(x + 16)));
    union { int32_t i; float f; } largest = {_mm512_reduce_max_epi32(_mm512_max_epi32(low, high))};
    return largest.f;
}

ALWAYS int32_t quantise_group(const float *x, float inverse, int8_t *q) {
    ints low = _mm512_cvtps_epi32(load(x) * spread(inverse)), high = _mm512_cvtps_epi32(load(x + 16) * spread(inverse));
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(high));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}
#else
ALWAYS float largest_of_group(const float *x) {
    int32_t most = 0, bits[GROUP];
    memcpy(bits, x, sizeof bits);
    for (int j = 0; j < GROUP; j++) bits[j] &= 0x7fffffff, most = bits[j] > most ? bits[j] : most;
    union { int32_t i; float f; } largest = {most};
    return largest.f;
}

ALWAYS int32_t quantise_group(const float *x, float inverse, int8_t *q) {
    int32_t sum = 0;
    for (int j = 0; j < GROUP; j++) {
        /* Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even. */
        int32_t whole = (int32_t)((x[j] * inverse + 12582912.0f) - 12582912.0f);
        q[j] = (int8_t)whole, sum += whole;
    }
    return sum;
}
#endif

/* In three passes over the row: none of them waits for a number that the step before has only just begun to work out. */
static void quantise_row(const Rows *rows, int64_t row) {
    const float *restrict x = rows->plain + row * rows->width;
    int8_t *restrict q = rows->quantised + row * rows->width;
    float largest[rows->groups], scales[rows->groups], inverses[rows->groups];
    for (int64_t g = 0; g < rows->groups; g++) largest[g] = largest_of_group(x + g * GROUP);
    for (int64_t g = 0; g < rows->groups; g++) {
        scales[g] = largest[g] / 127.0f;
        inverses[g] = largest[g] > LEAST ? 127.0f / largest[g] : 0.0f;
    }
    for (int64_t g = 0; g < rows->groups; g++) {
        int32_t sum = quantise_group(x + g * GROUP, inverses[g], q + g * GROUP);
        int64_t at = g * rows->stride + row;
        rows->scales[at] = scales[g];
        rows->sums[at] = sum;
        rows->scaled_sums[at] = scales[g] * (float)sum;
    }
}
