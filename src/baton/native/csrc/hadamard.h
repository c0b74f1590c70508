/* Hadamard rotation: every number of a row becomes a sum of all of them, with signs that differ from sum to sum.
 *
 * A row of activations has a few numbers that are a hundred times as large as the others. Rounded to bytes with one scale they
 * leave nothing of the rest. Rotated, they are spread over the row, and one scale will do. It is a rotation, and a factor (hadamard_gain):
 * where weights are rotated like activations, all products stay what they were but for a known factor. (Known as Hadamard
 * rotation: QuaRot, Ashkboos et al. 2024.)
 *
 *   sums and differences   of numbers 1, 2, 4, ... apart, as long as the width is a multiple of twice that: Walsh and Hadamard's
 *   reflections            of the odd factors of what is left, 3 or 5 or 7 numbers at a time: each minus 2/3 (2/5, 2/7) of their sum
 */
#pragma once

#include "simd.h"

#define HOUSEHOLDER_MAX 13   /* numbers: of more, a reflection hardly rotates anything */

/* Sums and differences within a vector. */
ALWAYS f32v hadamard_lanes(f32v x) {
#if LANES == 16
    x = _mm512_fmadd_ps(x, _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1), _mm512_permute_ps(x, 0xb1));
    x = _mm512_fmadd_ps(x, _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1), _mm512_permute_ps(x, 0x4e));
    x = _mm512_fmadd_ps(x, _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1), _mm512_shuffle_f32x4(x, x, 0xb1));
    return _mm512_fmadd_ps(x, _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1), _mm512_shuffle_f32x4(x, x, 0x4e));
#elif LANES == 8
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1), _mm256_permute2f128_ps(x, x, 1));
#elif defined(__aarch64__)
    x = fma_lanes(x, (f32v){1, -1, 1, -1}, vrev64q_f32(x));
    return fma_lanes(x, (f32v){1, 1, -1, -1}, vextq_f32(x, x, 2));
#else
    float a[4];
    store(a, x);
    float b[4] = {a[0] + a[1], a[0] - a[1], a[2] + a[3], a[2] - a[3]};
    float c[4] = {b[0] + b[2], b[1] + b[3], b[0] - b[2], b[1] - b[3]};
    return load(c);
#endif
}

/* Scaled, and rotated within the vector. */
ALWAYS f32v scaled_hadamard_lanes(const float *x, const float *input_scales) { return hadamard_lanes(load(x) * load(input_scales)); }

/* Numbers `apart` and 2 * `apart` from each other. Where these are neighbouring vectors, it is the first that is done with a row. */
ALWAYS void hadamard_radix4(const float *input_scales, float *x, int64_t width, int64_t apart) {
    for (int64_t at = 0; at < width; at += 4 * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            int64_t j = i + apart, k = j + apart, l = k + apart;
            f32v a, b, c, d;
            if (input_scales) a = scaled_hadamard_lanes(x + i, input_scales + i), b = scaled_hadamard_lanes(x + j, input_scales + j);
            else a = load(x + i), b = load(x + j);
            if (input_scales) c = scaled_hadamard_lanes(x + k, input_scales + k), d = scaled_hadamard_lanes(x + l, input_scales + l);
            else c = load(x + k), d = load(x + l);
            f32v ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
            store(x + i, ab + cd), store(x + j, a_b + c_d);
            store(x + k, ab - cd), store(x + l, a_b - c_d);
        }
}

ALWAYS void hadamard_radix2(const float *input_scales, float *x, int64_t width, int64_t apart) {
    for (int64_t at = 0; at < width; at += 2 * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            f32v a, b;
            if (input_scales) a = scaled_hadamard_lanes(x + i, input_scales + i), b = scaled_hadamard_lanes(x + i + apart, input_scales + i + apart);
            else a = load(x + i), b = load(x + i + apart);
            store(x + i, a + b), store(x + i + apart, a - b);
        }
}

ALWAYS void householder(float *x, int64_t width, int64_t apart, const int64_t factor) {
    const f32v share = broadcast(-2.0f / (float)factor);
    for (int64_t at = 0; at < width; at += factor * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            f32v sum = load(x + i);
            for (int64_t f = 1; f < factor; f++) sum = sum + load(x + i + f * apart);
            for (int64_t f = 0; f < factor; f++) store(x + i + f * apart, fma_lanes(sum, share, load(x + i + f * apart)));
        }
}

/* By how much a product of two rotated rows is larger: the highest power of two that divides the width. */
ALWAYS int64_t hadamard_gain(int64_t width) { return width & -width; }

/* Numbers that lie in different vectors: those that are nearer than `apart` to each other are rotated already. All sums and differences of a
 * part of the row before the next one: a long row does not fit the first cache. */
ALWAYS void hadamard_vectors(float *x, int64_t width, int64_t apart) {
    int64_t twos = hadamard_gain(width), first = apart;
    for (int64_t at = 0; at < width; at += twos) {
        for (apart = first; 4 * apart <= twos; apart *= 4) hadamard_radix4(NULL, x + at, twos, apart);
        if (2 * apart <= twos) hadamard_radix2(NULL, x + at, twos, apart);
    }
    apart = twos;
    int32_t odd = (int32_t)width >> __builtin_ctzll((uint64_t)twos);  /* what is left to be reflected, a factor at a time */
    for (int32_t factor = 3; factor <= HOUSEHOLDER_MAX && odd > 1; factor += 2)
        for (; odd % factor == 0; apart *= factor, odd /= factor) {
            if (factor == 3) householder(x, width, apart, 3);  /* a known number becomes registers */
            else householder(x, width, apart, factor);
        }
}

/* x * input scale, rotated. `width`: a multiple of 32. */
static void hadamard_row(float *restrict x, const float *restrict input_scales, int64_t width) {
    int64_t fours = 4 * LANES <= hadamard_gain(width);
    if (fours) hadamard_radix4(input_scales, x, width, LANES);
    else hadamard_radix2(input_scales, x, width, LANES);
    hadamard_vectors(x, width, fours ? 4 * LANES : 2 * LANES);
}

/* The same without an input scale, from somewhere else. */
ALWAYS void hadamard_into(float *restrict to, const float *restrict x, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store(to + i, hadamard_lanes(load(x + i)));
    hadamard_vectors(to, width, LANES);
}

static void hadamard_head(float *restrict to, const float *restrict x, int64_t width) {
    if (width == 64) hadamard_into(to, x, 64);  /* known numbers become registers */
    else if (width == 128) hadamard_into(to, x, 128);
    else hadamard_into(to, x, width);
}
