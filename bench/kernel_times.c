/* Times the library's steps without Python: a decoder of SmolLM2-135M's shape with random weights. For bench/kernel_times.py.
 *
 *   kernel_times BITS THREADS KV REPEATS STEP...     BITS 4 or 8; KV half or bytes; STEP: sequencesxrows@context, as 32x1@200
 *
 * Prints a line of JSON for every step: the least and the median milliseconds of each phase.
 */

#define BATON_PHASES
#include "decoder.c"

#include <stdio.h>
#include <sys/mman.h>

enum { HIDDEN = 576, INNER = 1536, HEADS = 9, KV_HEADS = 3, DIM = 64, WORDS = 49152, LAYERS = 30, BLOCK = 16, LARGE_PAGE = 2 << 20, POSITIONS = 1 << 15 };
enum { TIMES = PHASES + 2 };  /* and the head; and all of it */

static const char *const NAMES[TIMES] = {
    "begin", "norm", "qkv", "turn", "attend", "output", "norm2", "gate_up", "gated", "down", "head", "all",
};

static uint64_t state = 88172645463325252u;

static uint32_t chance(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/* On large pages, as native/packing.py does it. */
static void *large(int64_t size) {
    int64_t whole = round_up(size, LARGE_PAGE) + LARGE_PAGE;
    char *memory = mmap(NULL, (size_t)whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(3);
#if defined(MADV_HUGEPAGE)
    madvise(memory, (size_t)whole, MADV_HUGEPAGE);
#endif
    return (void *)round_up((int64_t)memory, LARGE_PAGE);
}

typedef struct { char *memory; int64_t used; } Arena;

static void *from_arena(Arena *arena, int64_t size) {
    void *taken = arena->memory + arena->used;
    arena->used += round_up(size, 64);
    return taken;
}

static Matrix random_matrix(Arena *arena, int kind, int64_t outputs, int64_t inputs, int paired) {
    Matrix m = {.kind = kind, .paired = paired, .outputs = outputs, .inputs = inputs};
    int64_t sizes[3], block = kind == ROTATED_INT8 ? 34 : 20, row_bytes = inputs / GROUP * block;
    baton_plan(&m, sizes);
    m.numbers = from_arena(arena, sizes[0]), m.scales = from_arena(arena, sizes[1]), m.corrections = from_arena(arena, sizes[2]);
    for (int64_t i = 0; kind == ROTATED_INT8 && i < inputs; i++) ((float *)m.input_scales)[i] = 1.0f;
    uint8_t row[row_bytes];
    for (int64_t o = 0; o < outputs; o++) {
        for (int64_t i = 0; i < row_bytes; i++) row[i] = (uint8_t)chance();
        for (int64_t i = 0; i < row_bytes; i += block) {
            f16 scale = to_f16(0.001f + (float)(chance() % 100) / 2e5f), minimum = to_f16(-0.01f);
            memcpy(row + i, &scale, 2);
            if (kind == Q4_1) memcpy(row + i + 2, &minimum, 2);
        }
        baton_pack(&m, kind, row, row_bytes, &o, 1, NULL, 1);
    }
    return m;
}

static int by_size(const void *a, const void *b) { return (*(const int64_t *)a > *(const int64_t *)b) - (*(const int64_t *)a < *(const int64_t *)b); }

static void *pool_of(int64_t blocks, KVKind kind, int64_t half_block) {
    int64_t numbers = blocks * LAYERS * 2 * half_block;
    char *pool = large(numbers * kv_number_bytes(kind));
    if (kind == KV_F16)
        for (int64_t i = 0; i < numbers; i++) ((f16 *)pool)[i] = to_f16((float)(chance() % 2000) / 1000.0f - 1.0f);
    else
        for (int64_t at = 0; at < numbers; at += (DIM + 4) * BLOCK) {
            for (int64_t i = 0; i < DIM * BLOCK; i++) pool[at + i] = (char)chance();
            for (int64_t i = 0; i < BLOCK; i++) ((float *)(pool + at + DIM * BLOCK))[i] = 0.01f;
        }
    return pool;
}

static void time_steps(Model *m, int64_t threads, int64_t repeats, const char *what) {
    long long sequences, rows, context;
    if (sscanf(what, "%lldx%lld@%lld", &sequences, &rows, &context) != 3) exit(2);
    int64_t tokens = sequences * rows, stride = (context + rows) / BLOCK + 1;
    int64_t slots[sequences], starts[sequences + 1], contexts[sequences], *positions = alloc_aligned(tokens * 8), *likeliest = alloc_aligned(tokens * 8);
    int32_t *tables = alloc_aligned(sequences * stride * 4), *ids = alloc_aligned(tokens * 4);
    float *last = alloc_aligned(sequences * HIDDEN * 4);
    int64_t *times[TIMES];
    for (int t = 0; t < TIMES; t++) times[t] = alloc_aligned(repeats * 8);
    KVKind kind = (KVKind)m->kv_kind;
    m->pool = pool_of(sequences * stride, kind, m->attention.values_at);
    Decoder *decoder = baton_new(m, threads);
    for (int64_t i = 0; i < sequences * stride; i++) tables[i] = (int32_t)i;
    for (int64_t s = 0; s <= sequences; s++) starts[s] = s * rows;
    for (int64_t s = 0; s < sequences; s++) slots[s] = s, contexts[s] = context;
    for (int64_t i = 0; i < tokens; i++) positions[i] = context + i % rows;
    Step step = {sequences, tokens, stride, tables, slots, starts, contexts, ids, positions};
    for (int64_t n = -1; n < repeats; n++) {  /* the first one does not count */
        for (int64_t i = 0; i < tokens; i++) ids[i] = (int32_t)(chance() % WORDS);
        memset(baton_phases, 0, sizeof baton_phases);
        int64_t begin = nanoseconds();
        const float *hidden = baton_hidden(decoder, &step);
        int64_t middle = nanoseconds();
        for (int64_t s = 0; s < sequences; s++) memcpy(last + s * HIDDEN, hidden + (starts[s + 1] - 1) * HIDDEN, HIDDEN * 4);
        baton_likeliest(decoder, last, sequences, NULL, likeliest);
        int64_t end = nanoseconds();
        if (n < 0) continue;
        for (int t = 0; t < PHASES; t++) times[t][n] = baton_phases[t];
        times[PHASES][n] = end - middle, times[PHASES + 1][n] = end - begin;
    }
    baton_free(decoder);
    printf("{\"step\": \"%s\"", what);
    for (int t = 0; t < TIMES; t++) {
        qsort(times[t], (size_t)repeats, 8, by_size);
        printf(", \"%s\": [%.4f, %.4f]", NAMES[t], (double)times[t][0] / 1e6, (double)times[t][repeats / 2] / 1e6);
        free(times[t]);
    }
    puts("}");
    fflush(stdout);
    free(positions), free(likeliest), free(tables), free(ids), free(last);
}

int main(int count, char **words) {
    if (count < 6 || baton_allow()) return 2;
    int kind = atoi(words[1]) == 4 ? Q4_1 : ROTATED_INT8;
    KVKind kv = strcmp(words[3], "half") ? KV_INT8 : KV_F16;
    int64_t half_block = KV_HEADS * (DIM + (kv == KV_INT8 ? 4 : 0)) * BLOCK;
    Arena arena = {large(200 << 20), 0};
    static LayerWeights blocks[LAYERS];
    static float ones[INNER], turns[POSITIONS * DIM / 2];
    for (int i = 0; i < INNER; i++) ones[i] = 1.0f;
    for (int i = 0; i < POSITIONS * DIM / 2; i++) turns[i] = 0.7f + (float)(i % 7) / 128.0f;
    for (int i = 0; i < LAYERS; i++)
        blocks[i] = (LayerWeights){
            .attention_norm = {ones, NULL}, .mlp_norm = {ones, NULL}, .cosines = turns, .sines = turns,
            .qkv = random_matrix(&arena, kind, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 0),
            .output = random_matrix(&arena, kind, HIDDEN, HEADS * DIM, 0),
            .gate_up = random_matrix(&arena, kind, 2 * INNER, HIDDEN, 1), .down = random_matrix(&arena, kind, HIDDEN, INNER, 0),
        };
    float *embedding = large((int64_t)WORDS * HIDDEN * 4);
    for (int64_t i = 0; i < (int64_t)WORDS * HIDDEN; i++) embedding[i] = (float)(chance() % 2000) / 1000.0f - 1.0f;
    Model m = {
        .layers = LAYERS, .hidden = HIDDEN, .vocabulary = WORDS, .inner = INNER,
        .attention = {HEADS, KV_HEADS, DIM, BLOCK, LAYERS * 2 * half_block, half_block, 0.125f},
        .norm_eps = 1e-5f, .kv_kind = kv, .embedding_kind = F32, .embedding_scale = 1.0f, .positions = POSITIONS,
        .embedding = (const uint8_t *)embedding, .embedding_row_bytes = HIDDEN * 4, .final_norm = {ones, NULL}, .blocks = blocks,
        .head = random_matrix(&arena, ROTATED_INT8, WORDS, HIDDEN, 0),
    };
    for (int i = 5; i < count; i++) time_steps(&m, atoi(words[2]), atoi(words[4]), words[i]);
    return 0;
}
