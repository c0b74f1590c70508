/* Numbers as bytes, and as two digits to base 128: what attention_int8.h multiplies. And powers of two. */
#pragma once

#include "simd.h"
#if defined(__aarch64__)
#include "neon_dot.h"
#endif

#define BYTE_MOST 127.0f
#define WEIGHT_MOST_OF_ALL 16383.0f  /* 128 * 127 + 127: no weight is negative */
#if defined(__aarch64__)
#define DIGITS_AT_ONCE 16            /* weights: their four vectors stay in registers */
#else
#define DIGITS_AT_ONCE 64
#endif
#define SCALED_LEAST 1e-34f          /* the inverse of less would be infinite: such numbers are all zeros */
#define LOG2_E 1.44269504089f
#define LARGE_SCORE 1024.0f          /* below it half a unit in the last place is 2^-15, and 16383 * 2^(2^-15) rounds to 16383 */

/* Compared as integers: the bits of numbers that are not negative have the order of the numbers, a NaN is above them all, and so it
 * becomes the scale: what is not finite stays so. */
ALWAYS float largest_magnitude(const float *x, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        union { float f; int32_t i; } bits = {x[i]};
        bits.i &= 0x7fffffff;
        most = bits.i > most ? bits.i : most;
    }
    union { int32_t i; float f; } largest = {most};
    return largest.f;
}

ALWAYS float inverse_of(float largest, float most) { return largest > SCALED_LEAST ? most / largest : 0.0f; }

/* 2^x for x <= 0, to five parts in a million; below 2^-126 nothing at all: what is not seen has a score of -inf. Weights, which are
 * none of them negative, as two digits. */
#if LANES == 16

ALWAYS f32v exp2_lanes(f32v x) {
    __mmask16 some = _mm512_cmp_ps_mask(x, broadcast(-126.0f), _CMP_NLT_UQ);  /* NaN is kept */
    f32v r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  /* from the whole number below, as scalef takes it */
    f32v p = fma_lanes(broadcast(1.342668457e-2f), r, broadcast(5.224247357e-2f));
    p = fma_lanes(p, r, broadcast(2.412802052e-1f));
    p = fma_lanes(p, r, broadcast(6.930448448e-1f));
    return _mm512_maskz_scalef_ps(some, fma_lanes(p, r, broadcast(1.0f)), x);
}

/* x: 64 numbers. */
ALWAYS void store_digits(const f32v *x, int8_t *high, int8_t *low) {
    const i32v order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  /* packing goes by quarters */
    i32v early = _mm512_packus_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    i32v late = _mm512_packus_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3])), mask = _mm512_set1_epi16(127);
    i32v highs = _mm512_packus_epi16(_mm512_srli_epi16(early, 7), _mm512_srli_epi16(late, 7));
    i32v lows = _mm512_packus_epi16(_mm512_and_si512(early, mask), _mm512_and_si512(late, mask));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, highs));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, lows));
}

#else

ALWAYS float exp2_short(float x) {
    float y = x < -126.0f ? -126.0f : x;
    float n = (y + 12582912.0f) - 12582912.0f, r = y - n;
    float p = FMA(9.6149742603302e-3f, r, 5.5967118591070e-2f);
    p = FMA(p, r, 2.4023555219173e-1f);
    p = FMA(p, r, 6.9311290979385e-1f);
    p = FMA(p, r, 1.0f);
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return x < -126.0f ? 0.0f : p * power.f;
}

#if defined(__aarch64__)  /* the same, bit by bit: gcc makes no vectors of the loops below */

#define ROUNDER 12582912.0f  /* 1.5 * 2^23: what is added to it is rounded to a whole number, and that is in the last bits of the sum */

ALWAYS f32v exp2_lanes(f32v x) {
    uint32x4_t nothing = vcltq_f32(x, broadcast(-126.0f));
    f32v y = vbslq_f32(nothing, broadcast(-126.0f), x);
    f32v n = (y + broadcast(ROUNDER)) - broadcast(ROUNDER), r = y - n;
    f32v p = fma_lanes(broadcast(9.6149742603302e-3f), r, broadcast(5.5967118591070e-2f));
    p = fma_lanes(p, r, broadcast(2.4023555219173e-1f));
    p = fma_lanes(p, r, broadcast(6.9311290979385e-1f));
    p = fma_lanes(p, r, broadcast(1.0f));
    f32v power = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(p * power), nothing));
}

/* The same for weights, of which less than 2^-126 adds nothing to anything: it may become less than that instead of zero, and a NaN
 * any number (first_total). Without comparisons and conversions, which a Neoverse-N1 has one slow pipe for:
 * n is added to the exponent. */
ALWAYS f32v exp2_of_weight(f32v x) {
    static const float factors[4][LANES] = {{5.5967118591070e-2f, 5.5967118591070e-2f, 5.5967118591070e-2f, 5.5967118591070e-2f},
                                            {2.4023555219173e-1f, 2.4023555219173e-1f, 2.4023555219173e-1f, 2.4023555219173e-1f},
                                            {6.9311290979385e-1f, 6.9311290979385e-1f, 6.9311290979385e-1f, 6.9311290979385e-1f},
                                            {1.0f, 1.0f, 1.0f, 1.0f}};
    f32v y = vmaxq_f32(x, broadcast(-127.0f)), rounded = y + broadcast(ROUNDER), r = y - (rounded - broadcast(ROUNDER));
    f32v p = fma_lanes(broadcast(9.6149742603302e-3f), r, loaded_again(factors[0]));
    p = fma_lanes(p, r, loaded_again(factors[1]));
    p = fma_lanes(p, r, loaded_again(factors[2]));
    p = fma_lanes(p, r, loaded_again(factors[3]));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23)));
}

/* x: 16 numbers. */
ALWAYS void store_digits(const f32v *x, int8_t *high, int8_t *low) {
    int16x8_t whole[2];
    for (int i = 0; i < 2; i++)
        whole[i] = vuzp1q_s16(vreinterpretq_s16_f32(x[2 * i] + broadcast(ROUNDER)), vreinterpretq_s16_f32(x[2 * i + 1] + broadcast(ROUNDER)));
    vst1q_s8(high, vshrn_high_n_s16(vshrn_n_s16(whole[0], 7), whole[1], 7));
    vst1q_s8(low, vandq_s8(vuzp1q_s8(vreinterpretq_s8_s16(whole[0]), vreinterpretq_s8_s16(whole[1])), vdupq_n_s8(127)));
}

#else

ALWAYS f32v exp2_lanes(f32v x) {
    float lanes[LANES];
    store(lanes, x);
    for (int j = 0; j < LANES; j++) lanes[j] = exp2_short(lanes[j]);
    return load(lanes);
}

ALWAYS void store_digits(const f32v *x, int8_t *high, int8_t *low) {
    float numbers[DIGITS_AT_ONCE];
    for (int i = 0; i < DIGITS_AT_ONCE / LANES; i++) store(numbers + i * LANES, x[i]);
    for (int j = 0; j < DIGITS_AT_ONCE; j++) {
        int32_t whole = (int32_t)rintf(numbers[j]);
        high[j] = (int8_t)(whole >> 7), low[j] = (int8_t)(whole & 127);
    }
}

#endif
#endif

/* First value of a row's sum of weights: zero; NaN where its largest score or its scale is not finite. */
#if defined(__aarch64__)
ALWAYS float first_total(float top, float scale) { return (top - top) + (scale - scale); }
#else
ALWAYS f32v exp2_of_weight(f32v x) { return exp2_lanes(x); }
ALWAYS float first_total(float top, float scale) { return (void)top, (void)scale, 0.0f; }  /* exp2_lanes() keeps NaN */
#endif

/* The number to add to score * scale for an exponent that is not above zero: -top * scale, where that is small. It is rounded,
 * and in one multiply-add what rounding took away comes back: of a large score so much that the likeliest token would weigh more
 * than 1, and its weight need a third digit. So large scores are taken against the top first, which is exact where it matters. */
ALWAYS float below_top(float *restrict scores, int64_t width, float top, float scale) {
    float lowered = top * -scale;
    if (fabsf(lowered) < LARGE_SCORE) return lowered;
    for (int64_t t = 0; t < width; t += LANES) store(scores + t, load(scores + t) - broadcast(top));
    return 0.0f;
}

ALWAYS f32v of_digits(f32v high, f32v low) { return fma_lanes(high, broadcast(128.0f), low); }  /* both are exact */
