/* Dot products of bytes on ARM, as its tiles want them: out of a lane, into sums that become floats without a conversion. */
#pragma once

#include "simd.h"

/* Arrays of sums become registers only where every loop over them is gone. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The four bytes of each lane times bytes 4 * word to 4 * word + 3 of x. The lane has to be written as a number. */
ALWAYS i32v dot_word(i32v sum, i8v w, i8v x, const int word) {
#if defined(__ARM_FEATURE_DOTPROD)
#define DOT_WORD(n) case n: return vdotq_laneq_s32(sum, w, x, n);
#else
#define DOT_WORD(n) case n: return dot_small(sum, w, vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), n)));
#endif
    switch (word) { DOT_WORD(0) DOT_WORD(1) DOT_WORD(2) DOT_WORD(3) }
#undef DOT_WORD
    return sum;
}

/* Two vectors by one instruction. */
ALWAYS void load_two(const uint8_t *p, i8v out[2]) {
    int8x16x2_t two = vld1q_s8_x2((const int8_t *)p);
    out[0] = two.val[0], out[1] = two.val[1];
}

/* A sum that began here has, read as a float, the value 1.5 * 2^23 + sum, as long as its magnitude stays below 2^22. Taking the
 * former away is exact. (A conversion takes four times as long on a Neoverse-N1.) */
#define SUM_START 0x4b400000
#define SUM_MAGNITUDE_MAX (1 << 22)

ALWAYS i32v sum_start(void) { return vdupq_n_s32(SUM_START); }
ALWAYS f32v float_of_sum(i32v sum) { return vreinterpretq_f32_s32(sum) - broadcast(12582912.0f); }

/* A multiply-add overwrites what it adds to. What it begins with is better loaded again than copied: loads have pipes of their own. */
ALWAYS f32v loaded_again(const float *p) {
    f32v x;
    __asm__ volatile("ld1 {%0.4s}, %1" : "=w"(x) : "Q"(*(const f32v *)(const void *)p));
    return x;
}

static const float SUM_STARTS[LANES] = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};

ALWAYS i32v loaded_start(void) { return vreinterpretq_s32_f32(loaded_again(SUM_STARTS)); }

/* The same for a sum that is multiplied by 64 on its way: SUM_START / 64. */
static const int32_t SUM_PARTS[LANES] = {SUM_START / 64, SUM_START / 64, SUM_START / 64, SUM_START / 64};

ALWAYS i32v loaded_part(void) { return vreinterpretq_s32_f32(loaded_again((const float *)(const void *)SUM_PARTS)); }

/* a * b[lane], and that added to c in one rounding. */
ALWAYS f32v of_lane(f32v a, f32v b, const int lane) {
    switch (lane) {
        case 0: return vmulq_laneq_f32(a, b, 0);
        case 1: return vmulq_laneq_f32(a, b, 1);
        case 2: return vmulq_laneq_f32(a, b, 2);
        default: return vmulq_laneq_f32(a, b, 3);
    }
}
ALWAYS f32v fma_lane(f32v a, f32v b, const int lane, f32v c) {
    switch (lane) {
        case 0: return vfmaq_laneq_f32(c, a, b, 0);
        case 1: return vfmaq_laneq_f32(c, a, b, 1);
        case 2: return vfmaq_laneq_f32(c, a, b, 2);
        default: return vfmaq_laneq_f32(c, a, b, 3);
    }
}
