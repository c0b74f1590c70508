/* Where the system's stacks are small (musl gives threads 128 KiB), attention of wide heads and packing of long rows must not need
 * more: members have stacks of a size that we say, and what grows with a row lies elsewhere. */

#define _GNU_SOURCE
#include "decoder.c"

#include <stdio.h>

enum { SMALL = 128 << 10, HEADS = 48, DIM = 256, TOKENS = 40, BLOCK = 16, INPUTS = 65536 };

static _Atomic int64_t smallest = INT64_MAX;

static void measure(Member *me, const void *with) {
    (void)with;
    if (me->number) {
        pthread_attr_t attributes;
        size_t size = 0;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstacksize(&attributes, &size);
        pthread_attr_destroy(&attributes);
        if ((int64_t)size < atomic_load(&smallest)) atomic_store(&smallest, (int64_t)size);
    }
    while (next_chunk(me, 2) >= 0)
        while (me->number == 0 && atomic_load(&smallest) == INT64_MAX) sched_yield();  /* nobody goes before the other was here */
    barrier(me, 2);
}

/* The caller works as well, and has a large stack: its member gets the chunks that it leaves. */
static void attend(Decoder *decoder) {
    static float qkv[TOKENS][3 * HEADS][DIM], out[TOKENS][HEADS][DIM];
    int64_t half_block = HEADS * (DIM + 4) * BLOCK, slot = 0, context = 0, starts[2] = {0, TOKENS};
    int32_t table[TOKENS / BLOCK + 1] = {0, 1, 2};
    void *pool = alloc_aligned(3 * 2 * half_block);
    memset(pool, 0, (size_t)(3 * 2 * half_block));
    for (int64_t i = 0; i < TOKENS * 3 * HEADS * DIM; i++) ((float *)qkv)[i] = (float)(i % 7) - 3.0f;
    Step step = {.sequences = 1, .tokens = TOKENS, .table_stride = 3, .tables = table, .slots = &slot, .starts = starts, .contexts = &context};
    Shape shape = {HEADS, HEADS, DIM, BLOCK, 2 * half_block, half_block, 0.0625f};
    for (int i = 0; i < 20; i++) baton_attention(decoder, &step, &shape, pool, (float *)qkv, 0, KV_INT8, (float *)out);
    free(pool);
}

static void *pack(void *unused) {
    static float row[INPUTS];
    for (int i = 0; i < INPUTS; i++) row[i] = (float)(i % 5) - 2.0f;
    Matrix m = {.kind = ROTATED_INT8, .outputs = 1, .inputs = INPUTS};
    int64_t sizes[3], place = 0;
    baton_plan(&m, sizes);
    float *input_scales = alloc_aligned(sizes[2]);
    for (int i = 0; i < INPUTS; i++) input_scales[i] = 1.0f;
    m.numbers = alloc_aligned(sizes[0]), m.scales = alloc_aligned(sizes[1]), m.input_scales = input_scales;
    baton_pack(&m, F32, (const uint8_t *)row, sizeof row, &place, 1, NULL, 1);
    free((void *)m.numbers), free((void *)m.scales), free(input_scales);
    return unused;
}

int main(void) {
    if (baton_allow()) return puts("the system does not allow these instructions"), 2;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, SMALL);
    if (pthread_setattr_default_np(&small)) return puts("stacks cannot be made smaller"), 3;
    static Model none;
    Decoder *decoder = baton_new(&none, 2);
    team_run(decoder->team, measure, "", 1, 1);
    if (atomic_load(&smallest) < 1 << 20) printf("a member's stack has %lld bytes\n", (long long)atomic_load(&smallest));
    fflush(stdout);
    attend(decoder);
    baton_free(decoder);
    pthread_t thread;
    pthread_create(&thread, NULL, pack, NULL);
    pthread_join(thread, NULL);
    puts("ended");
    return 0;
}
