/* Products of many rows on Intel's tiles: 16 rows times 16 outputs times one group in a single instruction.
 *
 * The integers are the same as those of the vectors, and so are the sums over groups: bit for bit, whether a row went
 * through here or not.
 */
#pragma once

#define AMX_ROWS 16     /* of a tile; buffers of rows have room for whole tiles */
#define AMX_ROWS_MIN 4  /* fewer are faster with vectors */

#if defined(__AMX_INT8__) && defined(__AVX512F__)

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

#define AHEAD 4  /* groups whose products are on their way while those before them are scaled and added */

/* Tile registers: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights. */

static void amx_begin(void) {
    TileConfig config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.rows[t] = t >= 6 ? FOURS : AMX_ROWS;
        config.row_bytes[t] = t == 4 || t == 5 ? GROUP : 64;
    }
    _tile_loadconfig(&config);
}

static void amx_end(void) { _tile_release(); }

/* The cell as signed bytes, the 16 outputs of each half by themselves: [2][group][8 fours][16 outputs][4]. */
static void amx_unpack(const Matrix *m, const uint8_t *packed, uint8_t *out) {
    const __m512i flip = _mm512_set1_epi8(-128), eight = _mm512_set1_epi8(8), low_bits = _mm512_set1_epi8(15);
    int64_t half_bytes = m->groups * FOURS * 64;
    for (int64_t g = 0; g < m->groups; g++)
        for (int f = 0; f < (m->kind == INT8 ? FOURS : FOURS / 2); f++)
            for (int h = 0; h < 2; h++, packed += 64) {
                uint8_t *to = out + h * half_bytes + (g * FOURS + f) * 64;
                __m512i x = _mm512_loadu_si512(packed);
                if (m->kind == INT8) {
                    _mm512_store_si512(to, _mm512_xor_si512(x, flip));
                    continue;
                }
                __m512i low = _mm512_and_si512(x, low_bits), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), low_bits);
                if (m->kind == INT4) low = _mm512_sub_epi8(low, eight), high = _mm512_sub_epi8(high, eight);
                _mm512_store_si512(to, low);
                _mm512_store_si512(to + FOURS / 2 * 64, high);
            }
}

typedef int32_t Sums[AMX_ROWS][16];

/* Products of up to AHEAD groups. Nothing here waits for anything else here. */
ALWAYS void amx_products(int64_t groups, const int8_t *q, int64_t width, const uint8_t *w, Sums *out) {
#define ONE(i, rows, weights)                                 \
    if (i < groups) {                                         \
        _tile_loadd(rows, q + i * GROUP, width);              \
        _tile_loadd(weights, w + i * FOURS * 64, 64);         \
        _tile_zero(i);                                        \
        _tile_dpbssd(i, rows, weights);                       \
        _tile_stored(i, out[i], 64);                          \
    }
    ONE(0, 4, 6) ONE(1, 5, 7) ONE(2, 4, 6) ONE(3, 5, 7)
#undef ONE
}

/* `rows` rows times one half of a cell. The tiles always hold AMX_ROWS rows: those beyond are multiplied and forgotten. */
ALWAYS void amx_tile(const int rows, const int kind, const Matrix *m, const uint8_t *w, const half *scales,
                     const half *minima, const Rows *x, int64_t first, float (*out)[CELL], int at) {
    _Alignas(64) Sums sums[2][AHEAD];
    __m512 total[AMX_ROWS];
    const int8_t *q = x->quantised + first * x->width;
    const float *row_scales = x->scales + first, *row_sums = x->scaled_sums + first;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    amx_products(m->groups, q, x->width, w, sums[0]);
    for (int64_t begin = 0; begin < m->groups; begin += AHEAD) {
        int64_t next = begin + AHEAD, end = smaller(next, m->groups);
        amx_products(m->groups - next, q + next * GROUP, x->width, w + next * FOURS * 64, sums[next / AHEAD & 1]);
        for (int64_t g = begin; g < end; g++, row_scales += x->stride, row_sums += x->stride) {
            Sums *of = &sums[begin / AHEAD & 1][g - begin];
            __m512 scale = load_half(scales + g * CELL), minimum = _mm512_setzero_ps();
            if (kind == INT4M) minimum = load_half(minima + g * CELL);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512((*of)[r]));
                total[r] = fused(whole, scale * spread(row_scales[r]), total[r]);
                if (kind == INT4M) total[r] = fused(minimum, spread(row_sums[r]), total[r]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(&out[r][at], total[r]);
}

#define AMX_TILE(name, kind)                                                                                               \
    static void name(int64_t rows, const Matrix *m, const uint8_t *w, const half *s, const half *n, const Rows *x,         \
                     int64_t first, float (*out)[CELL], int at) {                                                          \
        if (rows > 12) amx_tile(16, kind, m, w, s, n, x, first, out, at);                                                  \
        else if (rows > 8) amx_tile(12, kind, m, w, s, n, x, first, out, at);                                              \
        else if (rows > 4) amx_tile(8, kind, m, w, s, n, x, first, out, at);                                               \
        else amx_tile(4, kind, m, w, s, n, x, first, out, at);                                                             \
    }

AMX_TILE(amx_tile_plain, INT8)  /* and INT4, whose offset is gone by now */
AMX_TILE(amx_tile_minima, INT4M)

/* All rows, but for a few that are cheaper without: returns the first that is left. */
static int64_t amx_cell_times_rows(const Matrix *m, int64_t cell, const uint8_t *packed, const Rows *x, int64_t first,
                                   int64_t end, uint8_t *scratch, const Out *out) {
    if (end - first < AMX_ROWS_MIN) return first;
    amx_unpack(m, packed, scratch);
    const half *scales = m->scales + cell * m->groups * CELL;
    const half *minima = m->minima + cell * m->groups * CELL;
    while (end - first >= AMX_ROWS_MIN) {
        float results[AMX_ROWS][CELL];
        int64_t rows = smaller(AMX_ROWS, end - first);
        for (int at = 0; at < CELL; at += 16)
            (m->kind == INT4M ? amx_tile_minima : amx_tile_plain)(rows, m, scratch + at / 16 * m->groups * FOURS * 64,
                                                                  scales + at, minima + at, x, first, results, at);
        finish(m, cell, rows, results, first, out);
        first += rows;
    }
    return first;
}

#else

static void amx_begin(void) {}
static void amx_end(void) {}

static int64_t amx_cell_times_rows(const Matrix *m, int64_t cell, const uint8_t *packed, const Rows *x, int64_t first,
                                   int64_t end, uint8_t *scratch, const Out *out) {
    (void)m, (void)cell, (void)packed, (void)x, (void)end, (void)scratch, (void)out;
    return first;
}

#endif
