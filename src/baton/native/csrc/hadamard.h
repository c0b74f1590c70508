/* Mixing: every number of a row becomes a sum of all of them, with signs that differ from sum to sum.
 *
 * A row of activations has a few numbers that are a hundred times as large as the others. Rounded to bytes with one scale they
 * leave nothing of the rest. Mixed, they are spread over the row, and one scale will do. Mixing is a rotation (and a stretching):
 * where weights are mixed like activations, all products stay what they were but for a known factor. (Known as Hadamard
 * rotation: QuaRot, Ashkboos et al. 2024.)
 *
 *   sums and differences   of numbers 1, 2, 4, ... apart, as long as the width is a multiple of twice that: Walsh and Hadamard's
 *   reflections            of the odd factors of what is left, 3 or 5 or 7 numbers at a time: each minus 2/3 (2/5, 2/7) of their sum
 */
#pragma once

#include "simd.h"

#define REFLECTED_MOST 13   /* numbers: of more, a reflection hardly mixes anything */

/* Sums and differences within a vector. */
ALWAYS floats mixed_lanes(floats x) {
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
    x = fused(x, (floats){1, -1, 1, -1}, vrev64q_f32(x));
    return fused(x, (floats){1, 1, -1, -1}, vextq_f32(x, x, 2));
#else
    float a[4];
    store(a, x);
    float b[4] = {a[0] + a[1], a[0] - a[1], a[2] + a[3], a[2] - a[3]};
    float c[4] = {b[0] + b[2], b[1] + b[3], b[0] - b[2], b[1] - b[3]};
    return load(c);
#endif
}

/* Balanced, and mixed within the vector. */
ALWAYS floats first_mixed(const float *x, const float *balance) { return mixed_lanes(load(x) * load(balance)); }

/* Numbers `apart` and 2 * `apart` from each other. Where these are neighbouring vectors, it is the first that is done with a row. */
ALWAYS void mix_fours(const float *balance, float *x, int64_t width, int64_t apart) {
    for (int64_t at = 0; at < width; at += 4 * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            int64_t j = i + apart, k = j + apart, l = k + apart;
            floats a, b, c, d;
            if (balance) a = first_mixed(x + i, balance + i), b = first_mixed(x + j, balance + j);
            else a = load(x + i), b = load(x + j);
            if (balance) c = first_mixed(x + k, balance + k), d = first_mixed(x + l, balance + l);
            else c = load(x + k), d = load(x + l);
            floats ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
            store(x + i, ab + cd), store(x + j, a_b + c_d);
            store(x + k, ab - cd), store(x + l, a_b - c_d);
        }
}

ALWAYS void mix_twos(const float *balance, float *x, int64_t width, int64_t apart) {
    for (int64_t at = 0; at < width; at += 2 * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            floats a, b;
            if (balance) a = first_mixed(x + i, balance + i), b = first_mixed(x + i + apart, balance + i + apart);
            else a = load(x + i), b = load(x + i + apart);
            store(x + i, a + b), store(x + i + apart, a - b);
        }
}

ALWAYS void reflect(float *x, int64_t width, int64_t apart, const int64_t factor) {
    const floats share = spread(-2.0f / (float)factor);
    for (int64_t at = 0; at < width; at += factor * apart)
        for (int64_t i = at; i < at + apart; i += LANES) {
            floats sum = load(x + i);
            for (int64_t f = 1; f < factor; f++) sum = sum + load(x + i + f * apart);
            for (int64_t f = 0; f < factor; f++) store(x + i + f * apart, fused(sum, share, load(x + i + f * apart)));
        }
}

/* By how much a product of two mixed rows is larger: the highest power of two that divides the width. */
ALWAYS int64_t stretch(int64_t width) { return width & -width; }

/* Numbers that lie in different vectors: those that are nearer than `apart` to each other are mixed already. */
ALWAYS void mix_vectors(float *x, int64_t width, int64_t apart) {
    int64_t twos = stretch(width);
    for (; 4 * apart <= twos; apart *= 4) mix_fours(NULL, x, width, apart);
    if (2 * apart <= twos) mix_twos(NULL, x, width, apart), apart *= 2;
    int32_t odd = (int32_t)width >> __builtin_ctzll((uint64_t)twos);  /* what is left to be reflected, a factor at a time */
    for (int32_t factor = 3; factor <= REFLECTED_MOST && odd > 1; factor += 2)
        for (; odd % factor == 0; apart *= factor, odd /= factor) {
            if (factor == 3) reflect(x, width, apart, 3);  /* a known number becomes registers */
            else reflect(x, width, apart, factor);
        }
}

/* x * balance, mixed. `width`: a multiple of 32. */
static void mix_row(float *restrict x, const float *restrict balance, int64_t width) {
    int64_t fours = 4 * LANES <= stretch(width);
    if (fours) mix_fours(balance, x, width, LANES);
    else mix_twos(balance, x, width, LANES);
    mix_vectors(x, width, fours ? 4 * LANES : 2 * LANES);
}

/* The same without a balance, from somewhere else. */
ALWAYS void mix_into(float *restrict to, const float *restrict x, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) store(to + i, mixed_lanes(load(x + i)));
    mix_vectors(to, width, LANES);
}

static void mix_head(float *restrict to, const float *restrict x, int64_t width) {
    if (width == 64) mix_into(to, x, 64);  /* known numbers become registers */
    else if (width == 128) mix_into(to, x, 128);
    else mix_into(to, x, width);
}
