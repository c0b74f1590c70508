/* A thread team whose members run the phases of a round together.
 *
 *   round     one job: the work of one call of the library
 *   phase     work divided into chunks; a free member takes the next (take). A phase ends when all of its chunks are done, even
 *             if a member never arrived: a descheduled member delays no other, unless it holds a chunk
 *   meet      the end of a phase: no member continues before all chunks are done
 *
 * A late member runs through the finished phases without finding a chunk, and joins the others; if the round has ended, it
 * waits for the next. So data that a member reads outside of a chunk must be its own, or belong to the library and stay
 * allocated (team_rest waits until no member is running).
 *
 * A waiting member spins for a moment (a phase of one decoded token lasts microseconds, sleeping costs more), then sleeps
 * until it is woken: spinning would hold cores that other processes need.
 *
 * Beside a busy neighbour a member is descheduled for milliseconds, and if it holds a chunk, all wait for it. So a member that
 * was descheduled works in bursts, shorter than the system's time slices, and rests in between without a chunk, for as long as
 * needed not to be interrupted (next_pause).
 */
#pragma once

#include "tuning.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define LINE 64                    /* bytes of a cache line: what different threads write lies in different ones */
#define ROUNDS 64                  /* whose jobs are kept for members that come late */
#define JOB_BYTES 256
#define STACK_BYTES (1 << 20)      /* systems give from 128 KiB (musl) to 8 MiB; attention takes 350 KiB where heads are 512 wide */

typedef struct Team Team;

typedef struct {
    _Alignas(LINE) Team *team;
    int number;
    uint32_t round, phase;
    uint32_t chunks;          /* of this phase that this member has taken */
    _Atomic uint32_t at_work;
    int resting;              /* takes no more chunks of this round, and waits for no member */
    int64_t pause, burst_end; /* 0: it works all the time */
    int64_t aside;            /* when it was last descheduled */
    int64_t slept;            /* in this round, nanoseconds */
} Member;

typedef void (*Job)(Member *me, const void *with);

/* `done` only grows, over all rounds: a member that sleeps on a value must not see the same value later, or it would sleep on after the
 * end of its round. */
typedef struct {
    _Alignas(LINE) _Atomic uint64_t taken;  /* round << 32 | chunks */
    _Atomic uint32_t done;                  /* chunks, in all rounds */
    _Atomic uint32_t before;                /* of them, those of earlier rounds */
} Phase;

/* A job and its arguments, word by word: a very late member may read while they are written for another round. */
#define JOB_WORDS (JOB_BYTES / 8)

typedef struct {
    _Atomic uint64_t job;
    _Atomic uint64_t with[JOB_WORDS];
} Kept;

struct Team {
    int threads;
    _Atomic uint32_t stop;
    _Atomic uint32_t caller_lost;           /* it was descheduled in the last round */
    pthread_t *handles;
    Member *members;
    Phase *phases;
    Kept kept[ROUNDS];
    _Alignas(LINE) _Atomic uint32_t round;  /* 0 before the first */
    _Alignas(LINE) _Atomic int32_t asleep;
    _Atomic uint64_t *progress;             /* advanced by the calling thread, for watchdogs. Never NULL */
    _Atomic uint64_t unwatched;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
};

static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static inline int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Waits until the word is no longer `old`, but not longer than the timeout, if that is not 0. */
static void sleep_while(Team *team, _Atomic uint32_t *word, uint32_t old, int64_t most) {
    struct timespec time = {most / 1000000000, most % 1000000000};
#if !defined(__linux__)
    if (most) { nanosleep(&time, NULL); return; }
#endif
    atomic_fetch_add(&team->asleep, 1);
#if defined(__linux__)
    if (atomic_load(word) == old) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, most ? &time : NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->mutex);
    if (atomic_load(word) == old) pthread_cond_wait(&team->changed, &team->mutex);
    pthread_mutex_unlock(&team->mutex);
#endif
    atomic_fetch_sub(&team->asleep, 1);
}

static void wake(Team *team, _Atomic uint32_t *word) {
    if (atomic_load(&team->asleep) == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
    pthread_mutex_lock(&team->mutex);
    pthread_cond_broadcast(&team->changed);
    pthread_mutex_unlock(&team->mutex);
#endif
}

/* A wait spins for a while, then sleeps. It does not yield: that would give a whole time slice to another process. */
typedef struct { int looks; int64_t since; } Wait;

static inline int time_to_sleep(Wait *wait, int64_t looking) {
    cpu_relax();
    if (++wait->looks % LOOKS) return 0;
    int64_t now = nanoseconds();
    if (!wait->since) wait->since = now;
    return now - wait->since > looking;
}

/* Something was done. One writer, so no locked addition; and one line that no other member touches. */
static inline void advance(const Member *me) {
    if (me->number) return;
    _Atomic uint64_t *word = me->team->progress;
    atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* The number of the next chunk of this phase, or -1: none is left for this member, or the round has ended. */
static inline int64_t next_chunk(Member *me, int64_t chunks) {
    if (me->burst_end && nanoseconds() >= me->burst_end) me->resting = 1;
    if (me->resting) return -1;
    Phase *phase = &me->team->phases[me->phase];
    uint64_t seen = atomic_load_explicit(&phase->taken, memory_order_acquire);
    do {
        if (seen >> 32 != me->round || (int64_t)(uint32_t)seen >= chunks) return -1;
    } while (!atomic_compare_exchange_weak_explicit(&phase->taken, &seen, seen + 1, memory_order_acq_rel, memory_order_acquire));
    me->chunks++;
    advance(me);
    return (int64_t)(uint32_t)seen;
}

/* Whether take() may still find a chunk of this phase; if not, it will not. */
static inline int any_left(const Member *me, int64_t chunks) {
    uint64_t seen = atomic_load_explicit(&me->team->phases[me->phase].taken, memory_order_acquire);
    return !me->resting && seen >> 32 == me->round && (int64_t)(uint32_t)seen < chunks;
}

/* Reports this member's chunks, waits for those of the others, and enters the next phase. */
static void barrier(Member *me, int64_t chunks) {
    Team *team = me->team;
    Phase *phase = &team->phases[me->phase++];
    advance(me);
    if (me->chunks) {
        atomic_fetch_add(&phase->done, me->chunks);
        me->chunks = 0;
        wake(team, &phase->done);
    }
    for (Wait wait = {0, 0}; !me->resting;) {
        uint32_t done = atomic_load_explicit(&phase->done, memory_order_acquire);
        uint32_t before = atomic_load_explicit(&phase->before, memory_order_acquire);
        /* Read last: if it is still this round, earlier reads were of this round. */
        if (atomic_load_explicit(&phase->taken, memory_order_acquire) >> 32 != me->round || done - before >= chunks) return;
        if (!time_to_sleep(&wait, PHASE_NANOSECONDS)) continue;
        int64_t since = nanoseconds();
        sleep_while(team, &phase->done, done, 0);
        me->slept += nanoseconds() - since;
    }
}

/* ---- neighbours ---- */

typedef struct { int64_t wall, worked; } Clocks;

static Clocks clocks(void) {
    struct timespec worked;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &worked);
    return (Clocks){nanoseconds(), worked.tv_sec * 1000000000LL + worked.tv_nsec};
}

/* Whether it neither worked nor slept for a good part of the time since then. */
static int was_set_aside(Clocks then, int64_t slept) {
    Clocks now = clocks();
    int64_t wall = now.wall - then.wall, lost = wall - (now.worked - then.worked) - slept;
    return lost > LOST_NANOSECONDS && lost > wall / 3;
}

/* Between two bursts, by how the last one went: soon long enough, and slowly shorter again. `since`: the time before, in nanoseconds. */
static int64_t next_pause(int64_t pause, int set_aside, int64_t since) {
    if (set_aside && pause) return pause < PAUSE_MOST / 2 ? 2 * pause : PAUSE_MOST;
    if (set_aside) return since < AGAIN_NANOSECONDS ? PAUSE_FIRST : 0;
    pause -= pause > 2 * PAUSE_FIRST ? pause / 10 : pause / 50;
    return pause < PAUSE_LEAST ? 0 : pause;
}

/* This member takes no part in the rest of the round in which a burst ended. */
static void rest_between_bursts(Member *me) {
    if (!me->pause || nanoseconds() < me->burst_end) return;
    sleep_while(me->team, &me->team->stop, 0, me->pause);
    me->burst_end = nanoseconds() + BURST_NANOSECONDS;
}

/* ---- jobs ---- */

static void keep_job(Team *team, uint32_t round, Job job, const void *with, size_t size) {
    Kept *kept = &team->kept[round % ROUNDS];
    uint64_t words[JOB_WORDS] = {0};
    memcpy(words, with, size);
    atomic_store_explicit(&kept->job, (uint64_t)(uintptr_t)job, memory_order_release);
    for (size_t i = 0; i < (size + 7) / 8; i++) atomic_store_explicit(&kept->with[i], words[i], memory_order_release);
}

/* The job of a round, or NULL if its place has been reused since. A reader that got a word of a later round also sees that this round
 * has ended. */
static Job kept_job(Team *team, uint32_t round, uint64_t *with) {
    Kept *kept = &team->kept[round % ROUNDS];
    Job job = (Job)(uintptr_t)atomic_load_explicit(&kept->job, memory_order_acquire);
    for (int i = 0; i < JOB_WORDS; i++) with[i] = atomic_load_explicit(&kept->with[i], memory_order_acquire);
    return atomic_load(&team->round) - round < ROUNDS / 2 ? job : NULL;
}

static void *member_life(void *argument) {
    Member *me = argument;
    Team *team = me->team;
    for (;;) {
        rest_between_bursts(me);
        for (Wait wait = {0, 0}; atomic_load_explicit(&team->round, memory_order_acquire) == me->round;)
            if (time_to_sleep(&wait, me->pause ? 0 : ROUND_NANOSECONDS)) sleep_while(team, &team->round, me->round, 0);
        if (atomic_load(&team->stop)) return NULL;
        atomic_store(&me->at_work, 1);
        me->round = atomic_load(&team->round), me->phase = 0, me->chunks = 0, me->resting = 0, me->slept = 0;
        _Alignas(16) uint64_t with[JOB_WORDS];
        Job job = kept_job(team, me->round, with);
        Clocks then = clocks();
        if (job) job(me, with);
        atomic_store(&me->at_work, 0);
        int set_aside = was_set_aside(then, me->slept) || atomic_exchange(&team->caller_lost, 0);
        if (set_aside || me->resting) me->pause = next_pause(me->pause, set_aside, nanoseconds() - me->aside);
        if (set_aside) me->aside = nanoseconds();
        if (!me->pause) me->burst_end = 0;
        else if (set_aside) me->burst_end = 1;  /* long ago */
    }
}

/* Runs the job on all members, the caller among them; returns when it is done. `*with` is copied. At most `phases` are used. */
#define TEAM_RUN(team, job, with, phases)                                               \
    do {                                                                                \
        _Static_assert(sizeof *(with) <= JOB_BYTES, "a job works with JOB_BYTES at most"); \
        team_run(team, job, with, sizeof *(with), phases);                              \
    } while (0)

static void team_run(Team *team, Job job, const void *with, size_t size, int64_t phases) {
    uint32_t round = atomic_load(&team->round) + 1;
    Member *me = &team->members[0];
    keep_job(team, round, job, with, size);
    for (int64_t p = 0; p < phases; p++) {
        /* In this order: a late member that sees nothing done must also see that this is another round. */
        atomic_store_explicit(&team->phases[p].taken, (uint64_t)round << 32, memory_order_release);
        uint32_t done = atomic_load_explicit(&team->phases[p].done, memory_order_relaxed);
        atomic_store_explicit(&team->phases[p].before, done, memory_order_release);
    }
    atomic_store(&team->round, round);
    wake(team, &team->round);
    me->round = round, me->phase = 0, me->chunks = 0, me->slept = 0;
    Clocks then = clocks();
    job(me, with);
    if (was_set_aside(then, me->slept)) atomic_store(&team->caller_lost, 1);
}

static void nothing(Member *me, const void *with) { (void)me, (void)with; }

/* Waits until no member is running, before memory is freed that members may read. A late member finds an empty round. */
static void team_rest(Team *team) {
    TEAM_RUN(team, nothing, &(char){0}, 0);
    for (int i = 1; i < team->threads; i++)
        while (atomic_load(&team->members[i].at_work)) sched_yield();
}

/* No member has any work left. */
static void team_dismiss(Team *team) {
    uint32_t round = atomic_load(&team->round) + 1;
    atomic_store(&team->stop, 1);
    wake(team, &team->stop);
    keep_job(team, round, nothing, "", 0);  /* for a member that woke for the previous round, and looks for its job only now */
    atomic_store(&team->round, round);
    wake(team, &team->round);
}

static void team_free(Team *team) {
    team_dismiss(team);
    for (int i = 1; i < team->threads; i++) pthread_join(team->handles[i], NULL);
    free(team->handles);
    free(team->members);
    free(team->phases);
    free(team);
}

static void *lines(size_t size) {
    void *memory = aligned_alloc(LINE, (size + LINE - 1) / LINE * LINE);
    if (memory) memset(memory, 0, size);
    return memory;
}

/* NULL: not enough memory. If the system provides fewer threads than requested, these are used. */
static Team *team_new(int threads, int64_t phases) {
    Team *team = lines(sizeof *team);
    if (!team) return NULL;
    team->threads = 1;
    team->progress = &team->unwatched;
    team->handles = lines((size_t)threads * sizeof *team->handles);
    team->members = lines((size_t)threads * sizeof *team->members);
    team->phases = lines((size_t)phases * sizeof *team->phases);
    if (!team->handles || !team->members || !team->phases) return team_free(team), NULL;
#if !defined(__linux__)
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->changed, NULL);
#endif
    for (int i = 0; i < threads; i++) team->members[i].team = team, team->members[i].number = i;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes)) return team;
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (int i = 1; i < threads; i++, team->threads++)
        if (pthread_create(&team->handles[i], &attributes, member_life, &team->members[i])) break;
    pthread_attr_destroy(&attributes);
    return team;
}
