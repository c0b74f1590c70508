/* Intel's tiles (AMX): eight registers of up to 16 rows of 64 bytes, and how they are set up. Kernels in
 * *_amx.h use them; others do without if the compiler may not use them. */
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

static _Thread_local int64_t amx_is_for;  /* rows, as below; 0: not set up */

/* Tiles 0 to 3 are sums, 4 and 5 rows of activations, 6 and 7 weights. As many rows as there are: three rows of a decoded token are
 * loaded and stored faster than sixteen. */
static void amx_for(int64_t rows) {
    if (amx_is_for == rows) return;
    amx_is_for = rows;
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.rows[t] = (uint8_t)rows, config.row_bytes[t] = 64;
    config.rows[6] = config.rows[7] = TILE_HEIGHT;
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
