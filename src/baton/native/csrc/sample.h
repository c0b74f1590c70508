/* One token out of a row of logits: the likeliest, or a draw.
 *
 * worker/draws.py says what a draw is, in numpy: the weights e^((logit - largest) / temperature), cut by min-p, top-k and top-p in this
 * order, and a uniform number looked up in their running sum; by token id where nothing is cut, else heaviest first.
 * The result of a row depends on nothing but the row: one member works on it from its first number to its last.
 *
 * Nothing is sorted that cannot be drawn. The weights come with the largest and the sum of every 64 of them; the k-th largest
 * of those largest ones is no larger than the k-th largest of all, and top-p leaves out at once what is in none of the heaviest
 * classes of weights that have the mass together.
 */
#pragma once

#include "alloc.h"
#include "simd.h"

#define DRAW_BLOCK 64
#define CLASS_SHIFT 20          /* of a weight's bits: eight classes between powers of two */
#define TEMPERATURE_LEAST 1e-30f  /* the inverse of less would be infinite */
#define CLASSES (1 + (0x3f800000 >> CLASS_SHIFT))

typedef struct {
    double uniform, top_p, min_p;
    float temperature;          /* 0, or next to nothing: the likeliest */
    int32_t top_k;              /* 0 or less: all */
    int32_t may_exclude;        /* minus infinity is a number here: a token that was excluded */
    int32_t unused;
} Draw;

enum { DRAW_NOT_FINITE = -1, DRAW_NOTHING_LEFT = -2 };

typedef struct {
    float *weights;             /* [vocabulary] */
    float *most;                /* [blocks] */
    double *sums;               /* [blocks], then of candidates [vocabulary]; in between, spare words */
    uint64_t *words;            /* [vocabulary] candidates: weight, and token below it */
} DrawRoom;

static void draw_room_free(DrawRoom *room) {
    free(room->weights), free(room->most), free(room->sums), free(room->words);
    *room = (DrawRoom){0};
}

static int draw_room(DrawRoom *made, int64_t vocabulary) {
    *made = (DrawRoom){alloc_aligned(vocabulary * 4), alloc_aligned((vocabulary / DRAW_BLOCK + 1) * 4), alloc_aligned(vocabulary * 8), alloc_aligned(vocabulary * 8)};
    if (made->weights && made->most && made->sums && made->words) return 1;
    return draw_room_free(made), 0;
}

ALWAYS uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
ALWAYS float bits_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }

/* Heaviest first, and of equal ones the first: in this order the words ascend. */
ALWAYS uint64_t word_of(float weight, int64_t token) { return (uint64_t)~float_bits(weight) << 32 | (uint64_t)token; }
ALWAYS float weight_of(uint64_t word) { return bits_float(~(uint32_t)(word >> 32)); }
ALWAYS int64_t token_of(uint64_t word) { return (int64_t)(word & 0xffffffff); }

/* By weight, byte by byte; words that are in the order of their tokens stay so. `spare` has as much room. */
static void sort_words(uint64_t *words, int64_t count, uint64_t *spare) {
    for (int shift = 32; shift < 64; shift += 8) {
        int64_t starts[256] = {0}, at = 0;
        for (int64_t i = 0; i < count; i++) starts[words[i] >> shift & 255]++;
        for (int b = 0; b < 256; b++) {
            int64_t here = starts[b];
            starts[b] = at, at += here;
        }
        for (int64_t i = 0; i < count; i++) spare[starts[words[i] >> shift & 255]++] = words[i];
        uint64_t *other = words;
        words = spare, spare = other;  /* four times: it ends where it began */
    }
}

/* The index of the largest, or an error code. */
static int64_t judge_row(const float *logits, int64_t count, int may_exclude, float *largest) {
    int32_t broken = 0, excluded = may_exclude ? (int32_t)0xff800000 : 0;  /* minus infinity; 0 is no fault anyhow */
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)float_bits(logits[i]);
        broken |= ((bits & 0x7fffffff) >= 0x7f800000) & (bits != excluded);
    }
    f32v tops = broadcast(-INFINITY);
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) tops = max_lanes(load(logits + i), tops);
    float top = max_of_lanes(tops);
    for (int64_t i = whole; i < count; i++) top = logits[i] > top ? logits[i] : top;
    *largest = top;
    return broken ? DRAW_NOT_FINITE : top == -INFINITY ? DRAW_NOTHING_LEFT : 0;
}

/* Weights, the largest and the sum of each block, and the sum of all. */
static double weigh_row(const float *restrict logits, int64_t count, float largest, float temperature, DrawRoom *room) {
    double mass = 0.0;
    float inverse = 1.0f / temperature, *restrict weights = room->weights;
    for (int64_t begin = 0, b = 0; begin < count; begin += DRAW_BLOCK, b++) {
        float sum[16] = {0}, most[16] = {0}, block_sum = 0.0f, block_most = 0.0f;
        int64_t end = min_int(begin + DRAW_BLOCK, count), at = begin;
        for (; at + 16 <= end; at += 16)
            for (int j = 0; j < 16; j++) {
                float weight = exp_negative((logits[at + j] - largest) * inverse);
                weights[at + j] = weight, sum[j] += weight, most[j] = weight > most[j] ? weight : most[j];
            }
        for (; at < end; at++) {
            float weight = exp_negative((logits[at] - largest) * inverse);
            weights[at] = weight, sum[0] += weight, most[0] = weight > most[0] ? weight : most[0];
        }
        for (int j = 0; j < 16; j++) block_sum += sum[j], block_most = most[j] > block_most ? most[j] : block_most;
        room->most[b] = block_most, room->sums[b] = block_sum;
        mass += (double)block_sum;
    }
    return mass;
}

static int64_t draw_from_all(int64_t count, double mass, double uniform, const DrawRoom *room) {
    double target = uniform * mass, sum = 0.0;
    int64_t b = 0, last = 0;
    while ((b + 1) * DRAW_BLOCK < count && sum + room->sums[b] <= target) sum += room->sums[b++];
    for (int64_t i = b * DRAW_BLOCK; i < count; i++) {  /* on into the next block, where sums of blocks were rounded up */
        if (room->weights[i] == 0.0f) continue;
        sum += (double)room->weights[i], last = i;
        if (sum > target) return i;
    }
    return last;
}

/* Tokens of at least this weight, as words. */
static int64_t gather(int64_t count, float least, const DrawRoom *room) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < count; begin += DRAW_BLOCK) {
        if (room->most[begin / DRAW_BLOCK] < least) continue;
        for (int64_t i = begin; i < min_int(begin + DRAW_BLOCK, count); i++) {
            room->words[found] = word_of(room->weights[i], i);
            found += room->weights[i] >= least;
        }
    }
    return found;
}

/* Keep those of `found` words that are in the heaviest classes with the mass together: no other word can be in. */
static int64_t heaviest_classes(int64_t found, double mass, uint64_t *words) {
    double masses[CLASSES] = {0}, sum = 0.0;
    for (int64_t i = 0; i < found; i++) masses[float_bits(weight_of(words[i])) >> CLASS_SHIFT] += (double)weight_of(words[i]);
    int64_t class = CLASSES - 1, kept = 0;
    for (; class > 0 && (sum += masses[class]) < mass; class--) {}
    for (int64_t i = 0; i < found; i++)
        if ((int64_t)(float_bits(weight_of(words[i])) >> CLASS_SHIFT) >= class) words[kept++] = words[i];
    return kept;
}

static int64_t draw_from_best(int64_t count, double mass, const Draw *draw, DrawRoom *room) {
    int64_t blocks = (count + DRAW_BLOCK - 1) / DRAW_BLOCK, k = draw->top_k > 0 && draw->top_k < count ? draw->top_k : 0;
    float least = (float)draw->min_p;
    if (k && k <= blocks) {
        for (int64_t b = 0; b < blocks; b++) room->words[b] = word_of(room->most[b], b);
        sort_words(room->words, blocks, (uint64_t *)room->sums);
        float kth = weight_of(room->words[k - 1]);
        least = kth > least ? kth : least;
    }
    int all_below = !k && draw->min_p == 0.0;
    if (all_below) least = (float)(0.999 * (1.0 - draw->top_p) * mass / (double)count);  /* those below weigh less than 1 - top_p together */
    int64_t found = gather(count, least, room);
    if (all_below) found = heaviest_classes(found, 1.000001 * draw->top_p * mass, room->words);
    sort_words(room->words, found, (uint64_t *)room->sums);
    if (k && k < found) {  /* those of the same weight as the k-th stay in */
        float kth = weight_of(room->words[k - 1]);
        int64_t all = found;
        for (found = k; found < all && weight_of(room->words[found]) == kth; found++) {}
    }
    double sum = 0.0;
    for (int64_t i = 0; i < found; i++) room->sums[i] = sum += (double)weight_of(room->words[i]);
    if (draw->top_p < 1.0) {  /* a token is in if those before it do not reach top_p yet */
        double reach = draw->top_p * (all_below ? mass : sum);
        int64_t in = 1;
        while (in < found && room->sums[in - 1] < reach) in++;
        found = in;
    }
    double target = draw->uniform * room->sums[found - 1];
    int64_t at = 0;
    while (at + 1 < found && room->sums[at] <= target) at++;
    return token_of(room->words[at]);
}

/* Set the logits of tokens that are not allowed to minus infinity. */
static void mask_row(float *logits, int64_t count, const uint32_t *allowed) {
    for (int64_t begin = 0; begin < count; begin += 32) {
        uint32_t word = allowed[begin / 32];
        if (word == UINT32_MAX) continue;
        for (int64_t j = 0; j < min_int(32, count - begin); j++) logits[begin + j] = word >> j & 1 ? logits[begin + j] : -INFINITY;
    }
}

/* `allowed`: a bit for each token that may be drawn, or NULL: any. The row is judged as it came: what is no number is a fault also where
 * it is not allowed. */
static int64_t draw_row(float *logits, int64_t count, const Draw *draw, const uint32_t *allowed, DrawRoom *room) {
    float largest;
    int64_t wrong = judge_row(logits, count, draw->may_exclude, &largest);
    if (!wrong && allowed) {
        mask_row(logits, count, allowed);
        wrong = judge_row(logits, count, 1, &largest);
    }
    if (wrong) return wrong;
    if (draw->temperature < TEMPERATURE_LEAST) {
        int64_t i = 0;
        while (logits[i] != largest) i++;
        return i;
    }
    double mass = weigh_row(logits, count, largest, draw->temperature, room);
    int filtered = draw->top_k > 0 || draw->top_p < 1.0 || draw->min_p > 0.0;
    return filtered ? draw_from_best(count, mass, draw, room) : draw_from_all(count, mass, draw->uniform, room);
}
