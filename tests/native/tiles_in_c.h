/* Intel's tiles (AMX) in plain C: what is written for them runs on any processor with AVX-512 and VNNI, slowly. Forced in front of
 * the library's source (-include), it answers to the names of the instructions. */
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#define __AVX512BF16__ 1

/* No permission is needed: this one always answers 0. */
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

typedef struct { int rows, row_bytes; uint8_t data[16][64]; } SoftTile;

static _Thread_local SoftTile soft_tiles[8];

static inline void soft_config(const void *config) {
    const uint8_t *i8v = config;
    for (int t = 0; t < 8; t++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, i8v + 16 + 2 * t, 2);
        soft_tiles[t] = (SoftTile){.rows = i8v[48 + t], .row_bytes = row_bytes};
    }
}

static inline void soft_load(int t, const void *from, int64_t stride) {
    SoftTile *tile = &soft_tiles[t];
    memset(tile->data, 0, sizeof tile->data);
    for (int r = 0; r < tile->rows; r++) memcpy(tile->data[r], (const uint8_t *)from + r * stride, (size_t)tile->row_bytes);
}

static inline void soft_store(int t, void *to, int64_t stride) {
    const SoftTile *tile = &soft_tiles[t];
    for (int r = 0; r < tile->rows; r++) memcpy((uint8_t *)to + r * stride, tile->data[r], (size_t)tile->row_bytes);
}

static inline void soft_bytes(int to, int a, int b, int b_signed) {
    SoftTile *sum = &soft_tiles[to];
    const SoftTile *x = &soft_tiles[a], *y = &soft_tiles[b];
    for (int m = 0; m < sum->rows; m++)
        for (int n = 0; n < sum->row_bytes / 4; n++) {
            int32_t total;
            memcpy(&total, &sum->data[m][4 * n], 4);
            for (int k = 0; k < x->row_bytes; k++) {
                uint8_t right = y->data[k / 4][4 * n + k % 4];
                total += (int8_t)x->data[m][k] * (b_signed ? (int8_t)right : (int32_t)right);
            }
            memcpy(&sum->data[m][4 * n], &total, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(config) soft_config(config)
#define _tile_release() memset(soft_tiles, 0, sizeof soft_tiles)
#define _tile_zero(t) memset(soft_tiles[t].data, 0, sizeof soft_tiles[t].data)
#define _tile_loadd(t, from, stride) soft_load(t, from, stride)
#define _tile_stored(t, to, stride) soft_store(t, to, stride)
#define _tile_dpbssd(to, a, b) soft_bytes(to, a, b, 1)
#define _tile_dpbsud(to, a, b) soft_bytes(to, a, b, 0)
