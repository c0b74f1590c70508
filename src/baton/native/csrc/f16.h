/* Numbers of 16 bits (IEEE's binary16), as files and pools have them. A type of its own, of which nothing but its bits is known:
 * compilers before gcc 12 and clang 15 have no _Float16 on x86.
 *
 *   f32_of(half), to_f16(float)   to nearest, ties to even; what is not finite stays so
 */
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)

typedef struct { __fp16 number; } f16;

static inline float f32_of(f16 x) { return (float)x.number; }
static inline f16 to_f16(float x) { return (f16){(__fp16)x}; }

#elif defined(__F16C__)

#include <immintrin.h>

typedef struct { uint16_t bits; } f16;

static inline float f32_of(f16 x) { return _cvtsh_ss(x.bits); }
static inline f16 to_f16(float x) { return (f16){_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }

#else

typedef struct { uint16_t bits; } f16;

/* The exponent of what is left is put right by a multiplication: exact, numbers too small to be normal included. */
static inline float f32_of(f16 x) {
    union { uint32_t i; float f; } bits = {(uint32_t)(x.bits & 0x7fff) << 13}, sign = {(uint32_t)(x.bits & 0x8000) << 16};
    bits.f *= 0x1p112f;
    if (bits.f >= 0x1p16f) bits.i |= 0x7f800000;  /* infinity or NaN */
    bits.i |= sign.i;
    return bits.f;
}

static inline f16 to_f16(float x) {
    union { float f; uint32_t i; } bits = {x}, least;
    uint32_t sign = bits.i >> 16 & 0x8000, number = bits.i & 0x7fffffff;
    if (number > 0x7f800000) return (f16){(uint16_t)(sign | 0x7e00 | (number >> 13 & 0x3ff))};
    if (number >= 0x477ff000) return (f16){(uint16_t)(sign | 0x7c00)};  /* 65520: halfway above the largest */
    if (number < 0x38800000) {  /* below 2^-14: added to 0.5, the last bit counts 2^-24, and the sum is rounded there */
        bits.i = number, least.f = 0.5f, bits.f += least.f;
        return (f16){(uint16_t)(sign | (bits.i - least.i))};
    }
    number += 0xfff + (number >> 13 & 1);
    return (f16){(uint16_t)(sign | ((number >> 13) - (112 << 10)))};
}

#endif
