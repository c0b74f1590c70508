/* A team of threads that walks through the phases of a step together.
 *
 *   phase     work cut into pieces; whoever is free takes the next (take), so a member that the system has set aside for a
 *             neighbour process does not hold the others up for more than one piece
 *   meet      the end of a phase: nobody goes on before all are there
 *
 * Who waits looks for a moment (a phase of one decoded token lasts microseconds, falling asleep costs more), then sleeps
 * until it is woken: cores that others want are not held by spinning.
 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define LOOKS 64                 /* between two looks at the clock */
#define LOOK_NANOSECONDS 40000   /* then sleep */
#define LINE 64                  /* bytes of a cache line: what different threads write lies in different ones */

typedef struct Team Team;

typedef struct {
    Team *team;
    int number;
    uint32_t phase;  /* how many this member has been through; the same for all when they meet */
} Member;

typedef void (*Job)(Member *me, void *with);

struct Team {
    int threads;
    Job job;
    void *with;
    pthread_t *handles;
    Member *members;
    _Alignas(LINE) _Atomic uint32_t round;    /* of jobs; 0 before the first */
    _Alignas(LINE) _Atomic uint32_t phase;    /* the newest that all have finished */
    _Alignas(LINE) _Atomic int32_t missing;
    _Alignas(LINE) _Atomic int32_t asleep;
    struct { _Alignas(LINE) _Atomic int64_t next; } pieces[2];  /* of this phase and of the one after it */
    int stop;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
};

static inline void rest(void) {
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

static void sleep_while(Team *team, _Atomic uint32_t *word, uint32_t old) {
    atomic_fetch_add(&team->asleep, 1);
#if defined(__linux__)
    while (atomic_load(word) == old) syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
#else
    pthread_mutex_lock(&team->mutex);
    while (atomic_load(word) == old) pthread_cond_wait(&team->changed, &team->mutex);
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

static void await_change(Team *team, _Atomic uint32_t *word, uint32_t old) {
    for (int64_t since = 0;;) {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old) return;
            rest();
        }
        int64_t now = nanoseconds();
        if (!since) since = now;
        else if (now - since > LOOK_NANOSECONDS) break;
    }
    sleep_while(team, word, old);
}

/* The number of the next piece of this phase; whoever gets one that does not exist is done. */
static inline int64_t take(Member *me) {
    return atomic_fetch_add_explicit(&me->team->pieces[me->phase & 1].next, 1, memory_order_relaxed);
}

static void meet(Member *me) {
    Team *team = me->team;
    uint32_t phase = me->phase++;
    if (atomic_fetch_sub(&team->missing, 1) > 1) {
        await_change(team, &team->phase, phase);
        return;
    }
    /* The last one: nobody touches the next phase's counter before the line after these two. */
    atomic_store_explicit(&team->missing, team->threads, memory_order_relaxed);
    atomic_store_explicit(&team->pieces[me->phase & 1].next, 0, memory_order_relaxed);
    atomic_store(&team->phase, me->phase);
    wake(team, &team->phase);
}

static void *member_life(void *argument) {
    Member *me = argument;
    Team *team = me->team;
    for (uint32_t round = 0;; round++) {
        await_change(team, &team->round, round);
        if (team->stop) return NULL;
        team->job(me, team->with);
        meet(me);
    }
}

/* All members do the job, the caller among them; returns when all have. */
static void team_run(Team *team, Job job, void *with) {
    team->job = job;
    team->with = with;
    atomic_fetch_add(&team->round, 1);
    wake(team, &team->round);
    job(&team->members[0], with);
    meet(&team->members[0]);
}

static void team_free(Team *team) {
    team->stop = 1;
    atomic_fetch_add(&team->round, 1);
    wake(team, &team->round);
    for (int i = 1; i < team->threads; i++) pthread_join(team->handles[i], NULL);
    free(team->handles);
    free(team->members);
    free(team);
}

static Team *team_new(int threads) {
    Team *team = aligned_alloc(LINE, (sizeof(Team) + LINE - 1) / LINE * LINE);
    if (!team) return NULL;
    memset(team, 0, sizeof *team);
    team->handles = calloc((size_t)threads, sizeof *team->handles);
    team->members = calloc((size_t)threads, sizeof *team->members);
    if (!team->handles || !team->members) return NULL;
#if !defined(__linux__)
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->changed, NULL);
#endif
    team->threads = 1;
    for (int i = 0; i < threads; i++) team->members[i] = (Member){team, i, 0};
    for (int i = 1; i < threads; i++, team->threads++)
        if (pthread_create(&team->handles[i], NULL, member_life, &team->members[i])) break;  /* fewer will do */
    atomic_store(&team->missing, team->threads);
    return team;
}
