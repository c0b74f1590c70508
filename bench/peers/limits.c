/* What this machine can do at best: memory reads, float32 multiply-adds, int8 dot products. One JSON line.
 *
 *     cc -O3 -march=native -pthread -o limits limits.c && ./limits [THREADS]
 *
 * Every figure is the best of several short runs: a limit is what is reached when nothing disturbs. Arithmetic runs on
 * registers only, so it bounds any kernel from above. Each is taken with one thread (_one) and with THREADS (_all; default 2).
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { THREADS_MAX = 256, RUNS = 12 };

typedef struct {
    double (*work)(int index, int threads); /* returns how much was done: bytes or operations */
    int index, threads;
    pthread_barrier_t *barrier;
    double amount, begin, end;
} Job;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *run_job(void *argument) {
    Job *job = argument;
    cpu_set_t set; /* one thread a core */
    CPU_ZERO(&set);
    CPU_SET(job->index % (int)sysconf(_SC_NPROCESSORS_ONLN), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    job->work(job->index, job->threads); /* warm: clocks, pages, tiles */
    for (int run = 0; run < RUNS; run++) {
        pthread_barrier_wait(job->barrier);
        job->begin = now();
        job->amount = job->work(job->index, job->threads);
        job->end = now();
        pthread_barrier_wait(job->barrier);
        pthread_barrier_wait(job->barrier); /* the times are read in between */
    }
    return NULL;
}

/* The best rate of RUNS, in amounts a second. */
static double rate(double (*work)(int, int), int threads) {
    pthread_t ids[THREADS_MAX];
    Job jobs[THREADS_MAX];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, (unsigned)threads + 1);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (Job){.work = work, .index = i, .threads = threads, .barrier = &barrier};
        pthread_create(&ids[i], NULL, run_job, &jobs[i]);
    }
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        double begin = jobs[0].begin, end = jobs[0].end, amount = 0;
        for (int i = 0; i < threads; i++) {
            if (jobs[i].begin < begin) begin = jobs[i].begin;
            if (jobs[i].end > end) end = jobs[i].end;
            amount += jobs[i].amount;
        }
        if (amount / (end - begin) > best) best = amount / (end - begin);
        pthread_barrier_wait(&barrier);
    }
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    pthread_barrier_destroy(&barrier);
    return best;
}

/* Memory: every thread sums its part of a buffer, over and over until 1 GiB is read. */

typedef int64_t Wide __attribute__((vector_size(64)));
static char *buffer;
static size_t buffer_bytes;
static volatile int64_t sink;

static double read_memory(int index, int threads) {
    size_t part = buffer_bytes / (size_t)threads / 512 * 512;
    const Wide *from = (const Wide *)(buffer + part * (size_t)index);
    size_t count = part / sizeof(Wide), passes = (((size_t)1 << 30) / (size_t)threads + part - 1) / part;
    Wide sums[8] = {{0}};
    for (size_t pass = 0; pass < passes; pass++)
        for (size_t i = 0; i < count; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += from[i + (size_t)k];
    for (int k = 1; k < 8; k++) sums[0] += sums[k];
    sink = sums[0][0] + sums[0][7];
    return (double)part * (double)passes;
}

/* Arithmetic: enough independent chains to fill the pipes. Opaque inputs, so nothing is computed at compile time. */

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
enum { CHAINS = 12, ROUNDS = 1 << 20 };
#define EACH(do) do(s0) do(s1) do(s2) do(s3) do(s4) do(s5) do(s6) do(s7) do(s8) do(s9) do(s10) do(s11) /* no array: gcc may keep one in memory */

/* sum + x * y, as the instruction has it: of another order compilers would make two. */
#if defined(__AVX512F__)
static inline Floats fused(Floats sum, Floats x, Floats y) { return _mm512_fmadd_ps(x, y, sum); }
#elif defined(__FMA__)
static inline Floats fused(Floats sum, Floats x, Floats y) { return _mm256_fmadd_ps(x, y, sum); }
#elif defined(__aarch64__)
static inline Floats fused(Floats sum, Floats x, Floats y) { return vfmaq_f32(sum, x, y); }
#else
static inline Floats fused(Floats sum, Floats x, Floats y) { return sum * x + y; }
#endif

static double multiply_add(int index, int threads) {
    (void)index, (void)threads;
    Floats a, b;
    for (int l = 0; l < LANES; l++) a[l] = 0.999f, b[l] = 0.001f;
    __asm__ volatile("" : "+m"(a), "+m"(b));
    Floats x = a, y = b, all = b;
    float number = 0;
#define BEGIN(s) Floats s = y * number++;
#define ADD(s) s = fused(s, x, y);
#define GATHER(s) all += s;
    EACH(BEGIN)
    for (int i = 0; i < ROUNDS; i++) { EACH(ADD) }
    EACH(GATHER)
#undef BEGIN
#undef ADD
#undef GATHER
    sink = (int64_t)all[0];
    return 2.0 * LANES * CHAINS * ROUNDS;
}

#if defined(__AVX512VNNI__)
#define DOT "avx512 vpdpbusd"
typedef __m512i Ints;
static inline Ints dot(Ints sum, Ints x, Ints y) { return _mm512_dpbusd_epi32(sum, x, y); }
#elif defined(__AVXVNNI__)
#define DOT "avx vpdpbusd"
typedef __m256i Ints;
static inline Ints dot(Ints sum, Ints x, Ints y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
#elif defined(__AVX2__)
#define DOT "avx2 vpmaddubsw + vpmaddwd"
typedef __m256i Ints;
static inline Ints dot(Ints sum, Ints x, Ints y) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define DOT "neon sdot"
typedef int32x4_t Ints;
static inline Ints dot(Ints sum, Ints x, Ints y) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(x), vreinterpretq_s8_s32(y));
}
#endif

#ifdef DOT
#if defined(__x86_64__)
#define HIDE(v) __asm__("" : "+v"(v)) /* or the compiler multiplies once for all rounds */
#else
#define HIDE(v) __asm__("" : "+w"(v))
#endif

static double int8_dot(int index, int threads) {
    (void)index, (void)threads;
    Ints a, b;
    memset(&a, 1, sizeof a), memset(&b, 2, sizeof b);
    HIDE(a);
    HIDE(b);
#define BEGIN(s) Ints s = a;
#define ADD(s) s = dot(s, a, b); HIDE(s);
#define GATHER(s) b = dot(b, a, s);
    EACH(BEGIN)
    for (int i = 0; i < ROUNDS; i++) { EACH(ADD) }
    EACH(GATHER)
    int32_t first;
    memcpy(&first, &b, sizeof first);
    sink = first;
    return 2.0 * sizeof(Ints) * CHAINS * ROUNDS;
}
#endif

#if defined(__AMX_INT8__)
static int amx_allowed(void) {
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}

static double amx_int8(int index, int threads) {
    (void)index, (void)threads;
    struct __attribute__((packed)) {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1};
    for (int t = 0; t < 8; t++) tiles.bytes[t] = 64, tiles.rows[t] = 16;
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* the intrinsic tells gcc 12 of the first 8 bytes only */
    _tile_loadconfig(&tiles);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
    for (int i = 0; i < ROUNDS / 16; i++) { /* a block of 2 x 2 sums from 2 + 2 tiles, as a real kernel would */
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 64 * (ROUNDS / 16);
}
#endif

static void say(const char *name, double (*work)(int, int), int threads, double unit) {
    printf(", \"%s_one\": %.1f", name, rate(work, 1) / unit);
    printf(", \"%s_all\": %.1f", name, rate(work, threads) / unit);
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 2;
    if (threads < 1 || threads > THREADS_MAX) return 2;
    printf("{\"threads\": %d", threads);
    size_t sizes[] = {100, 1024};
    for (int s = 0; s < 2; s++) {
        char name[64];
        buffer_bytes = sizes[s] << 20;
        buffer = aligned_alloc(2 << 20, buffer_bytes);
        if (!buffer) return 1;
        madvise(buffer, buffer_bytes, MADV_HUGEPAGE); /* where it can be had: kernels lie on large pages as well */
        memset(buffer, 1, buffer_bytes);
        snprintf(name, sizeof name, "read_%zu_mib_gb_s", sizes[s]);
        say(name, read_memory, threads, 1e9);
        free(buffer);
    }
    say("float32_gflop_s", multiply_add, threads, 1e9);
#ifdef DOT
    printf(", \"int8_dot\": \"%s\"", DOT);
    say("int8_gop_s", int8_dot, threads, 1e9);
#endif
#if defined(__AMX_INT8__)
    if (amx_allowed()) say("amx_int8_gop_s", amx_int8, threads, 1e9);
#endif
    printf("}\n");
    return 0;
}
