/* Rows of matrices as files store them: floats, or GGUF's blocks of 32 numbers with a scale and perhaps a minimum. */
#pragma once

#include "activations.h"

typedef enum { F32, INT8, INT4, INT4M } Kind;  /* stored: float32, Q8_0, Q4_0, Q4_1 */

ALWAYS half half_at(const uint8_t *place) {
    half x;
    memcpy(&x, place, 2);
    return x;
}

static void floats_of_row(int kind, const uint8_t *row, int64_t width, float *restrict out) {
    if (kind == F32) {
        memcpy(out, row, (size_t)width * 4);
        return;
    }
    for (int64_t g = 0; g < width / GROUP; g++, out += GROUP) {
        float scale = float_of(half_at(row)), minimum = kind == INT4M ? float_of(half_at(row + 2)) : 0.0f;
        row += kind == INT4M ? 4 : 2;
        if (kind == INT8) {
            for (int j = 0; j < GROUP; j++) out[j] = scale * (float)((const int8_t *)row)[j];
            row += GROUP;
            continue;
        }
        float from = kind == INT4 ? -8.0f : 0.0f;
        for (int j = 0; j < GROUP / 2; j++, row++) {
            out[j] = scale * ((float)(*row & 15) + from) + minimum;
            out[j + GROUP / 2] = scale * ((float)(*row >> 4) + from) + minimum;
        }
    }
}
