/* Rows of tensors as files store them: floats, or GGUF's blocks with their scales. models/dequantise.py draws the layouts, and is the
 * definition: what comes out here are its bits.
 */
#pragma once

#include "quantize_rows.h"

/* Formats of a stored row. Matrices are of the first four kinds (float32, Q8_0, Q4_0, Q4_1) or MXFP4. */
typedef enum { F32, Q8_0, Q4_0, Q4_1, F16, BF16, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4 } Kind;

/* Weights of eight bits are never multiplied as they are stored: both sides are rotated first (matmul_int8.h). */
enum { ROTATED_INT8 = Q8_0 };

/* But for the output head of a model of four bits, which keeps the file's groups of 32 and their scales (matmul_q4.h). */
enum { GROUPED_INT8 = MXFP4 + 1 };

#define SUPER 256          /* numbers of a block of K-quants */
#define Q4_K_BYTES 144
#define Q4_1_BYTES 20
#define Q8_0_BYTES 34
#define MXFP4_BYTES 17

ALWAYS f16 f16_at(const uint8_t *place) {
    f16 x;
    memcpy(&x, place, 2);
    return x;
}

/* ---- one block each: its numbers to `out`; returns the next block ---- */

static const uint8_t *floats_of_q8_0(const uint8_t *block, float *restrict out) {
    float scale = f32_of(f16_at(block));
    const int8_t *numbers = (const int8_t *)block + 2;
    for (int j = 0; j < GROUP; j++) out[j] = scale * (float)numbers[j];
    return block + 2 + GROUP;
}

/* Q4_0 and Q4_1, and with a fifth bit in `high` Q5_0 and Q5_1. A minimum of -0 changes no number. */
ALWAYS void floats_of_nibbles(const uint8_t *numbers, uint32_t high, float from, float scale, float minimum, float *restrict out) {
    for (int j = 0; j < GROUP / 2; j++) {
        uint32_t low = numbers[j] & 15u, later = numbers[j] >> 4;
        out[j] = scale * ((float)(int32_t)(low | (high >> j & 1) << 4) + from) + minimum;
        out[j + GROUP / 2] = scale * ((float)(int32_t)(later | (high >> (j + 16) & 1) << 4) + from) + minimum;
    }
}

ALWAYS uint32_t word_at(const uint8_t *place) {
    return (uint32_t)place[0] | (uint32_t)place[1] << 8 | (uint32_t)place[2] << 16 | (uint32_t)place[3] << 24;
}

static const uint8_t *floats_of_small_block(int kind, const uint8_t *block, float *restrict out) {
    int has_minimum = kind == Q4_1 || kind == Q5_1, has_fifth = kind == Q5_0 || kind == Q5_1;
    float scale = f32_of(f16_at(block)), minimum = has_minimum ? f32_of(f16_at(block + 2)) : -0.0f;
    block += has_minimum ? 4 : 2;
    uint32_t high = has_fifth ? word_at(block) : 0;
    block += has_fifth ? 4 : 0;
    floats_of_nibbles(block, high, kind == Q4_0 ? -8.0f : kind == Q5_0 ? -16.0f : 0.0f, scale, minimum, out);
    return block + GROUP / 2;
}

/* Twelve bytes hold a scale and a minimum of six bits for each of 8 groups. */
ALWAYS void k_scales(const uint8_t *block, float scales[8], float minima[8]) {
    float d = f32_of(f16_at(block)), m = f32_of(f16_at(block + 2));
    const uint8_t *s = block + 4;
    for (int g = 0; g < 4; g++) {
        scales[g] = (float)(s[g] & 63) * d, minima[g] = (float)(s[g + 4] & 63) * m;
        scales[g + 4] = (float)((s[g + 8] & 15) | s[g] >> 6 << 4) * d, minima[g + 4] = (float)(s[g + 8] >> 4 | s[g + 4] >> 6 << 4) * m;
    }
}

/* Q4_K, and with a fifth bit Q5_K. 32 bytes hold two groups: one in the low nibbles, the next in the high ones. */
ALWAYS void floats_of_k_groups(const uint8_t *block, const uint8_t *numbers, const uint8_t *high, float *restrict out) {
    float scales[8], minima[8];
    k_scales(block, scales, minima);
    for (int g = 0; g < 8; g++, out += GROUP) {
        const uint8_t *pair = numbers + g / 2 * GROUP;
        int shift = g % 2 * 4;
        for (int j = 0; j < GROUP; j++) {
            int32_t number = pair[j] >> shift & 15;
            if (high) number |= (high[j] >> g & 1) << 4;
            out[j] = (float)number * scales[g] - minima[g];
        }
    }
}

static const uint8_t *floats_of_q4_k(const uint8_t *block, float *restrict out) {
    floats_of_k_groups(block, block + 16, NULL, out);
    return block + Q4_K_BYTES;
}

static const uint8_t *floats_of_q5_k(const uint8_t *block, float *restrict out) {
    floats_of_k_groups(block, block + 48, block + 16, out);
    return block + 176;
}

/* Both halves of a block are alike: 64 bytes of low nibbles and 32 of upper bits make 128 numbers, in four runs of 32. */
static const uint8_t *floats_of_q6_k(const uint8_t *block, float *restrict out) {
    const int8_t *scales = (const int8_t *)block + 192;
    float d = f32_of(f16_at(block + 208));
    for (int h = 0; h < 2; h++)
        for (int run = 0; run < 4; run++, out += GROUP) {
            const uint8_t *low = block + h * 64 + run % 2 * GROUP, *high = block + 128 + h * GROUP;
            float first = (float)scales[h * 8 + run * 2] * d, second = (float)scales[h * 8 + run * 2 + 1] * d;
            for (int j = 0; j < GROUP; j++) {
                int32_t number = (low[j] >> run / 2 * 4 & 15) | (high[j] >> run * 2 & 3) << 4;
                out[j] = (float)(number - 32) * (j < GROUP / 2 ? first : second);
            }
        }
    return block + 210;
}

/* Half the scale of a block, whose numbers are doubled (simd.h): a power of two with the block's first byte as exponent. The two least ones
 * are below the normal floats. */
ALWAYS float mxfp4_scale(uint8_t exponent) {
    union { uint32_t i; float f; } bits = {exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23};
    return bits.f;
}

/* Nibble 8 is minus zero. */
ALWAYS float doubled_e2m1(int nibble) { return nibble == 8 ? -0.0f : (float)E2M1_TWICE[nibble]; }

static const uint8_t *floats_of_mxfp4(const uint8_t *block, float *restrict out) {
    float scale = mxfp4_scale(block[0]);
    for (int j = 0; j < GROUP / 2; j++) {
        out[j] = doubled_e2m1(block[1 + j] & 15) * scale;
        out[j + GROUP / 2] = doubled_e2m1(block[1 + j] >> 4) * scale;
    }
    return block + MXFP4_BYTES;
}

/* ---- a row ---- */

static void floats_of_f16(const uint8_t *row, int64_t width, float *restrict out) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        f16 some[LANES];  /* they may lie at any byte */
        memcpy(some, row + i * 2, sizeof some);
        store(out + i, load_f16(some));
    }
    for (; i < width; i++) out[i] = f32_of(f16_at(row + i * 2));
}

static void floats_of_bf16(const uint8_t *row, int64_t width, float *restrict out) {
    for (int64_t i = 0; i < width; i++) {
        uint16_t bits;
        memcpy(&bits, row + i * 2, 2);
        uint32_t whole = (uint32_t)bits << 16;
        memcpy(out + i, &whole, 4);
    }
}

static void floats_of_row(int kind, const uint8_t *row, int64_t width, float *restrict out) {
    const float *end = out + width;
    switch (kind) {
        case F32: memcpy(out, row, (size_t)width * 4); break;
        case F16: floats_of_f16(row, width, out); break;
        case BF16: floats_of_bf16(row, width, out); break;
        case Q8_0: for (; out < end; out += GROUP) row = floats_of_q8_0(row, out); break;
        case Q4_0: for (; out < end; out += GROUP) row = floats_of_small_block(Q4_0, row, out); break;
        case Q4_1: for (; out < end; out += GROUP) row = floats_of_small_block(Q4_1, row, out); break;
        case Q5_0: for (; out < end; out += GROUP) row = floats_of_small_block(Q5_0, row, out); break;
        case Q5_1: for (; out < end; out += GROUP) row = floats_of_small_block(Q5_1, row, out); break;
        case Q4_K: for (; out < end; out += SUPER) row = floats_of_q4_k(row, out); break;
        case Q5_K: for (; out < end; out += SUPER) row = floats_of_q5_k(row, out); break;
        case Q6_K: for (; out < end; out += SUPER) row = floats_of_q6_k(row, out); break;
        case MXFP4: for (; out < end; out += GROUP) row = floats_of_mxfp4(row, out); break;
    }
}

/* ---- a row as Q4_1 (models/quantise.py is the definition) ---- */

/* The numbers stay what they are; a group's scale and minimum become halves of their own. */
static void q4_1_of_q4_k(const uint8_t *restrict row, int64_t width, uint8_t *restrict out) {
    for (int64_t at = 0; at < width; at += SUPER, row += Q4_K_BYTES) {
        float scales[8], minima[8];
        k_scales(row, scales, minima);
        for (int g = 0; g < 8; g++, out += Q4_1_BYTES) {
            const uint8_t *numbers = row + 16 + g / 2 * GROUP;
            f16 scale = to_f16(scales[g]), minimum = to_f16(-minima[g]);
            memcpy(out, &scale, 2), memcpy(out + 2, &minimum, 2);
            if (g % 2)
                for (int j = 0; j < GROUP / 2; j++) out[4 + j] = (uint8_t)(numbers[j] >> 4 | (numbers[j + 16] & 0xf0));
            else
                for (int j = 0; j < GROUP / 2; j++) out[4 + j] = (uint8_t)((numbers[j] & 15) | numbers[j + 16] << 4);
        }
    }
}

#define SHRINKS 4

/* A range that is a little too small is often better: few numbers are cut, all others are rounded more finely. The errors of all ranges are
 * summed up side by side: each sum is a chain whose order is fixed. */
static void q4_1_of_group(const float *restrict x, uint8_t *restrict out) {
    static const float cuts[SHRINKS] = {0.0f, 0.01f, 0.02f, 0.03f};
    float low[GROUP], high[GROUP], q[SHRINKS][GROUP], squares[SHRINKS][GROUP], errors[SHRINKS] = {0};
    f16 scales[SHRINKS], minima[SHRINKS];
    memcpy(low, x, sizeof low), memcpy(high, x, sizeof high);
    for (int half = GROUP / 2; half; half /= 2)
        for (int j = 0; j < half; j++) {
            low[j] = low[j + half] < low[j] ? low[j + half] : low[j];
            high[j] = high[j + half] > high[j] ? high[j + half] : high[j];
        }
    float least = low[0], most = high[0];
    for (int s = 0; s < SHRINKS; s++) {
        float cut = (most - least) * cuts[s];
        scales[s] = to_f16((most - least - 2.0f * cut) / 15.0f), minima[s] = to_f16(least + cut);
        float d = f32_of(scales[s]), m = f32_of(minima[s]), divisor = d == 0.0f ? INFINITY : d;
        for (int j = 0; j < GROUP; j++) {
            float number = rintf((x[j] - m) / divisor);
            q[s][j] = number < 0.0f ? 0.0f : number > 15.0f ? 15.0f : number;
        }
        for (int j = 0; j < GROUP; j++) {
            float off = q[s][j] * d + m - x[j];
            squares[s][j] = off * off;
        }
    }
    for (int j = 0; j < GROUP; j++)
        for (int s = 0; s < SHRINKS; s++) errors[s] += squares[s][j];
    int best = -1;
    for (int s = 0; s < SHRINKS; s++)
        if (errors[s] < (best < 0 ? INFINITY : errors[best])) best = s;
    memset(out, 0, Q4_1_BYTES);
    if (best < 0) return;  /* not all of them are finite */
    memcpy(out, &scales[best], 2), memcpy(out + 2, &minima[best], 2);
    for (int j = 0; j < GROUP / 2; j++) out[4 + j] = (uint8_t)((int)q[best][j] | (int)q[best][j + GROUP / 2] << 4);
}

static void q4_1_of_floats(const float *x, int64_t width, uint8_t *out) {
    for (int64_t at = 0; at < width; at += GROUP, out += Q4_1_BYTES) q4_1_of_group(x + at, out);
}

/* As models/quantise.py makes Q8_0: the scale is rounded to a half first, and numbers against that. */
static void q8_0_of_floats(const float *x, int64_t width, uint8_t *out) {
    for (int64_t at = 0; at < width; at += GROUP, x += GROUP, out += Q8_0_BYTES) {
        f16 half = to_f16(largest_of(x, GROUP) / 127.0f);
        float scale = f32_of(half), divisor = scale == 0.0f ? INFINITY : scale;
        memcpy(out, &half, 2);
        for (int j = 0; j < GROUP; j++) {
            float number = rintf(x[j] / divisor);
            out[2 + j] = (uint8_t)(int8_t)(number > -127.0f ? number < 127.0f ? number : 127.0f : -127.0f);
        }
    }
}
