/* The library against plain C that does what its comments say, number by number, in doubles. For processors that no Python is
 * at hand for: it runs wherever a compiler can reach, in an emulator too.
 *
 *   close      every result is as near to the doubles' as the roundings on the way allow
 *   chain      a product is, to the bit, one chain of multiply-adds over groups (of additions over key tiles, on tiles; of bytes,
 *              one product of integers)
 *   same       the bits of a row are those of the same row alone, whatever came with it: rows, chunks, threads
 *
 * Prints a checksum for each thing that it computed. The numbers that go in come from integers alone, so processors that round
 * alike print the same lines: test_selftest.py compares them. Ends with 1 where something was wrong.
 */

#include "decoder.c"

#include <stdio.h>

static int wrong;

#define DEMAND(truth, ...)                                                           \
    do {                                                                             \
        if (!(truth) && ++wrong < 20) printf("WRONG "), printf(__VA_ARGS__), puts(""); \
    } while (0)

/* ---- chance and checksums ---- */

static uint64_t state = 88172645463325252u;

static uint32_t chance(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static int64_t below(int64_t n) { return chance() % n; }

/* Around zero, few of them large: the sum of four even ones. */
static float number(void) {
    int32_t sum = 0;
    for (int i = 0; i < 4; i++) sum += (int32_t)(chance() >> 16) - 32768;
    return (float)sum / 65536.0f;
}

static float *numbers(int64_t count) {
    float *made = alloc_aligned(count * 4);
    for (int64_t i = 0; i < count; i++) made[i] = number();
    return made;
}

static uint64_t checksum(const void *data, int64_t size) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    return hash;
}

static void say(const char *what, const void *data, int64_t size) {
    printf("%-44s %016llx\n", what, (unsigned long long)checksum(data, size));
}

static const char *const KINDS[] = {[F32] = "f32", [ROTATED_INT8] = "int8", [Q4_0] = "int4", [Q4_1] = "int4m", [GROUPED_INT8] = "int8 groups"};

static int of_bytes(int kind) { return kind == ROTATED_INT8 || kind == GROUPED_INT8; }

/* ---- matrices ---- */

static int64_t row_bytes(int kind, int64_t inputs) {
    return kind == F32 ? inputs * 4 : inputs / GROUP * (of_bytes(kind) ? 34 : kind == Q4_0 ? 18 : 20);
}

/* What products are tried of. Tiles have none of bytes in groups. */
static int is_matrix(int kind) { return kind <= Q4_1 || (kind == GROUPED_INT8 && !HAS_AMX); }

/* Rows as a file has them: floats, or GGUF's blocks of 32. */
static uint8_t *stored_rows(int kind, int64_t outputs, int64_t inputs) {
    if (kind == F32) return (uint8_t *)numbers(outputs * inputs);
    int64_t length = row_bytes(kind, inputs);
    uint8_t *rows = alloc_aligned(outputs * length), *to = rows;
    for (int64_t block = 0; block < outputs * (inputs / GROUP); block++) {
        f16 scale = to_f16(number() / 64.0f), minimum = to_f16(number());
        memcpy(to, &scale, 2), to += 2;
        if (kind == Q4_1) memcpy(to, &minimum, 2), to += 2;
        for (int i = 0; i < (of_bytes(kind) ? GROUP : GROUP / 2); i++) *to++ = (uint8_t)chance();
        if (of_bytes(kind) && block % 5 == 0) memset(to - GROUP, block % 2 ? 0x80 : 0x7f, GROUP);  /* the largest products */
    }
    return rows;
}

/* Number k of a stored row is `whole` times the scale of its group, and its minimum. */
typedef struct { int32_t whole; float scale, minimum; } Weight;

static Weight weight_at(int kind, const uint8_t *row, int64_t k) {
    Weight weight = {0, 0.0f, 0.0f};
    row += k / GROUP * row_bytes(kind, GROUP), k %= GROUP;
    weight.scale = f32_of(f16_at(row));
    if (kind == Q4_1) weight.minimum = f32_of(f16_at(row + 2));
    row += kind == Q4_1 ? 4 : 2;
    if (of_bytes(kind)) weight.whole = ((const int8_t *)row)[k];
    else weight.whole = (k < GROUP / 2 ? row[k] & 15 : row[k - GROUP / 2] >> 4) - (kind == Q4_0 ? 8 : 0);
    return weight;
}

static float balance_of(int64_t input) { return 1.0f + (float)(input % 5) / 4.0f; }

static Matrix packed(int kind, const uint8_t *rows, int64_t outputs, int64_t inputs, int paired) {
    Matrix m = {.kind = kind, .paired = paired, .outputs = outputs, .inputs = inputs};
    int64_t sizes[3], places[outputs];
    baton_plan(&m, sizes);
    void *parts[3];
    for (int i = 0; i < 3; i++) parts[i] = alloc_aligned(sizes[i]), memset(parts[i], 0, (size_t)sizes[i]);
    m.numbers = parts[0], m.scales = parts[1], m.corrections = parts[2];
    for (int64_t i = 0; i < outputs; i++) places[i] = i;
    for (int64_t i = 0; kind == ROTATED_INT8 && i < inputs; i++) ((float *)parts[2])[i] = balance_of(i);
    baton_pack(&m, kind == GROUPED_INT8 ? Q8_0 : kind, rows, row_bytes(kind, inputs), places, outputs, NULL, 2);
    return m;
}

static void matrix_free(Matrix *m) { free((void *)m->numbers), free((void *)m->scales), free((void *)m->corrections); }

/* ---- products ---- */

typedef struct { double value, size; float chain; } Expected;  /* size: of the terms, before they cancel out */

/* As matmul_int8.h says: one row, rotated number by number, as bytes. Returns the scale. */
static float bytes_expected(float *x, int64_t inputs, int32_t *q) {
    int64_t apart = 1;
    for (; inputs % (2 * apart) == 0; apart *= 2)
        for (int64_t i = 0; i < inputs; i++)
            if (i / apart % 2 == 0) {
                float a = x[i], b = x[i + apart];
                x[i] = a + b, x[i + apart] = a - b;
            }
    for (int64_t factor = 3; factor <= 13; factor += 2)
        for (; inputs / apart % factor == 0 && apart < inputs; apart *= factor)
            for (int64_t i = 0; i < inputs; i++)
                if (i / apart % factor == 0) {
                    float sum = x[i];
                    for (int64_t f = 1; f < factor; f++) sum += x[i + f * apart];
                    for (int64_t f = 0; f < factor; f++) x[i + f * apart] = FMA(sum, -2.0f / (float)factor, x[i + f * apart]);
                }
    float largest = 0.0f;
    for (int64_t i = 0; i < inputs; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    for (int64_t i = 0; i < inputs; i++) q[i] = largest > 1e-36f ? (int32_t)rintf(x[i] * (127.0f / largest)) : 0;
    return largest / 127.0f;
}

static Expected expected_bytes(const uint8_t *row, const float *x, int64_t inputs) {
    Expected e = {0.0, 0.0, 0.0f};
    float a[inputs], w[inputs];
    int32_t q[inputs], v[inputs];
    int64_t stretched = 1, sum = 0;
    double a_size = 0.0, w_size = 0.0;
    while (inputs % (2 * stretched) == 0) stretched *= 2;
    for (int64_t k = 0; k < inputs; k++) {
        Weight weight = weight_at(ROTATED_INT8, row, k);
        a[k] = x[k] * balance_of(k), w[k] = weight.scale * (float)weight.whole * (1.0f / balance_of(k));
        e.value += (double)x[k] * weight.scale * weight.whole, a_size += (double)a[k] * a[k], w_size += (double)w[k] * w[k];
    }
    float scale = bytes_expected(a, inputs, q), unit = bytes_expected(w, inputs, v) / (float)stretched;
    for (int64_t k = 0; k < inputs; k++) sum += q[k] * v[k];
    e.chain = (float)sum * (unit * scale);
    e.size = sqrt(a_size * w_size) * 0.04 / 2e-7 / (double)max_int(inputs / GROUP, 8);  /* what rounding to bytes may cost at most */
    return e;
}

#if HAS_AMX
/* As matmul_q4_amx.h says. */
static Expected expected_whole(int kind, const uint8_t *row, const float *x, int64_t inputs) {
    Expected e = {0.0, 0.0, 0.0f};
    float largest = 0.0f;
    for (int64_t k = 0; k < inputs; k++) largest = fabsf(x[k]) > largest ? fabsf(x[k]) : largest;
    float scale = largest / 32639.0f, inverse = largest > 1e-34f ? 32639.0f / largest : 0.0f;
    for (int64_t begin = 0; begin < inputs; begin += 576) {
        int64_t end = min_int(begin + 576, inputs);
        float unit = 0.0f;
        for (int way = 0; way < 2; way++) {  /* first the unit, then the products */
            int64_t high_sum = 0, low_sum = 0;
            for (int64_t k = begin; k < end; k++) {
                Weight weight = weight_at(kind, row, k);
                int number = weight.whole - (kind == Q4_1 ? 8 : 0);
                float step = weight.scale, centre = kind == Q4_1 ? weight.minimum + 8.0f * weight.scale : 0.0f;
                if (step < 0.0f) centre += step, step = -step, number = -1 - number;
                if (way == 0) {
                    float needed = fmaxf(step / 255.0f, (8.0f * step + fabsf(centre)) / 2000.0f);
                    unit = needed > unit ? needed : unit;
                    continue;
                }
                int s = (int)rintf(step * (1.0f / unit)), c = (int)rintf(centre * (1.0f / unit));
                int a = (int)rintf(x[k] * inverse), high = (a + 128) >> 8, low = a - high * 256;
                if (low < -127) low = -127;
                high_sum += high * (s * number + c);
                low_sum += low * ((s >> 4) * number + (c >> 4));
                double exact = (double)x[k] * ((double)weight.scale * weight.whole + weight.minimum);
                e.size += fabs(exact) + (double)largest / 32639.0 * fabs((double)weight.scale * 15.0);
            }
            if (way == 0) continue;
            float value = (float)(high_sum + (low_sum >> 4)) * (256.0f * unit * scale);
            e.chain = begin ? e.chain + value : value;
            e.value += (double)(high_sum + (low_sum >> 4)) * 256.0 * unit * scale;
        }
    }
    return e;
}
#endif

static int32_t bits_of_largest(const float *x) {
    float largest = 0.0f;
    int32_t bits;
    for (int j = 0; j < GROUP; j++) largest = fabsf(x[j]) > largest ? fabsf(x[j]) : largest;
    memcpy(&bits, &largest, 4);
    return bits;
}

/* As matmul_q4.h says: the largest number of a group's activations is 127, and 8159 where the group is larger than the mean of its row by more
 * than 9/16 of an octave; and always before a matrix of bytes. */
static float most_of(int kind, const float *row, int64_t inputs, int64_t g) {
    if (kind == GROUPED_INT8) return 8159.0f;
    int64_t top = 0, sum = 0, groups = inputs / GROUP;
    for (int64_t i = 0; i < groups; i++) top = bits_of_largest(row + i * GROUP) > top ? bits_of_largest(row + i * GROUP) : top;
    for (int64_t i = 0; i < groups; i++) {
        int64_t bits = bits_of_largest(row + i * GROUP);
        sum += bits < top - 16 * 8388608 ? top - 16 * 8388608 : bits;
    }
    return bits_of_largest(row + g * GROUP) > sum / groups + 9 * 524288 ? 8159.0f : 127.0f;
}

/* One row as the products see it: float, or whole numbers and a scale for each group. */
static Expected expected(int kind, const uint8_t *row, const float *x, int64_t inputs) {
    Expected e = {0.0, 0.0, 0.0f};
    if (kind == ROTATED_INT8) return expected_bytes(row, x, inputs);
#if HAS_AMX
    if (kind != F32) return expected_whole(kind, row, x, inputs);
#endif
    if (kind == F32) {
        for (int64_t k = 0; k < inputs; k++) {
            float w;
            memcpy(&w, row + k * 4, 4);
            e.value += (double)w * x[k], e.size += fabs((double)w * x[k]), e.chain = FMA(x[k], w, e.chain);
        }
        return e;
    }
    const float *whole_row = x;
    for (int64_t g = 0; g < inputs / GROUP; g++, x += GROUP) {
        float largest = 0.0f, most = most_of(kind, whole_row, inputs, g);
        for (int j = 0; j < GROUP; j++) largest = fabsf(x[j]) > largest ? fabsf(x[j]) : largest;
        float scale = largest / most, inverse = largest > 1e-36f ? most / largest : 0.0f;
        int32_t whole = 0, sum = 0;
        Weight weight = {0, 0.0f, 0.0f};
        for (int j = 0; j < GROUP; j++) {
            int32_t q = (int32_t)rintf(x[j] * inverse);
            weight = weight_at(kind, row, g * GROUP + j);
            whole += q * weight.whole, sum += q;
            double term = (double)scale * q * ((double)weight.scale * weight.whole + weight.minimum);
            e.value += term, e.size += fabs(term);
        }
        e.chain = FMA((float)whole, weight.scale * scale, e.chain);
        if (kind == Q4_1) e.chain = FMA(weight.minimum, scale * (float)sum, e.chain);
    }
    return e;
}

static const int64_t ROW_COUNTS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 31, 40, 130};
enum { COUNTS = sizeof ROW_COUNTS / sizeof *ROW_COUNTS };

static void product(Decoder *decoders[2], int kind, int64_t outputs, int64_t inputs, int64_t most) {
    char name[64];
    snprintf(name, sizeof name, "product %s %lldx%lld", KINDS[kind], (long long)outputs, (long long)inputs);
    uint8_t *rows = stored_rows(kind, outputs, inputs);
    Matrix m = packed(kind, rows, outputs, inputs, 0);
    float *x = numbers(most * inputs), *out = alloc_aligned(most * outputs * 4), *first = alloc_aligned(most * outputs * 4);
    for (int64_t k = 0; k < inputs; k++) x[inputs + k] = k % 3 ? 7.0f : -7.0f;  /* the largest integers that there are */
    memset(x + 2 * inputs, 0, (size_t)inputs * 4);
    for (int64_t k = 0; k < inputs; k++) x[3 * inputs + k] *= k % 7 ? 1e-6f : 1e3f;
    for (int64_t r = 0; r < most; r++) {
        baton_product(decoders[0], &m, x + r * inputs, 1, first + r * outputs, outputs);
        if (r > 5 && r % 16) continue;
        for (int64_t o = 0; o < outputs; o++) {
            Expected e = expected(kind, rows + o * row_bytes(kind, inputs), x + r * inputs, inputs);
            float got = first[r * outputs + o];
            double far = fabs(got - e.value), allowed = e.size * 2e-7 * (double)max_int(m.groups, 8) + 1e-30;
            DEMAND(far <= allowed, "%s: row %lld output %lld is %.9g, not %.9g", name, (long long)r, (long long)o, got,
                   e.value);
            DEMAND(!memcmp(&got, &e.chain, 4), "%s: row %lld output %lld is %a, the chain is %a", name, (long long)r,
                   (long long)o, got, e.chain);
        }
    }
    for (int i = 0; i < COUNTS && ROW_COUNTS[i] <= most; i++)
        for (int t = 0; t < 2; t++) {
            int64_t count = ROW_COUNTS[i];
            memset(out, 0xff, (size_t)(count * outputs) * 4);
            baton_product(decoders[t], &m, x, count, out, outputs);
            DEMAND(!memcmp(out, first, (size_t)(count * outputs) * 4), "%s: %lld rows, %d threads: other bits than one by one",
                   name, (long long)count, t + 1);
        }
    say(name, first, most * outputs * 4);
    matrix_free(&m), free(rows), free(x), free(out), free(first);
}

/* Bias and gates: checksums only, the whole model below has them too. */
static void gated_product(Decoder *decoder, int kind) {
    int64_t outputs = 4 * PANEL, inputs = 160, count = 23;
    char name[64];
    uint8_t *rows = stored_rows(kind, outputs, inputs);
    Matrix m = packed(kind, rows, outputs, inputs, 1);
    float *bias = numbers(outputs), *x = numbers(count * inputs), *out = alloc_aligned(count * outputs * 2);
    m.bias = bias;
    baton_product(decoder, &m, x, count, out, outputs / 2);
    for (int64_t r = 0; r < count; r++)
        for (int64_t o = 0; o < outputs / 2; o++) {
            int64_t gate = o / 16 * PANEL + o % 16;
            const uint8_t *row = rows + gate * row_bytes(kind, inputs), *through = row + 16 * row_bytes(kind, inputs);
            Expected gated = expected(kind, row, x + r * inputs, inputs), let_through = expected(kind, through, x + r * inputs, inputs);
            double a = bias[gate] + (kind == ROTATED_INT8 ? gated.chain : gated.value);
            double b = bias[gate + 16] + (kind == ROTATED_INT8 ? let_through.chain : let_through.value);
            double want = a / (1.0 + exp(-a)) * b, got = out[r * (outputs / 2) + o];
            DEMAND(fabs(got - want) <= 1e-4 * (1.0 + fabs(want)), "gates %s: %g, not %g", KINDS[kind], got, want);
        }
    snprintf(name, sizeof name, "gates %s", KINDS[kind]);
    say(name, out, count * outputs * 2);
    matrix_free(&m), free(rows), free(bias), free(x), free(out);
}

/* ---- attention ---- */

typedef struct { int64_t heads, kv_heads, dim, block, window; KVKind kv; } Case;

static const char *const KV_NAMES[] = {"float", "half", "pairs", "bytes"};

/* Numbers of the keys of a block. */
static int64_t half_block_of(const Case *c) { return c->kv_heads * (c->dim + (c->kv == KV_INT8 ? 4 : 0)) * c->block; }

enum { SEQUENCES = 4, TABLE = 64 };

typedef struct {
    int64_t lengths[SEQUENCES], tokens;
    int32_t tables[SEQUENCES * TABLE];
    float *qkv[SEQUENCES];   /* [length][heads + 2 kv_heads][dim] */
    float *out[SEQUENCES];   /* [length][heads][dim] */
} World;

/* What attention_int8.h makes of it. */
static double score_of_bytes(const float *q, const float *k, int64_t dim) {
    float a[dim], b[dim];
    int32_t query[dim], key[dim];
    memcpy(a, q, sizeof a), memcpy(b, k, sizeof b);
    double scale = (double)bytes_expected(a, dim, query) * (double)bytes_expected(b, dim, key) / (double)(dim & -dim), sum = 0.0;
    for (int64_t d = 0; d < dim; d++) sum += (double)query[d] * key[d];
    return sum * scale;
}

/* What the pool keeps of x[d]; of keys, but for bytes. */
static double kept(const float *x, int64_t d, const Case *c) {
    if (c->kv != KV_INT8) return c->kv == KV_F16 ? (double)f32_of(to_f16(x[d])) : (double)x[d];
    float most = 0.0f;
    for (int64_t i = 0; i < c->dim; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return rint((double)(x[d] * (127.0f / most))) * most / 127.0;
}

/* Cases with a window have sinks too, as gpt-oss has: one more score per head, whose value is zero. */
static double sink_of(int64_t head) { return 0.25 * (double)head - 0.5; }

/* One query against everything that it may see, in doubles. */
static void attend_expected(const World *world, const Case *c, int64_t s, int64_t token, int64_t head, double *out) {
    int64_t stride = (c->heads + 2 * c->kv_heads) * c->dim, kv = c->heads + head / (c->heads / c->kv_heads);
    const float *q = world->qkv[s] + token * stride + head * c->dim;
    double scores[token + 1], top = c->window ? sink_of(head) : -1e300, total = 0.0;
    int64_t from = c->window ? max_int(0, token - c->window + 1) : 0;
    for (int64_t t = from; t <= token; t++) {
        const float *k = world->qkv[s] + t * stride + kv * c->dim;
        scores[t] = 0.0;
        if (c->kv == KV_INT8) scores[t] = 0.125 * score_of_bytes(q, k, c->dim);
        else for (int64_t d = 0; d < c->dim; d++) scores[t] += 0.125 * q[d] * kept(k, d, c);
        top = scores[t] > top ? scores[t] : top;
    }
    if (c->window) total = exp(sink_of(head) - top);
    for (int64_t d = 0; d < c->dim; d++) out[d] = 0.0;
    for (int64_t t = from; t <= token; t++) {
        const float *v = world->qkv[s] + t * stride + (kv + c->kv_heads) * c->dim;
        double weight = exp(scores[t] - top);
        total += weight;
        for (int64_t d = 0; d < c->dim; d++) out[d] += weight * kept(v, d, c);
    }
    for (int64_t d = 0; d < c->dim; d++) out[d] /= total;
}

/* All sequences from their first token to their last, in chunks of up to `most`; `together` puts chunks into one step. */
static void attend_in_chunks(Decoder *decoder, World *world, const Case *c, void *pool, int64_t most, int together, float **out) {
    int64_t q_width = c->heads * c->dim, stride = (c->heads + 2 * c->kv_heads) * c->dim;
    int64_t half_block = half_block_of(c);
    Shape shape = {c->heads, c->kv_heads, c->dim, c->block, 2 * half_block, half_block, 0.125f};
    int64_t done[SEQUENCES] = {0}, slots[SEQUENCES], starts[SEQUENCES + 1], contexts[SEQUENCES];
    float *qkv = alloc_aligned(SEQUENCES * most * stride * 4), *results = alloc_aligned(SEQUENCES * most * q_width * 4);
    float sinks[c->heads];
    for (int64_t head = 0; head < c->heads; head++) sinks[head] = (float)sink_of(head);
    for (;;) {
        int64_t count = 0;
        starts[0] = 0;
        for (int64_t s = 0; s < SEQUENCES && (together || !count); s++) {
            int64_t chunk = min_int(1 + below(most), world->lengths[s] - done[s]);
            if (!chunk) continue;
            memcpy(qkv + starts[count] * stride, world->qkv[s] + done[s] * stride, (size_t)(chunk * stride) * 4);
            slots[count] = s, contexts[count] = done[s], starts[count + 1] = starts[count] + chunk, count++;
        }
        if (!count) break;
        Step step = {.sequences = count, .tokens = starts[count], .table_stride = TABLE, .tables = world->tables,
                     .slots = slots, .starts = starts, .contexts = contexts};
        baton_attention(decoder, &step, &shape, pool, qkv, c->window, c->window ? sinks : NULL, c->kv, results);
        for (int64_t i = 0; i < count; i++) {
            int64_t s = slots[i], chunk = starts[i + 1] - starts[i];
            memcpy(out[s] + done[s] * q_width, results + starts[i] * q_width, (size_t)(chunk * q_width) * 4);
            done[s] += chunk;
        }
    }
    free(qkv), free(results);
}

static World world_of(const Case *c) {
    World world = {.lengths = {1 + below(30), 140 + below(10), 64, 1 + below(60)}};
    int64_t q_width = c->heads * c->dim, stride = (c->heads + 2 * c->kv_heads) * c->dim, blocks = SEQUENCES * TABLE;
    for (int64_t i = 0; i < blocks; i++) world.tables[i] = (int32_t)i;
    for (int64_t i = blocks - 1; i > 0; i--) {
        int64_t j = below(i + 1);
        int32_t other = world.tables[i];
        world.tables[i] = world.tables[j], world.tables[j] = other;
    }
    for (int s = 0; s < SEQUENCES; s++) {
        world.qkv[s] = numbers(world.lengths[s] * stride), world.out[s] = alloc_aligned(world.lengths[s] * q_width * 4);
        for (int64_t i = 0; i < world.lengths[s] * stride; i++) world.qkv[s][i] *= 2.0f;
    }
    return world;
}

static void world_free(World *world) {
    for (int s = 0; s < SEQUENCES; s++) free(world->qkv[s]), free(world->out[s]);
}

static void *pool_of(const Case *c) {
    int64_t size = SEQUENCES * TABLE * 2 * half_block_of(c) * kv_number_bytes(c->kv);
    return memset(alloc_aligned(size), 0, (size_t)size);
}

static void attention(Decoder *decoders[2], const Case *c) {
    char name[80];
    snprintf(name, sizeof name, "attention %s %lld/%lld heads of %lld, %lld, %lld", KV_NAMES[c->kv],
             (long long)c->heads, (long long)c->kv_heads, (long long)c->dim, (long long)c->block, (long long)c->window);
    World world = world_of(c);
    int64_t q_width = c->heads * c->dim;
    float *again[SEQUENCES];
    void *pool = pool_of(c);
    for (int s = 0; s < SEQUENCES; s++) again[s] = alloc_aligned(world.lengths[s] * q_width * 4);
    attend_in_chunks(decoders[0], &world, c, pool, 200, 0, world.out);
    double want[c->dim], tolerance = c->kv == KV_INT8 ? 2e-3 : 2e-5;  /* bytes: weights are rounded to 14 bits */
    uint64_t sums[SEQUENCES];
    for (int s = 0; s < SEQUENCES; s++) {
        sums[s] = checksum(world.out[s], world.lengths[s] * q_width * 4);
        for (int64_t i = world.lengths[s] - 1; i >= 0; i -= 1 + below(6))
            for (int64_t head = 0; head < c->heads; head++) {
                attend_expected(&world, c, s, i, head, want);
                for (int64_t d = 0; d < c->dim; d++) {
                    float got = world.out[s][(i * c->heads + head) * c->dim + d];
                    DEMAND(fabs(got - want[d]) <= tolerance, "%s: token %lld is %.9g, not %.9g", name, (long long)i, got, want[d]);
                }
            }
    }
    for (int way = 0; way < 4; way++) {
        const int64_t most[] = {1, 3, 7, 17};
        attend_in_chunks(decoders[way % 2], &world, c, pool, most[way], way != 2, again);
        for (int s = 0; s < SEQUENCES; s++)
            DEMAND(!memcmp(again[s], world.out[s], (size_t)(world.lengths[s] * q_width) * 4), "%s: way %d: other bits", name,
                   way);
    }
    say(name, sums, sizeof sums);
    for (int s = 0; s < SEQUENCES; s++) free(again[s]);
    world_free(&world), free(pool);
}

/* ---- large scores ---- */

typedef enum { ONE_STANDS_OUT, ALL_ALIKE, BOTH_SIGNS, ALL_BELOW, ANYTHING, SCORINGS } Scoring;

static const char *const SCORINGS_NAMES[] = {"one stands out", "all alike", "both signs", "all below", "anything"};

/* Queries are all the same, and a key is `share` of the one that scores `score` to base 2; its rows end in random numbers. */
static void score_rows_of(World *world, const Case *c, Scoring scoring, double score) {
    int64_t width = (c->heads + 2 * c->kv_heads) * c->dim;
    float *query = numbers(c->dim);
    double square = 0.0;
    for (int64_t d = 0; d < c->dim; d++) square += (double)query[d] * query[d];
    for (int s = 0; s < SEQUENCES; s++)
        for (int64_t t = 0; t < world->lengths[s]; t++) {
            float *row = world->qkv[s] + t * width, share = 0.0f;
            if (scoring == ONE_STANDS_OUT) share = t == world->lengths[s] / 2 ? 1.0f : number() / 4.0f;
            if (scoring == ALL_ALIKE) share = 1.0f;
            if (scoring == BOTH_SIGNS) share = t % 2 ? 1.0f : -1.0f;
            if (scoring == ALL_BELOW) share = t % 3 ? -1.0f : -0.75f;
            if (scoring == ANYTHING) share = number();
            for (int64_t h = 0; h < c->heads; h++) memcpy(row + h * c->dim, query, (size_t)c->dim * 4);
            for (int64_t i = 0; i < c->kv_heads * c->dim; i++)
                row[c->heads * c->dim + i] = query[i % c->dim] * share * (float)(score * 0.69314718056 / 0.125 / square);
        }
    free(query);
}

/* Scores of any size come out as they do in doubles. Those that are nearly alike are as far off as float32 rounds them. */
static void large_scores(Decoder *decoders[2], KVKind kv, int64_t dim, double score) {
    Case c = {4, 2, dim, 16, 0, kv};
    for (Scoring scoring = ONE_STANDS_OUT; scoring < SCORINGS; scoring++) {
        World world = world_of(&c);
        score_rows_of(&world, &c, scoring, score);
        void *pool = pool_of(&c);
        double want[dim], rounded = score * 0x1p-22, tolerance = 4e-3;
        if (scoring == ANYTHING) tolerance += 4.0 * (rounded < 1.0 ? rounded : 1.0);
        for (int way = 0; way < 2; way++) {  /* whole prompts, and a few rows at a time */
            attend_in_chunks(decoders[way], &world, &c, pool, way ? 3 : 200, way, world.out);
            for (int s = 0; s < SEQUENCES; s++)
                for (int64_t i = world.lengths[s] - 1; i >= 0; i -= 1 + below(70)) {
                    attend_expected(&world, &c, s, i, i % c.heads, want);
                    for (int64_t d = 0; d < dim; d++) {
                        float got = world.out[s][(i * c.heads + i % c.heads) * dim + d];
                        DEMAND(fabs(got - want[d]) <= tolerance, "%s, %s, a score of %g, %lld wide: token %lld is %.9g, not %.9g",
                               KV_NAMES[kv], SCORINGS_NAMES[scoring], score, (long long)dim, (long long)i, got, want[d]);
                    }
                }
        }
        world_free(&world), free(pool);
    }
}

/* ---- single numbers ---- */

static void functions(void) {
    enum { MANY = 1 << 16 };
    float *exps = alloc_aligned(MANY * 4), *silus = alloc_aligned(MANY * 4);
    for (int i = 0; i < MANY; i++) {
        float x = -(float)i / (MANY / 100.0f), y = number() * 8.0f;
        float lanes[LANES];
        store(lanes, silu_lanes(broadcast(y)));
        exps[i] = exp_negative(x), silus[i] = lanes[i % LANES];
        if (x >= -87.0f) DEMAND(fabs(exps[i] / exp(x) - 1.0) < 3e-7, "e^%g is %g, not %g", x, exps[i], exp(x));
        else DEMAND(exps[i] == 0.0f, "e^%g is %g", x, exps[i]);
        double want = y / (1.0 + exp(-(double)y));
        DEMAND(fabs(silus[i] - want) <= 1e-6 * fabs(want), "silu(%g) is %g, not %g", y, silus[i], want);
    }
    for (int i = 0; i < 3; i++) {
        float far = (float[]){88.0f, 1000.0f, 1e6f}[i], lanes[LANES];
        store(lanes, silu_lanes(broadcast(far)));
        DEMAND(lanes[0] == far, "silu(%g) is %g", far, lanes[0]);
        store(lanes, silu_lanes(broadcast(-far)));
        DEMAND(fabsf(lanes[0]) < 1e-30f, "silu(%g) is %g", -far, lanes[0]);
    }
    say("exp_negative", exps, MANY * 4), say("silu", silus, MANY * 4);
    free(exps), free(silus);
}

static f16 half_with(uint16_t bits) {
    f16 x;
    memcpy(&x, &bits, 2);
    return x;
}

static uint16_t bits_of(f16 x) {
    uint16_t bits;
    memcpy(&bits, &x, 2);
    return bits;
}

/* There and back again, and every number halfway between two neighbours: the even one, and above it the other. */
static void halves(void) {
    enum { FINITE = 0x7c00, MORE = 0x7e00 };
    static float values[2][FINITE + 1];
    for (int sign = 0; sign < 2; sign++) {
        uint16_t minus = sign ? 0x8000 : 0;
        for (uint16_t i = 0; i <= FINITE; i++) {
            float x = values[sign][i] = f32_of(half_with(minus | i));
            DEMAND(bits_of(to_f16(x)) == (minus | i), "%g is %x, not %x", x, bits_of(to_f16(x)), minus | i);
            double exact = i < 1024 ? i * 0x1p-24 : ldexp(1024 + i % 1024, i / 1024 - 25);
            DEMAND(fabsf(x) == (i == FINITE ? INFINITY : (float)exact) && !signbit(x) == !sign, "%x is %g", minus | i, x);
            if (i == FINITE) continue;
            double above = i + 1 < FINITE ? fabs((double)f32_of(half_with((uint16_t)(i + 1)))) : 65536.0;
            float middle = (float)((exact + above) / 2.0) * (sign ? -1.0f : 1.0f);
            uint16_t even = (uint16_t)(i + i % 2), tie = bits_of(to_f16(middle)), up = bits_of(to_f16(nextafterf(middle, 2.0f * middle)));
            DEMAND(tie == (minus | even) && up == (minus | (i + 1)), "%a becomes %x, and what is above it %x", middle, tie, up);
        }
        DEMAND(isnan(f32_of(half_with(minus | MORE))) && bits_of(to_f16(f32_of(half_with(minus | MORE)))) == (minus | MORE), "no NaN");
        DEMAND(bits_of(to_f16(sign ? -1e30f : 1e30f)) == (minus | FINITE) && bits_of(to_f16(sign ? -1e-30f : 1e-30f)) == minus, "ends");
    }
    say("halves", values, sizeof values);
}

/* ---- a whole model, in one step and in many; what is allocated here goes with the process ---- */

enum { MASK_WORDS_MOST = 8 };

/* The likeliest of the tokens that each row may take are those that its logits say; a row that may take none says so. */
static void likeliest_allowed(Decoder *decoder, const char *name, const float *hidden, int64_t rows, const float *logits) {
    int64_t vocabulary = decoder->model->vocabulary, tokens[rows];
    uint32_t masks[rows][MASK_WORDS_MOST];
    const uint32_t *allowed[rows];
    for (int64_t r = 0; r < rows; r++) {
        for (int w = 0; w < MASK_WORDS_MOST; w++) masks[r][w] = r % 4 == 1 ? chance() : 0;
        if (r % 4 == 2) masks[r][vocabulary / 64] = 1u << below(32);
        allowed[r] = r % 4 ? masks[r] : NULL;
    }
    DEMAND(!baton_likeliest(decoder, hidden, rows, allowed, tokens), "%s: no memory", name);
    for (int64_t r = 0; r < rows; r++) {
        int64_t want = DRAW_NOTHING_LEFT;
        for (int64_t t = 0; t < vocabulary; t++) {
            if (allowed[r] && !(masks[r][t / 32] >> t % 32 & 1)) continue;
            if (want < 0 || logits[r * vocabulary + t] > logits[r * vocabulary + want]) want = t;
        }
        DEMAND(tokens[r] == want, "%s: of row %lld of %lld the likeliest is %lld, not %lld", name, (long long)r, (long long)rows,
               (long long)tokens[r], (long long)want);
    }
}

static void model(int kind, int halves) {
    enum { HIDDEN = 96, INNER = 160, HEADS = 6, KV = 2, DIM = 32, WORDS = 83, LAYERS = 2, TOKENS = 75, BLOCK = 16 };
    uint8_t *embedding = stored_rows(kind, WORDS, HIDDEN);
    LayerWeights blocks[LAYERS];
    for (int i = 0; i < LAYERS; i++)
        blocks[i] = (LayerWeights){
            .attention_norm = {numbers(HIDDEN), NULL}, .mlp_norm = {numbers(HIDDEN), NULL}, .q_norm = numbers(DIM), .k_norm = numbers(DIM),
            .qkv = packed(kind, stored_rows(kind, (HEADS + 2 * KV) * DIM, HIDDEN), (HEADS + 2 * KV) * DIM, HIDDEN, 0),
            .output = packed(kind, stored_rows(kind, HIDDEN, HEADS * DIM), HIDDEN, HEADS * DIM, 0),
            .gate_up = packed(kind, stored_rows(kind, 2 * INNER, HIDDEN), 2 * INNER, HIDDEN, 1),
            .down = packed(kind, stored_rows(kind, HIDDEN, INNER), HIDDEN, INNER, 0), .window = i ? 40 : 0,
        };
    float *logits = alloc_aligned(TOKENS * WORDS * 4), *again = alloc_aligned(TOKENS * WORDS * 4), *final_norm = numbers(HIDDEN);
    float *cosines = numbers(TOKENS * DIM / 2), *sines = numbers(TOKENS * DIM / 2);  /* any: nothing here knows what a rotation is */
    int64_t half_block = KV * DIM * BLOCK, starts[2] = {0}, slot = 0, context = 0, positions[TOKENS];
    int32_t table[TOKENS / BLOCK + 1], ids[TOKENS];
    void *pool = alloc_aligned((TOKENS / BLOCK + 1) * LAYERS * 2 * half_block * 4);
    Model m = {
        .layers = LAYERS, .hidden = HIDDEN, .vocabulary = WORDS, .inner = INNER,
        .attention = {HEADS, KV, DIM, BLOCK, LAYERS * 2 * half_block, half_block, 0.125f},
        .norm_eps = 1e-5f, .kv_kind = halves ? KV_F16 : KV_F32, .embedding_kind = kind,
        .embedding_scale = 1.0f, .positions = TOKENS, .embedding = embedding, .embedding_row_bytes = row_bytes(kind, HIDDEN),
        .final_norm = {final_norm, NULL}, .blocks = blocks,
        .head = packed(kind, embedding, WORDS, HIDDEN, 0), .pool = pool,
    };
    for (int i = 0; i < LAYERS; i++) blocks[i].cosines = cosines, blocks[i].sines = sines;
    for (int i = 0; i < TOKENS; i++) ids[i] = (int32_t)below(WORDS), positions[i] = i;
    for (int i = 0; i <= TOKENS / BLOCK; i++) table[i] = (TOKENS / BLOCK) - i;
    for (int64_t chunk = TOKENS; chunk; chunk /= 5) {
        Decoder *decoder = baton_new(&m, 1 + (chunk < TOKENS));
        for (context = 0; context < TOKENS; context += starts[1]) {
            starts[1] = min_int(chunk, TOKENS - context);
            Step step = {.sequences = 1, .tokens = starts[1], .table_stride = TOKENS / BLOCK + 1, .tables = table,
                         .slots = &slot, .starts = starts, .contexts = &context, .token_ids = ids + context,
                         .positions = positions + context};
            const float *hidden = baton_hidden(decoder, &step);
            float *found = (chunk == TOKENS ? logits : again) + context * WORDS;
            baton_logits(decoder, hidden, starts[1], found);
            likeliest_allowed(decoder, KINDS[kind], hidden, starts[1], found);
        }
        baton_free(decoder);
        DEMAND(chunk == TOKENS || !memcmp(logits, again, TOKENS * WORDS * 4), "model %s in chunks of %lld: other bits",
               KINDS[kind], (long long)chunk);
    }
    for (int i = 0; i < TOKENS * WORDS; i++) DEMAND(isfinite(logits[i]), "model %s: logit %d is not finite", KINDS[kind], i);
    char name[64];
    snprintf(name, sizeof name, "model %s, keys in %s", KINDS[kind], halves ? "half" : "float");
    say(name, logits, TOKENS * WORDS * 4);
}

/* A member that wakes late looks up the job of the round that is on then. The last one's place had been used before, by a job
 * whose memory may be gone: it has to have one of its own. */
static void dismissal(void) {
    Team *team = team_new(2, 1);
    for (int i = 0; i < 2 * ROUNDS; i++) TEAM_RUN(team, nothing, &(char){0}, 0);
    team_rest(team);
    uint32_t last = atomic_load(&team->round) % ROUNDS;  /* a member may be about to look this one up */
    for (uint32_t i = 0; i < ROUNDS; i++)
        if (i != last) atomic_store(&team->kept[i].job, (uint64_t)(uintptr_t)attention_job);
    team_dismiss(team);
    uint64_t job = atomic_load(&team->kept[atomic_load(&team->round) % ROUNDS].job);
    DEMAND(job == (uint64_t)(uintptr_t)nothing, "the last round has a job of an earlier one");
    team_free(team);
}

/* Members that rest in the middle of a round leave their chunks to the others, and nobody goes on too early. */
enum { BURST_PHASES = 40, BURST_PIECES = 7 };
typedef struct { uint32_t (*values)[BURST_PIECES]; } BurstJob;

static uint32_t burst_value(const uint32_t *before, int64_t chunk) {
    uint32_t sum = (uint32_t)chunk + 1;
    for (int i = 0; i < BURST_PIECES; i++) sum = sum * 31 + before[i];
    return sum;
}

static void burst_job(Member *me, const void *with) {
    uint32_t (*values)[BURST_PIECES] = ((const BurstJob *)with)->values;
    for (int p = 1; p < BURST_PHASES; p++) {
        for (int64_t chunk; (chunk = next_chunk(me, BURST_PIECES)) >= 0;) values[p][chunk] += burst_value(values[p - 1], chunk);
        barrier(me, BURST_PIECES);
    }
}

/* `pushed`: members are made to rest from outside, which is a race of this test. */
static void bursts(int pushed) {
    static uint32_t expected[BURST_PHASES][BURST_PIECES], values[BURST_PHASES][BURST_PIECES];
    for (int p = 1; p < BURST_PHASES; p++)
        for (int i = 0; i < BURST_PIECES; i++) expected[p][i] = burst_value(expected[p - 1], i);
    Team *team = team_new(3, BURST_PHASES);
    int different = 0;
    for (int round = 0; round < 300; round++) {
        memset(values, 0, sizeof values);
        team_rest(team);
        for (int i = 1; i < team->threads && pushed; i++)  /* nothing under way: a burst that ends somewhere in the next round */
            team->members[i].pause = PAUSE_LEAST * 1.1, team->members[i].burst_end = nanoseconds() + round * 300;
        TEAM_RUN(team, burst_job, &(BurstJob){values}, BURST_PHASES);
        different += memcmp(values, expected, sizeof values) != 0;
    }
    DEMAND(different == 0, "members that rest change what comes out");
    team_free(team);

    int64_t pause = 0, aside = 0, alone = 0, rarely = 10 * AGAIN_NANOSECONDS;
    DEMAND(next_pause(0, 1, rarely) == 0, "being set aside once makes a member rest");
    for (; pause < PAUSE_MOST; aside++) pause = next_pause(pause, 1, 0);
    DEMAND(aside < 10 && next_pause(pause, 1, rarely) == PAUSE_MOST, "a pause does not become long enough soon");
    for (; pause; alone++) pause = next_pause(pause, 0, rarely);
    DEMAND(alone > 20 && alone < 200, "a pause does not become shorter again, slowly");
}

static const double SCORES[] = {10.0, 300.0, 900.0, 1100.0, 4000.0, 1e5, 1e8, 1e20};  /* to base 2 */

/* A member that rests, or for whom nothing is left of a product, does not prepare rows that it will not use. */
static void idle_members(void) {
    static Model none = {.hidden = 64};
    Decoder *decoder = baton_new(&none, 1);
    Matrix m = {.kind = F32, .outputs = 64, .inputs = 64, .panels = 2};
    float x[64] = {1.0f};
    Rows shared = {.width = 64};
    Source from = {x, {NULL, NULL}, &m};
    Phase *phase = &decoder->team->phases[0];
    const int64_t chunks = chunks_of(&m, 1, 1);
    for (int way = 0; way < 4; way++) {
        Member me = {.team = decoder->team, .round = 7, .resting = way == 1};
        atomic_store(&phase->taken, (uint64_t)(way == 2 ? 8 : 7) << 32 | (uint64_t)(way == 3 ? chunks : 0));
        decoder->alone[0].plain[0] = 0.0f;
        prepare(&me, decoder, &from, 1, &shared);
        DEMAND((decoder->alone[0].plain[0] != 0.0f) == (way == 0), "way %d of taking no piece: rows were %sprepared", way, way ? "" : "not ");
    }
    atomic_store(&phase->taken, 0);
    baton_free(decoder);
}

/* `selftest threads`: what members of a team do together, and nothing else. `selftest briefly`: one case of everything, for
 * sanitizers that make it slow. */
int main(int count, char **words) {
    int threads_alone = count > 1 && !strcmp(words[1], "threads"), briefly = count > 1 && !strcmp(words[1], "briefly");
    if (baton_allow()) return puts("the system does not allow these instructions"), 2;
#if defined(__FMA__) || defined(__aarch64__)
    puts("rounds once");
#else
    puts("rounds twice");
#endif
    printf("lanes %d\n", LANES);
    printf("tiles %d\n", HAS_AMX);
    static Model none;
    Decoder *decoders[2] = {baton_new(&none, 1), baton_new(&none, 2)};
    functions();
    halves();
    dismissal();
    bursts(!threads_alone && !briefly);
    idle_members();
    for (int kind = F32; kind <= GROUPED_INT8 && !threads_alone; kind++) {
        if (!is_matrix(kind)) continue;
        if (kind == F32) product(decoders, kind, 33, 37, 17);
        product(decoders, kind, 33, 32, briefly ? 20 : 130);
        if (briefly) continue;
        product(decoders, kind, 96, 288, 40);
        product(decoders, kind, 70, 1024, 40);
        gated_product(decoders[0], kind);
    }
    static const Case cases[] = {
        {4, 4, 64, 16, 0, 0}, {6, 2, 64, 16, 0, 0}, {7, 1, 128, 32, 0, 0},
        {8, 2, 20, 8, 50, 0}, {3, 1, 8, 3, 0, 0}, {10, 2, 32, 64, 33, 0},
    };
    for (KVKind kv = KV_F32; kv <= KV_INT8 && !threads_alone; kv++)
        for (size_t i = 0; i < (briefly ? 1 : sizeof cases / sizeof *cases); i++) {
            Case c = cases[i];
            c.kv = kv;
            if (kv == KV_INT8) c.block = 16, c.dim = c.dim < 128 ? 64 : 128;
            attention(decoders, &c);
        }
    for (int kind = F32; kind <= Q4_1; kind++) model(kind, kind % 2);
    for (size_t i = 0; !threads_alone && i < (briefly ? 1 : sizeof SCORES / sizeof *SCORES); i++) {
        large_scores(decoders, KV_INT8, i % 2 ? 128 : 64, SCORES[i]);
        large_scores(decoders, KV_F32, 64, SCORES[i]);
    }
    baton_free(decoders[0]), baton_free(decoders[1]);
    if (wrong) printf("%d WRONG\n", wrong);
    return wrong != 0;
}
