/* Rows of matrices as files store them: floats, or GGUF's blocks of 32 numbers with a scale and perhaps a minimum. */
#pragma once

#include "activations.h"

typedef enum { F32, INT8, INT4, INT4M } Kind;  /* stored: float32, Q8_0, Q4_0, Q4_1 */

static void floats_of_row(int kind, const uint8_t *row, int64_t width, float *restrict out) {
    if (kind == F32) {
        memcpy(out, row, (size_t)width * 4);
        return;
    }
    for (int64_t g = 0; g < width / GROUP; g++, out += GROUP) {
        half scale, minimum = 0;
        memcpy(&scale, row, 2), row += 2;
        if (kind == INT4M) memcpy(&minimum, row, 2), row += 2;
        if (kind == INT8) {
            for (int j = 0; j < GROUP; j++) out[j] = (float)scale * (float)((const int8_t *)row)[j];
            row += GROUP;
            continue;
        }
        float from = kind == INT4 ? -8.0f : 0.0f;
        for (int j = 0; j < GROUP / 2; j++, row++) {
            out[j] = (float)scale * ((float)(*row & 15) + from) + (float)minimum;
            out[j + GROUP / 2] = (float)scale * ((float)(*row >> 4) + from) + (float)minimum;
        }
    }
}
