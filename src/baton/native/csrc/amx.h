/* Intel's tiles (AMX): eight registers of up to 16 rows of 64 bytes, and how they are set up. Used by attention_bf16_amx.h and
 * matmul_q4_amx.h, which both do without if the compiler may not use them. */
#pragma once

#include "simd.h"

#define TILE_HEIGHT 16
#define AMX_STEP 64  /* bytes of a row that a tile holds */

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && LANES == 16
#define HAS_AMX 1

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

typedef enum {
    FOR_ATTENTION,  /* 0-3 sums, 4 queries, 5 keys, 6 weights, 7 values (attention_bf16_amx.h) */
    FOR_PRODUCTS,   /* 0-3 sums, 4 and 5 rows of activations, 6 and 7 weights (matmul_q4_amx.h) */
} TileUse;

static _Thread_local int64_t amx_is_for;  /* use and rows, as below; 0: not set up */

/* As many rows as there are: three rows of a decoded token are loaded and stored faster than sixteen. */
static void amx_for(TileUse use, int64_t rows) {
    int64_t wanted = (int64_t)use << 8 | rows;
    if (amx_is_for == wanted) return;
    amx_is_for = wanted;
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)rows, config.row_bytes[t] = 64;
    if (use == FOR_ATTENTION) config.rows[5] = TILE_HEIGHT, config.row_bytes[6] = 32, config.rows[7] = 8;
    else config.rows[6] = config.rows[7] = TILE_HEIGHT;
    __asm__ volatile("" : : "r"(&config) : "memory");  /* gcc 12 does not know that all of it is read */
    _tile_loadconfig(&config);
}

static void amx_end(void) {
    if (amx_is_for) _tile_release();
    amx_is_for = 0;
}

#else
#define HAS_AMX 0

static void amx_end(void) {}

#endif
