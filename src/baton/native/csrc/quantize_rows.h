/* Rows on their way into a product: normed, and quantised as the weights want it (matmul_int8.h, matmul_q4.h, matmul_q4_amx.h).
 *
 * The result of a row depends on that row alone: the sums go through lanes of fixed meaning.
 */
#pragma once

#include "alloc.h"
#include "simd.h"

#define GROUP 32     /* numbers of a block of GGUF's weights, and of a group of activations */
#define SUM_LANES 16

typedef struct {
    int64_t width, groups;   /* numbers and groups of a row; a width that is no multiple of GROUP is never quantised */
    int64_t stride;          /* rows that there is room for: from one group's numbers to the next group's */
    float *plain;            /* [rows][width] */
    int8_t *quantized;       /* the rest is of quantised rows: see matmul_int8.h, matmul_q4.h and matmul_q4_amx.h */
    union { int8_t *low, *upper; };
    float *scales, *scaled_sums;
    int32_t *sums;
    union { int32_t *low_sums, *wide; };
} Rows;

/* False where there is not enough memory. */
static int rows_alloc(Rows *rows, int64_t count, int64_t width) {
    /* Not a round number: strides of a power of two would crowd into a few lines of the first cache. */
    *rows = (Rows){.width = width, .groups = width / GROUP, .stride = round_up(count, 16) + 16};
    int64_t quantized = rows->stride * round_up(width, 2 * GROUP), groups = rows->stride * (rows->groups + 2) * 4;
    rows->plain = alloc_aligned(count * width * 4), rows->quantized = alloc_aligned(quantized), rows->low = alloc_aligned(quantized);
    rows->scales = alloc_aligned(groups), rows->scaled_sums = alloc_aligned(groups), rows->sums = alloc_aligned(groups), rows->low_sums = alloc_aligned(groups);
    return rows->plain && rows->quantized && rows->low && rows->scales && rows->scaled_sums && rows->sums && rows->low_sums;
}

static void rows_free(Rows *rows) {
    free(rows->plain), free(rows->quantized), free(rows->low);
    free(rows->scales), free(rows->scaled_sums), free(rows->sums), free(rows->low_sums);
}

/* Length of a quantised row: bytes, and zeros up to a whole step of tiles. */
ALWAYS int64_t padded(const Rows *rows) { return round_up(rows->width, 2 * GROUP); }

/* The largest magnitude; `count`: a multiple of 32. Compared as integers: the bits of numbers that are not negative have the order
 * of the numbers, a NaN is above them all, and so it becomes the scale: what is not finite stays so. */
#if LANES == 16
ALWAYS float largest_of(const float *x, int64_t count) {
    i32v most = broadcast_int(0), other = most;
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        most = _mm512_max_epi32(most, _mm512_castps_si512(_mm512_abs_ps(load(x + i))));
        other = _mm512_max_epi32(other, _mm512_castps_si512(_mm512_abs_ps(load(x + i + LANES))));
    }
    union { int32_t i; float f; } largest = {_mm512_reduce_max_epi32(_mm512_max_epi32(most, other))};
    return largest.f;
}

/* A group as bytes; returns their sum, here lane by lane. */
ALWAYS i32v bytes_and_lanes(const float *x, float inverse, int8_t *q) {
    i32v low = _mm512_cvtps_epi32(load(x) * broadcast(inverse)), high = _mm512_cvtps_epi32(load(x + 16) * broadcast(inverse));
    _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(high));
    return _mm512_add_epi32(low, high);
}

ALWAYS int32_t bytes_of_group(const float *x, float inverse, int8_t *q) { return _mm512_reduce_add_epi32(bytes_and_lanes(x, inverse, q)); }

/* Several groups. */
ALWAYS int32_t bytes_of(const float *x, int64_t count, float inverse, int8_t *q) {
    i32v sum = broadcast_int(0);
    for (int64_t at = 0; at < count; at += GROUP) sum = _mm512_add_epi32(sum, bytes_and_lanes(x + at, inverse, q + at));
    return _mm512_reduce_add_epi32(sum);
}
#else
ALWAYS float largest_of(const float *x, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i += GROUP) {
        int32_t bits[GROUP];
        memcpy(bits, x + i, sizeof bits);
        for (int j = 0; j < GROUP; j++) bits[j] &= 0x7fffffff, most = bits[j] > most ? bits[j] : most;
    }
    union { int32_t i; float f; } largest = {most};
    return largest.f;
}

ALWAYS int32_t bytes_of_group(const float *x, float inverse, int8_t *q) {
    int32_t sum = 0;
    for (int j = 0; j < GROUP; j++) {
        /* Adding and taking away 1.5 * 2^23 rounds to the nearest whole number, ties to even. */
        int32_t whole = (int32_t)((x[j] * inverse + 12582912.0f) - 12582912.0f);
        q[j] = (int8_t)whole, sum += whole;
    }
    return sum;
}

ALWAYS int32_t bytes_of(const float *x, int64_t count, float inverse, int8_t *q) {
    int32_t sum = 0;
    for (int64_t at = 0; at < count; at += GROUP) sum += bytes_of_group(x + at, inverse, q + at);
    return sum;
}
#endif

/* Sums in lanes of fixed meaning: the same bits whatever the vectors are. */
ALWAYS float sum_of_all(float *sums) {
    for (int step = SUM_LANES / 2; step; step /= 2)
        for (int j = 0; j < step; j++) sums[j] += sums[j + step];
    return sums[0];
}

/* With the mean subtracted first, and perhaps a bias added. */
static void layer_norm_row(const float *restrict x, const float *restrict weight, const float *bias, int64_t width, float eps, float *restrict out) {
    float sums[SUM_LANES] = {0};
    for (int64_t i = 0; i < width; i++) sums[i % SUM_LANES] += x[i];
    float mean = sum_of_all(sums) / (float)width;
    for (int j = 0; j < SUM_LANES; j++) sums[j] = 0.0f;
    for (int64_t i = 0; i < width; i++) sums[i % SUM_LANES] = FMA(x[i] - mean, x[i] - mean, sums[i % SUM_LANES]);
    float factor = 1.0f / sqrtf(sum_of_all(sums) / (float)width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = (x[i] - mean) * factor * weight[i];
    if (bias)
        for (int64_t i = 0; i < width; i++) out[i] += bias[i];
}

static void norm_row(const float *restrict x, const float *restrict weight, int64_t width, float eps, float *restrict out) {
    float sums[SUM_LANES] = {0};
    int64_t whole = width / SUM_LANES * SUM_LANES;
    for (int64_t i = 0; i < whole; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) sums[j] = FMA(x[i + j], x[i + j], sums[j]);
    for (int64_t i = whole; i < width; i++) sums[i - whole] = FMA(x[i], x[i], sums[i - whole]);
    float factor = 1.0f / sqrtf(sum_of_all(sums) / (float)width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}
