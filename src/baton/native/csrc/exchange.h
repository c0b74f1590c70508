/* Ranks of one set exchange numbers through memory that all of them have mapped (native/exchange.py).
 *
 *   | a line per rank: how often it has met | rank 0: slot, slot | rank 1: slot, slot | ...
 *
 * A rank writes into its slot, meets the others, and reads their slots. Meetings are counted, and a rank has two slots: in meeting n it
 * uses slot n % 2. It writes into that slot again after meeting n + 1, which no rank attends before it has read the slots of meeting n.
 * One meeting per exchange is enough. Slots are added in the order of ranks: the same bits on every rank.
 *
 * A rank that is late is waited for, spinning first, then asleep. After `wait_most` nanoseconds the exchange has failed for good.
 */
#pragma once

#include "thread_team.h"

#define EXCHANGE_HEAD 4096  /* bytes before the first slot */

typedef struct { _Alignas(LINE) _Atomic uint32_t met; _Atomic uint32_t sleepers; } Arrival;

typedef struct {
    int64_t rank, ranks, slot_bytes, wait_most;
    uint8_t *memory;
    uint32_t meetings;         /* so far; of the calling thread */
    _Atomic int32_t missing;   /* a rank that did not come in time, plus 1 */
} Exchange;

static Arrival *arrival_of(const Exchange *x, int64_t rank) { return (Arrival *)(void *)x->memory + rank; }

static void *slot_of(const Exchange *x, int64_t rank, uint32_t meeting) {
    return x->memory + EXCHANGE_HEAD + (rank * 2 + meeting % 2) * x->slot_bytes;
}

/* Not private: the words are shared between processes. */
static void sleep_until_met(Arrival *other, uint32_t seen) {
    const struct timespec most = {0, 100000000};
#if defined(__linux__)
    atomic_fetch_add(&other->sleepers, 1);
    if (atomic_load(&other->met) == seen) syscall(SYS_futex, &other->met, FUTEX_WAIT, seen, &most, NULL, 0);
    atomic_fetch_sub(&other->sleepers, 1);
#else
    (void)other, (void)seen, (void)most;
    nanosleep(&(struct timespec){0, 50000}, NULL);
#endif
}

static void announce(Arrival *own, uint32_t meeting) {
    atomic_store(&own->met, meeting + 1);
#if defined(__linux__)
    if (atomic_load(&own->sleepers)) syscall(SYS_futex, &own->met, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
#endif
}

/* 1 when every rank has come to this meeting; 0 if one has not in time. */
static int meet(Exchange *x, uint32_t meeting) {
    if (atomic_load(&x->missing)) return 0;
    announce(arrival_of(x, x->rank), meeting);
    for (int64_t rank = 0; rank < x->ranks; rank++) {
        Arrival *other = arrival_of(x, rank);
        uint32_t seen;
        for (Wait wait = {0, 0}; (int32_t)((seen = atomic_load(&other->met)) - meeting) <= 0;) {
            if (!time_to_sleep(&wait, PHASE_NANOSECONDS)) continue;
            if (nanoseconds() - wait.since > x->wait_most) return atomic_store(&x->missing, (int32_t)rank + 1), 0;
            sleep_until_met(other, seen);
            wait.looks = LOOKS - 1;  /* looks at the clock again at once */
        }
    }
    return 1;
}

/* out[i] = the sum of number i of all slots of the meeting, from `at` on. */
static void sum_slots(const Exchange *x, uint32_t meeting, int64_t at, int64_t count, float *restrict out) {
    memcpy(out, (const float *)slot_of(x, 0, meeting) + at, (size_t)count * 4);
    for (int64_t rank = 1; rank < x->ranks; rank++) {
        const float *restrict from = (const float *)slot_of(x, rank, meeting) + at;
        for (int64_t i = 0; i < count; i++) out[i] += from[i];
    }
}

/* ---- exchanges outside of a step: 0, or 1 if a rank is missing ---- */

static int exchange_sum(Exchange *x, float *numbers, int64_t count) {
    int64_t most = x->slot_bytes / 4;
    for (int64_t at = 0, size; at < count; at += size) {
        uint32_t meeting = x->meetings++;
        size = count - at < most ? count - at : most;
        memcpy(slot_of(x, x->rank, meeting), numbers + at, (size_t)size * 4);
        if (!meet(x, meeting)) return 1;
        sum_slots(x, meeting, 0, size, numbers + at);
    }
    return 0;
}

/* out: [ranks][bytes]. */
static int exchange_gather(Exchange *x, const uint8_t *part, int64_t bytes, uint8_t *out) {
    for (int64_t at = 0, size; at < bytes; at += size) {
        uint32_t meeting = x->meetings++;
        size = bytes - at < x->slot_bytes ? bytes - at : x->slot_bytes;
        memcpy(slot_of(x, x->rank, meeting), part + at, (size_t)size);
        if (!meet(x, meeting)) return 1;
        for (int64_t rank = 0; rank < x->ranks; rank++) memcpy(out + rank * bytes + at, slot_of(x, rank, meeting), (size_t)size);
    }
    return 0;
}
