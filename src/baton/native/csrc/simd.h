/* Vectors of floats and of bytes, one spelling for every processor we know.
 *
 *   f32v      LANES float32 numbers                  fma_lanes(a, b, c) = a * b + c, rounded once where the processor can
 *   i32v      LANES int32 numbers
 *   i8v       4 * LANES int8 numbers, four to a lane
 *   dot_...   to every lane, the sum of four products of bytes
 *
 * Which of the two factors of a dot product may be negative differs: x86 multiplies unsigned by signed bytes. Weights are
 * therefore packed with an offset (WEIGHT8_OFFSET) that the products take back exactly, in integers; as_weights() puts it in.
 * load_exponents() reads a byte for each lane as the exponent of a power of two: 2^(byte - 127), and 0 for 0.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "f16.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Twice the numbers of four bits in MXFP4 (e2m1), so that they are whole. bytes_of_e2m1() adds E2M1_OFFSET where weights may not be
 * negative. */
static const int8_t E2M1_TWICE[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
#define E2M1_BYTES _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)

ALWAYS int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
ALWAYS int64_t max_int(int64_t a, int64_t b) { return a > b ? a : b; }
ALWAYS int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

/* ---- x86 with 512-bit vectors ---- */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define LANES 16
#define WEIGHT8_OFFSET 128
#define E2M1_OFFSET 12
#define TILE_ROWS 6    /* rows of activations whose sums stay in registers */
#define TILE_PARTS 2   /* vectors of outputs beside each other in a tile */
typedef __m512 f32v;
typedef __m512i i32v;
typedef __m512i i8v;
ALWAYS f32v fma_lanes(f32v a, f32v b, f32v c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS f32v broadcast(float x) { return _mm512_set1_ps(x); }
ALWAYS f32v load(const float *p) { return _mm512_loadu_ps(p); }
ALWAYS void store(float *p, f32v x) { _mm512_storeu_ps(p, x); }
ALWAYS f32v load_f16(const f16 *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
ALWAYS f32v as_floats(i32v x) { return _mm512_cvtepi32_ps(x); }
ALWAYS f32v max_lanes(f32v a, f32v b) { return _mm512_max_ps(a, b); }
ALWAYS f32v min_lanes(f32v a, f32v b) { return _mm512_min_ps(a, b); }
ALWAYS float max_of_lanes(f32v x) { return _mm512_reduce_max_ps(x); }
ALWAYS float sum_of_lanes(f32v x) { return _mm512_reduce_add_ps(x); }
ALWAYS i32v broadcast_int(int32_t x) { return _mm512_set1_epi32(x); }
ALWAYS i32v sum_of(i32v a, i32v b) { return _mm512_add_epi32(a, b); }
ALWAYS i32v times_64(i32v x) { return _mm512_slli_epi32(x, 6); }
ALWAYS i8v load_bytes(const uint8_t *p) { return _mm512_loadu_si512(p); }
ALWAYS i8v broadcast_word(const int8_t *p) { int32_t w; memcpy(&w, p, 4); return _mm512_set1_epi32(w); }
ALWAYS i8v as_weights(i8v x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
ALWAYS i8v low_nibbles(i8v x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
ALWAYS i8v high_nibbles(i8v x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
ALWAYS i8v bytes_of_e2m1(i8v nibbles) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(E2M1_BYTES), nibbles); }
ALWAYS f32v load_exponents(const uint8_t *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)), 23)); }
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) { return _mm512_dpbusd_epi32(sum, w, x); }
ALWAYS i32v dot_full(i32v sum, i8v w, i8v x) { return _mm512_dpbusd_epi32(sum, w, x); }

/* ---- x86 with 256-bit vectors ---- */
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#define E2M1_OFFSET 12
#define TILE_ROWS 3
#define TILE_PARTS 2
typedef __m256 f32v;
typedef __m256i i32v;
typedef __m256i i8v;
ALWAYS f32v fma_lanes(f32v a, f32v b, f32v c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS f32v broadcast(float x) { return _mm256_set1_ps(x); }
ALWAYS f32v load(const float *p) { return _mm256_loadu_ps(p); }
ALWAYS void store(float *p, f32v x) { _mm256_storeu_ps(p, x); }
ALWAYS f32v load_f16(const f16 *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
ALWAYS f32v as_floats(i32v x) { return _mm256_cvtepi32_ps(x); }
ALWAYS f32v max_lanes(f32v a, f32v b) { return _mm256_max_ps(a, b); }
ALWAYS f32v min_lanes(f32v a, f32v b) { return _mm256_min_ps(a, b); }
ALWAYS float max_of_lanes(f32v x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
ALWAYS float sum_of_lanes(f32v x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
ALWAYS i32v broadcast_int(int32_t x) { return _mm256_set1_epi32(x); }
ALWAYS i32v sum_of(i32v a, i32v b) { return _mm256_add_epi32(a, b); }
ALWAYS i32v times_64(i32v x) { return _mm256_slli_epi32(x, 6); }
ALWAYS i8v load_bytes(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
ALWAYS i8v broadcast_word(const int8_t *p) { int32_t w; memcpy(&w, p, 4); return _mm256_set1_epi32(w); }
ALWAYS i8v low_nibbles(i8v x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
ALWAYS i8v high_nibbles(i8v x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
ALWAYS i8v bytes_of_e2m1(i8v nibbles) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(E2M1_BYTES), nibbles); }
ALWAYS f32v load_exponents(const uint8_t *p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)), 23)); }
#if defined(__AVXVNNI__)
#define WEIGHT8_OFFSET 128
ALWAYS i8v as_weights(i8v x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
ALWAYS i32v dot_full(i32v sum, i8v w, i8v x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#else
#define WEIGHT8_OFFSET 0
ALWAYS i8v as_weights(i8v x) { return x; }
/* Pairs of products are added in 16 bits, with saturation: 2 * 24 * 127 never reaches it, nor does 2 * 127 * 127. */
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
ALWAYS i32v dot_full(i32v sum, i8v w, i8v x) { return dot_small(sum, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }
#endif

/* ---- ARM ---- */
#elif defined(__aarch64__)
#define LANES 4
#define WEIGHT8_OFFSET 0
#define E2M1_OFFSET 0
#define TILE_ROWS 4    /* of floats; quantised products have tiles of their own (matmul_neon.h) */
#define TILE_PARTS 4
#define ROWS_OUTSIDE 1 /* attention: 24 sums, 4 vectors of keys and one row's number at a time fit into 32 registers */
#define SCHED_FENCE __asm__ volatile("" ::)  /* gcc would fetch what is needed later, find no room, and keep sums in memory */
#define MEMORY_FENCE __asm__ volatile("" ::: "memory")  /* the same for loads: none of what follows is begun before */
typedef float32x4_t f32v;
typedef int32x4_t i32v;
typedef int8x16_t i8v;
ALWAYS f32v fma_lanes(f32v a, f32v b, f32v c) { return vfmaq_f32(c, a, b); }
ALWAYS f32v broadcast(float x) { return vdupq_n_f32(x); }
ALWAYS f32v load(const float *p) { return vld1q_f32(p); }
ALWAYS void store(float *p, f32v x) { vst1q_f32(p, x); }
ALWAYS f32v load_f16(const f16 *p) { return vcvt_f32_f16(vld1_f16(&p->number)); }
ALWAYS f32v as_floats(i32v x) { return vcvtq_f32_s32(x); }
ALWAYS f32v max_lanes(f32v a, f32v b) { return vmaxq_f32(a, b); }
ALWAYS f32v min_lanes(f32v a, f32v b) { return vminq_f32(a, b); }
ALWAYS float max_of_lanes(f32v x) { return vmaxvq_f32(x); }
ALWAYS float sum_of_lanes(f32v x) { return vaddvq_f32(x); }
ALWAYS i32v broadcast_int(int32_t x) { return vdupq_n_s32(x); }
ALWAYS i32v sum_of(i32v a, i32v b) { return vaddq_s32(a, b); }
ALWAYS i32v times_64(i32v x) { return vshlq_n_s32(x, 6); }
ALWAYS i8v load_bytes(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
ALWAYS i8v broadcast_word(const int8_t *p) { int32_t w; memcpy(&w, p, 4); return vreinterpretq_s8_s32(vdupq_n_s32(w)); }
ALWAYS i8v as_weights(i8v x) { return x; }
ALWAYS i8v low_nibbles(i8v x) { return vandq_s8(x, vdupq_n_s8(15)); }
ALWAYS i8v high_nibbles(i8v x) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x), 4)); }
ALWAYS i8v bytes_of_e2m1(i8v nibbles) { return vqtbl1q_s8(vld1q_s8(E2M1_TWICE), vreinterpretq_u8_s8(nibbles)); }
ALWAYS f32v load_exponents(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))), 23));
}
#if defined(__ARM_FEATURE_DOTPROD)
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) { return vdotq_s32(sum, w, x); }
#else
/* Pairs of products are added in 16 bits: 2 * 128 * 127 fits. */
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) {
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
}
#endif
ALWAYS i32v dot_full(i32v sum, i8v w, i8v x) { return dot_small(sum, w, x); }

/* ---- anything else: the compiler's own vectors ---- */
#else
#define LANES 4
#define WEIGHT8_OFFSET 0
#define E2M1_OFFSET 0
#define TILE_ROWS 2
#define TILE_PARTS 2
typedef float f32v __attribute__((vector_size(16)));
typedef int32_t i32v __attribute__((vector_size(16)));
typedef int8_t i8v __attribute__((vector_size(16)));
ALWAYS f32v fma_lanes(f32v a, f32v b, f32v c) { return a * b + c; }
ALWAYS f32v broadcast(float x) { return (f32v){x, x, x, x}; }
ALWAYS f32v load(const float *p) { f32v x; memcpy(&x, p, sizeof x); return x; }
ALWAYS void store(float *p, f32v x) { memcpy(p, &x, sizeof x); }
ALWAYS f32v load_f16(const f16 *p) { return (f32v){f32_of(p[0]), f32_of(p[1]), f32_of(p[2]), f32_of(p[3])}; }
ALWAYS f32v as_floats(i32v x) { return __builtin_convertvector(x, f32v); }
ALWAYS f32v max_lanes(f32v a, f32v b) {
    i32v first = a > b;  /* all bits or none: in C, ?: takes no vectors */
    return (f32v)((first & (i32v)a) | (~first & (i32v)b));
}
ALWAYS f32v min_lanes(f32v a, f32v b) { return -max_lanes(-a, -b); }
ALWAYS float max_of_lanes(f32v x) {
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
ALWAYS float sum_of_lanes(f32v x) { return (x[0] + x[2]) + (x[1] + x[3]); }
ALWAYS i32v broadcast_int(int32_t x) { return (i32v){x, x, x, x}; }
ALWAYS i32v sum_of(i32v a, i32v b) { return a + b; }
ALWAYS i32v times_64(i32v x) { return x * 64; }
ALWAYS i8v load_bytes(const uint8_t *p) { i8v x; memcpy(&x, p, sizeof x); return x; }
ALWAYS i8v broadcast_word(const int8_t *p) { int32_t w; memcpy(&w, p, 4); return (i8v)(i32v){w, w, w, w}; }
ALWAYS i8v as_weights(i8v x) { return x; }
ALWAYS i8v low_nibbles(i8v x) { return x & 15; }
ALWAYS i8v high_nibbles(i8v x) { return (x >> 4) & 15; }
ALWAYS i8v bytes_of_e2m1(i8v nibbles) {
    for (int i = 0; i < 16; i++) nibbles[i] = E2M1_TWICE[nibbles[i]];
    return nibbles;
}
ALWAYS f32v load_exponents(const uint8_t *p) { return (f32v)((i32v){p[0], p[1], p[2], p[3]} << 23); }
ALWAYS i32v dot_small(i32v sum, i8v w, i8v x) {
    for (int i = 0; i < 4; i++) {
        /* Bytes i, 4 + i, ... of both, widened in place: shifted to the top of their lane and back. */
        i32v a = ((i32v)w << (24 - 8 * i)) >> 24, b = ((i32v)x << (24 - 8 * i)) >> 24;
        sum += a * b;
    }
    return sum;
}
ALWAYS i32v dot_full(i32v sum, i8v w, i8v x) { return dot_small(sum, w, x); }
#endif

/* The same as fma_lanes() for single numbers. Said outright, with -ffp-contract=off: left to itself the compiler fuses in one
 * copy of a loop and not in the next, and a row's bits would depend on the tile that it was in. */
#if defined(__FMA__) || defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif

/* e^x for x <= 0; exactly 0 far below. Two units in the last place. Written so that loops over it become vectors. */
ALWAYS float exp_negative(float x) {
    float y = x < -87.0f ? -87.0f : x;
    float n = (y * 1.44269504089f + 12582912.0f) - 12582912.0f;
    float r = FMA(n, -0.693359375f, y);
    r = FMA(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = FMA(p, r, 1.3981999507e-3f);
    p = FMA(p, r, 8.3334519073e-3f);
    p = FMA(p, r, 4.1665795894e-2f);
    p = FMA(p, r, 1.6666665459e-1f);
    p = FMA(p, r, 5.0000001201e-1f);
    p = FMA(p, r * r, r) + 1.0f;
    union { int32_t i; float f; } power = {((int32_t)n + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.f;
}

/* y / (1 + e^-x). Beyond 87 nothing more is seen of the one or the other. */
#if LANES == 16
ALWAYS f32v gated_lanes(f32v y, f32v x) {
    f32v near = _mm512_min_ps(broadcast(87.0f), _mm512_max_ps(broadcast(-87.0f), x));
    f32v whole = _mm512_roundscale_ps(near * broadcast(-1.44269504089f), 0);
    f32v r = fma_lanes(whole, broadcast(2.12194440e-4f), _mm512_fmsub_ps(whole, broadcast(-0.693359375f), near));
    f32v p = fma_lanes(broadcast(8.29030629e-3f), r, broadcast(4.18979755e-2f));
    p = fma_lanes(p, r, broadcast(1.66676366e-1f));
    p = fma_lanes(p, r, broadcast(4.99991492e-1f));
    p = fma_lanes(p, r, broadcast(9.99999707e-1f));
    p = fma_lanes(p, r, broadcast(1.0f));
    return y / fma_lanes(p, _mm512_scalef_ps(broadcast(1.0f), whole), broadcast(1.0f));
}
#else
/* The same, bit by bit, where numbers are rounded once. */
ALWAYS float gated(float y, float x) {
    float near = x > 87.0f ? 87.0f : x < -87.0f ? -87.0f : x;
    float whole = (near * -1.44269504089f + 12582912.0f) - 12582912.0f;
    float r = FMA(whole, 2.12194440e-4f, FMA(whole, -0.693359375f, -near));
    float p = FMA(8.29030629e-3f, r, 4.18979755e-2f);
    p = FMA(p, r, 1.66676366e-1f);
    p = FMA(p, r, 4.99991492e-1f);
    p = FMA(p, r, 9.99999707e-1f);
    p = FMA(p, r, 1.0f);
    union { int32_t i; float f; } power = {((int32_t)whole + 127) << 23};
    return y / FMA(p, power.f, 1.0f);
}

#if defined(__aarch64__)
/* The same in vectors, where gcc makes none. The whole number is in the last bits of what it was rounded by: no conversion. */
ALWAYS f32v gated_lanes(f32v y, f32v x) {
    const f32v rounder = broadcast(12582912.0f);
    f32v near = vmaxq_f32(vminq_f32(x, broadcast(87.0f)), broadcast(-87.0f)), rounded = near * broadcast(-1.44269504089f) + rounder;
    f32v whole = rounded - rounder, r = fma_lanes(whole, broadcast(2.12194440e-4f), fma_lanes(whole, broadcast(-0.693359375f), -near));
    f32v p = fma_lanes(broadcast(8.29030629e-3f), r, broadcast(4.18979755e-2f));
    p = fma_lanes(p, r, broadcast(1.66676366e-1f));
    p = fma_lanes(p, r, broadcast(4.99991492e-1f));
    p = fma_lanes(p, r, broadcast(9.99999707e-1f));
    p = fma_lanes(p, r, broadcast(1.0f));
    f32v power = vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(rounded), 23), vdupq_n_s32(127 << 23)));
    return y / fma_lanes(p, power, broadcast(1.0f));
}
#else
ALWAYS f32v gated_lanes(f32v y, f32v x) {
    float lanes[LANES], above[LANES];
    store(lanes, x), store(above, y);
    for (int i = 0; i < LANES; i++) lanes[i] = gated(above[i], lanes[i]);
    return load(lanes);
}
#endif
#endif

ALWAYS f32v silu_lanes(f32v x) { return gated_lanes(x, x); }

/* GELU by its tangent: x (1 + tanh u) / 2 = x / (1 + e^-2u), and 2u = x (1.5957691 + 0.0713548 x x). */
ALWAYS f32v gelu_lanes(f32v x) { return gated_lanes(x, x * fma_lanes(x * x, broadcast(0.07135481283f), broadcast(1.59576912161f))); }
